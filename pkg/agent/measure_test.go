package agent

import (
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/lab"
)

// measured is an agent on fake maps and a clock that the test turns. It does
// one step at a time, when a test calls for it.
type measured struct {
	*agent
	t     *testing.T
	fakes *maps.Fakes
	now   time.Time
}

func newMeasured(t *testing.T) *measured {
	t.Helper()
	m := &measured{t: t, fakes: maps.NewFakes(1000), now: time.Unix(1_700_000_000, 0)}
	writer, err := reconcile.New(reconcile.Config{Tables: m.fakes.Tables, Now: func() time.Time { return m.now }})
	lab.Must(t, err)
	cfg := Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}
	now := func() time.Time { return m.now }
	m.agent = newAgent(cfg, parts{queue: queue.New[*model](nil), metrics: metrics.NewSync(now), writer: writer})

	return m
}

// sync is what the loop does once all is known.
func (m *measured) sync() {
	m.processQueue()
	m.measure(metrics.Round{Full: true}, m.takeOver)
}

// retry is what the loop does when the writer is due.
func (m *measured) retry() { m.measure(metrics.Round{Retry: true}, m.apply) }

func (m *measured) sink() kube.Sink { return sink{m.queue, m.agent.metrics} }

// setSlice sends a slice of the Service web, whose change happened at triggered.
func (m *measured) setSlice(name string, addr string, triggered time.Time) {
	ip := netip.MustParseAddr(addr)
	m.sink().SetSlice(kube.Slice{
		EndpointSlice: lb.EndpointSlice{
			Name: lb.SliceName{Namespace: "ns", Name: name}, Service: web().Name, Family: lb.FamilyOf(ip),
			Ports:     []lb.EndpointPort{{Name: web().Ports[0].Name, Protocol: web().Ports[0].Protocol, Port: 8080}},
			Endpoints: []lb.Endpoint{{Addr: ip, Ready: true, Serving: true}},
		},
		Triggered: triggered,
	}, nil)
}

// check compares one value of a scrape with want: of a histogram, how often it
// was observed.
func (m *measured) check(when, name string, labels map[string]string, want float64) {
	m.t.Helper()
	registry, err := metrics.NewRegistry(m.metrics)
	lab.Must(m.t, err)
	if got := scraped(m.t, registry, "kubeproxy_"+name, labels); got != want {
		m.t.Errorf("%s: %s%v is %v, want %v", when, name, labels, got, want)
	}
}

// scraped returns the value of a series, zero if there is none.
func scraped(t *testing.T, from prometheus.Gatherer, name string, labels map[string]string) float64 {
	t.Helper()
	families, err := from.Gather()
	lab.Must(t, err)
	for _, f := range families {
		for _, series := range f.GetMetric() {
			same := f.GetName() == name && len(series.GetLabel()) == len(labels)
			for _, l := range series.GetLabel() {
				same = same && labels[l.GetName()] == l.GetValue()
			}
			if same {
				return series.GetCounter().GetValue() + series.GetGauge().GetValue() + float64(series.GetHistogram().GetSampleCount())
			}
		}
	}

	return 0
}

var ipv4, ipv6 = map[string]string{"ip_family": "IPv4"}, map[string]string{"ip_family": "IPv6"}

const (
	latency       = "network_programming_duration_seconds"
	rounds        = "sync_proxy_rules_duration_seconds"
	slicesPending = "sync_proxy_rules_endpoint_changes_pending"
)

// What is received before all is known is measured in the first round, which is a
// full one.
func TestMeasuresTheFirstRound(t *testing.T) {
	m := newMeasured(t)
	m.sink().SetService(*web(), nil)
	m.now = m.now.Add(time.Second)
	m.setSlice("web-1", "10.0.1.7", m.now)
	m.setSlice("web-2", "10.0.1.8", m.now.Add(-time.Hour)) // before the agent
	m.processQueue()
	m.retry() // of what an earlier agent left
	m.check("before", rounds, ipv4, 0)
	m.check("before", latency, ipv4, 0)
	m.check("before", slicesPending, nil, 2)
	m.sync()
	m.check("after", rounds, ipv4, 1)
	m.check("after", "sync_full_proxy_rules_duration_seconds", ipv6, 1)
	m.check("after", latency, ipv4, 1)
	m.check("after", slicesPending, nil, 0)
	m.check("after", "sync_proxy_rules_service_changes_total", nil, 1)
}

// After an outage the API server sends everything again, with the old
// triggers: that is no change, and nothing was slow.
func TestRelistIsNoChange(t *testing.T) {
	m := newMeasured(t)
	m.sink().SetService(*web(), nil)
	m.sync()
	m.now = m.now.Add(time.Minute)
	triggered := m.now
	m.setSlice("web-1", "10.0.1.7", triggered)
	m.processQueue()
	m.check("after the change", latency, ipv4, 1)
	m.check("after the change", rounds, ipv4, 2)
	m.now = m.now.Add(time.Hour)
	m.sink().SetService(*web(), nil)
	m.setSlice("web-1", "10.0.1.7", triggered)
	m.sink().SetNode(kube.Node{Node: lb.Node{Name: "node-1"}}, nil)
	m.sink().SetServiceCIDRs(nil, nil)
	m.processQueue()
	m.check("after the list", latency, ipv4, 1)
	m.check("after the list", rounds, ipv4, 2)
	m.check("after the list", "sync_proxy_rules_endpoint_changes_total", nil, 2)
	m.check("after the list", "sync_proxy_rules_service_changes_pending", nil, 0)
	m.check("after the list", "sync_proxy_rules_last_timestamp_seconds", ipv4, float64(m.now.Unix()))
}

// A slice that is deleted before its change was programmed leaves nothing to
// be measured.
func TestDeletedSliceIsNotMeasured(t *testing.T) {
	m := newMeasured(t)
	m.sink().SetService(*web(), nil)
	m.sync()
	m.now = m.now.Add(time.Minute)
	m.setSlice("web-1", "10.0.1.7", m.now)
	m.sink().DeleteSlice(lb.SliceName{Namespace: "ns", Name: "web-1"})
	m.sink().DeleteSlice(lb.SliceName{Namespace: "ns", Name: "unknown"})
	m.processQueue()
	m.check("after both", latency, ipv4, 0)
	m.check("after both", slicesPending, nil, 0)
	m.check("after both", rounds, ipv4, 2)
}

// What cannot be written is measured when it is, and the round that failed is
// none that all was in the maps after.
func TestMeasuresWhatFailed(t *testing.T) {
	m := newMeasured(t)
	m.sink().SetService(*web(), nil)
	m.sync()
	synced := float64(m.now.Unix())
	m.now = m.now.Add(time.Minute)
	m.fakes.Observe(func(table, _ string) error {
		if table == maps.NameBackends {
			return errors.New("no")
		}

		return nil
	}, nil)
	m.setSlice("web-1", "10.0.1.7", m.now)
	m.processQueue()
	m.check("after the failure", latency, ipv4, 0)
	m.check("after the failure", rounds, ipv4, 2)
	m.check("after the failure", "sync_proxy_rules_last_timestamp_seconds", ipv4, synced)
	m.now = m.now.Add(time.Minute)
	m.fakes.Observe(nil, nil)
	m.retry()
	m.check("after the retry", latency, ipv4, 1)
	m.check("after the retry", rounds, ipv4, 3)
	m.check("after the retry", "sync_proxy_rules_last_timestamp_seconds", ipv4, float64(m.now.Unix()))
}

// Ports with a policy Local and no endpoint here are counted as long as there is
// their Service.
func TestMeasuresNoLocalEndpoints(t *testing.T) {
	m := newMeasured(t)
	svc := *web()
	svc.InternalPolicy = lb.Local
	internal := map[string]string{"ip_family": "IPv4", "traffic_policy": "internal"}
	m.sink().SetService(svc, nil)
	m.setSlice("web-1", "10.0.1.7", time.Time{})
	m.sync()
	m.check("with endpoints elsewhere", "sync_proxy_rules_no_local_endpoints_total", internal, 1)
	m.sink().DeleteService(svc.Name)
	m.processQueue()
	m.check("when the Service is gone", "sync_proxy_rules_no_local_endpoints_total", internal, 0)
}

// What is put right is counted. A change that comes in the turn in which this ends is measured when it is in force.
func TestMeasuresDrift(t *testing.T) {
	m := newMeasured(t)
	m.compare(t.Context())
	m.check("before all is known", rounds, ipv4, 0)
	m.sink().SetService(*web(), nil)
	m.sync()
	for key := range m.fakes.FrontendIDs.Entries {
		delete(m.fakes.FrontendIDs.Entries, key)

		break
	}
	begin, comparison := time.Now(), m.writer.Compare(true)
	for range comparison.Steps() {
	}
	m.now = m.now.Add(time.Minute)
	m.fakes.Observe(func(string, string) error { return errors.New("no") }, nil)
	m.setSlice("web-1", "10.0.1.7", m.now)
	m.queue.Enqueue(func(*model) { m.compared(comparison, begin) })
	m.processQueue()
	m.check("after the check", "sync_full_proxy_rules_duration_seconds", ipv4, 2)
	m.check("of a change that is not in force", latency, ipv4, 0)
	registry, err := metrics.NewRegistry(m.metrics)
	lab.Must(t, err)
	if n := scraped(t, registry, "sluice_map_mended_total", map[string]string{"map": maps.NameFrontendIDs}); n != 1 {
		t.Errorf("%v frontends were mended, want 1", n)
	}
}

// A search for stale flows is measured, with what it has ended of each family.
func TestMeasuresCleanUps(t *testing.T) {
	pinned := mapstest.MustCreate(t, nil)
	m := newMeasured(t)
	var searches atomic.Int32
	flows, err := flow.NewMonitor(flow.MonitorConfig{
		Config: flow.Config{Maps: pinned}, Log: slog.New(slog.DiscardHandler), Swept: func(flow.OriginalDsts) {},
		Searched: func(begin time.Time, ended flow.Ended) {
			m.metrics.Cleaned(begin, ended)
			searches.Add(1)
		},
	})
	lab.Must(t, err)
	mustPutFlow(t, pinned.Flows, 1)
	mustPutFlow(t, pinned.Unanswered, 2)
	end := lab.MustRun(t, flows.Run)
	for n := range int32(2) {
		flows.EndStale()
		lab.Eventually(t, "searched", func() bool { return searches.Load() > n })
	}
	end()
	m.check("after two searches", "conntrack_reconciler_sync_duration_seconds", ipv4, 2)
	m.check("after two searches", "conntrack_reconciler_sync_duration_seconds", ipv6, 2)
	m.check("after two searches", "conntrack_reconciler_deleted_entries_total", ipv4, 2)
	m.check("after two searches", "conntrack_reconciler_deleted_entries_total", ipv6, 0)
}

// modelStats returns the numbers of the model and the writer.
func TestModelStats(t *testing.T) {
	m := newMeasured(t)
	m.sink().SetService(*web(), []lb.Problem{{Object: "Service ns/web", Field: "f", Message: "m"}})
	m.setSlice("web-1", "10.0.1.7", time.Time{})
	m.sync()
	m.impaired.Failed = map[lb.ServiceName]string{web().Name: "no"}
	n := m.modelStats()
	// One problem was found when the Service was read, one when its frontends were decided.
	if !n.Synced || n.Services != 1 || n.Problems != 2 || n.Failed != 1 || n.Taken != 0 {
		t.Errorf("stats: %+v", n)
	}
	if fill := n.Fills[maps.NameFrontendIDs]; fill.Used != len(m.fakes.FrontendIDs.Entries) {
		t.Errorf("%d frontends are counted, there are %d", fill.Used, len(m.fakes.FrontendIDs.Entries))
	}
	if w := n.Writes[maps.NameBackends]; w.Puts != 1 || w.Deletes != 0 {
		t.Errorf("writes of backends: %+v, want 1", w)
	}
}
