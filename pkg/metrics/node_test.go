package metrics

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

// exposition is a scrape of an agent to which everything has happened.
func exposition(t *testing.T) []byte {
	t.Helper()
	s := newStory(t)
	s.ServiceQueued(Both)
	s.SliceQueued(IPv4)
	s.SliceQueued(IPv6)
	s.SliceQueued(IPv6)
	s.SliceQueued(IPv6)
	s.SliceRead(slice("web", lb.IPv4), true, s.now)
	s.round(Round{Full: true, Failed: true})
	s.SliceRead(slice("web", lb.IPv6), true, s.now)
	s.SliceRead(slice("web", lb.IPv4), true, s.now)
	s.round(Round{})
	s.Probed("/healthz", 200)
	s.Probed("/livez", 503)
	s.Cleaned(s.now, flow.Ended{IPv4: 1, IPv6: 1})
	s.Mended(maps.NameSlots)
	s.Gone("Service", 12)
	s.SocketsEnded(2)

	w := newWorld()
	w.load(1, maps.BackendLoad{Sockets: 2, Flows: 1})
	w.add(1, "ns", "web", "http", 1)
	w.add(2, "ns", "dns", "dns", 2)
	services := w.services(t, 1)
	for id := uint32(1); id <= 2; id++ {
		w.count(id, sent, 3)
		w.count(id, noBackend, 1)
		w.count(id, maps.StatBytesSent, 100)
		w.count(id, maps.StatHandshake+20, 2)
		w.count(id, maps.StatHandshakeTime, 1e6)
		w.count(id, maps.StatUnanswered, 1)
		w.count(id, maps.StatSYNs+1, 1)
		w.count(id, maps.StatSYNRetransmits, 2)
		w.count(id, maps.StatRetransmits, 3)
		w.count(id, maps.StatHiddenRefusals, 1)
	}
	w.later()
	registry, err := NewRegistry(s.Sync, NewNodeCollector("v1", func() (Node, error) { return busyNode(), nil }),
		NewBackends(w.tables(), 1, func() uint64 { return w.moved }))
	lab.Must(t, err)
	families, err := Gatherers{registry, services}.Gather()
	lab.Must(t, err)
	var text bytes.Buffer
	for _, f := range families {
		_, err := expfmt.MetricFamilyToText(&text, f)
		lab.Must(t, err)
	}

	return regexp.MustCompile(`(go_version|platform)="[^"]*"`).ReplaceAll(text.Bytes(), []byte(`$1="here"`))
}

func busyNode() Node {
	return Node{
		Synced: true, Services: 2, Problems: 3, Failed: 1, Taken: 2,
		Writes:    map[string]reconcile.Writes{maps.NameSlots: {Puts: 5}, maps.NameBackends: {Puts: 4, Deletes: 1}},
		Fills:     map[string]reconcile.Fill{maps.NameSlots: {Used: 5, Capacity: 100}, maps.NameAddrs: {Used: 1}},
		Decisions: map[maps.Reason]uint64{maps.ReasonTranslated: 6, maps.ReasonDropUnallocated: 7, 999: 1},
		Silence:   map[string]time.Duration{"services": 1500 * time.Millisecond},
		Effective: true,
		Hooks:     map[string]bool{"connect4": true, "connect6": false},
		Devices:   map[string]int{"pods": 10, "uplink": 1, "none": 2}, DeviceProblems: 1, Others: 1, OpenFiles: 210, MaxFiles: 4096,
		Flows: flow.Status{
			Flows: flow.Usage{Evicted: 8}, Emergency: "full", Emergencies: 9, Expired: 10, Stale: 11,
			Repaired: 12, LoadsRepaired: 13, MasqueradeRetries: 14, StackPorts: 15,
		},
		Healing: health.Healing{Suspects: 16, Episodes: 17, PassedOver: 18},
	}
}

func TestExposition(t *testing.T) {
	golden.Match(t, "testdata/exposition.txt", string(exposition(t)))
}

// Names, units and helps are as Prometheus wants them, but where kube-proxy has
// others.
func TestLint(t *testing.T) {
	problems, err := promlint.New(bytes.NewReader(exposition(t))).Lint()
	lab.Must(t, err)
	for _, p := range problems {
		theirs := p.Metric == "kubeproxy_sync_proxy_rules_no_local_endpoints_total" // a gauge
		if !theirs {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	if len(problems) == 0 {
		t.Error("not even the gauge of kube-proxy that ends in _total is found")
	}
}

// A failed read is reported in the scrape, beside the other metrics.
func TestNodeUnknown(t *testing.T) {
	registry, err := NewRegistry(NewSync(standingClock()), NewNodeCollector("v1", func() (Node, error) { return Node{}, errBroken }))
	lab.Must(t, err)
	families, err := registry.Gather()
	if err == nil || !strings.Contains(err.Error(), errBroken.Error()) {
		t.Errorf("the error is %v", err)
	}
	if !slices.ContainsFunc(names(families), func(name string) bool { return name == "sluice_build_info" }) {
		t.Errorf("of what is known there is only %v", names(families))
	}
}

// Two collectors of the same are an error, and no panic.
func TestRegistryRefuses(t *testing.T) {
	node := func() prometheus.Collector { return NewNodeCollector("v1", nil) }
	if _, err := NewRegistry(NewSync(standingClock()), node(), node()); err == nil {
		t.Error("two collectors of a node are no error")
	}
}
