package metrics

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// story is a Sync on a clock that the test turns.
type story struct {
	*Sync
	t       *testing.T
	now     time.Time
	failing map[lb.ServiceName]bool
}

var start = time.Unix(1_700_000_000, 0)

func newStory(t *testing.T) *story {
	s := &story{t: t, now: start, failing: map[lb.ServiceName]bool{}}
	s.Sync = NewSync(func() time.Time { return s.now })

	return s
}

func (s *story) wait(d time.Duration) { s.now = s.now.Add(d) }

// round is one that takes a second.
func (s *story) round(r Round) {
	r.Begin = s.now
	r.Programmed = func(name lb.ServiceName) bool { return !s.failing[name] }
	s.wait(time.Second)
	s.Done(r)
}

// check compares a scrape with want, which names the series that matter.
func (s *story) check(when string, want map[string]float64) {
	s.t.Helper()
	registry, err := NewRegistry(s.Sync)
	lab.Must(s.t, err)
	all := gather(s.t, registry)
	got := make(map[string]float64)
	for name := range want {
		if value, ok := all[name]; ok {
			got[name] = value
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// absent expects that there is no such series.
func (s *story) absent(when, name string) {
	s.t.Helper()
	registry, err := NewRegistry(s.Sync)
	lab.Must(s.t, err)
	if value, ok := gather(s.t, registry)[name]; ok {
		s.t.Errorf("%s: %s is %v, should not be", when, name, value)
	}
}

func slice(service string, family lb.Family) *lb.EndpointSlice {
	return &lb.EndpointSlice{
		Name:    lb.SliceName{Namespace: "ns", Name: service + "-" + family.String()},
		Service: lb.ServiceName{Namespace: "ns", Name: service}, Family: family,
	}
}

func nameOf(service string) lb.ServiceName { return lb.ServiceName{Namespace: "ns", Name: service} }

const (
	rounds      = "kubeproxy_sync_proxy_rules_duration_seconds"
	fullRounds  = "kubeproxy_sync_full_proxy_rules_duration_seconds"
	someRounds  = "kubeproxy_sync_partial_proxy_rules_duration_seconds"
	latency     = "kubeproxy_network_programming_duration_seconds"
	lastDone    = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
	lastQueued  = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
	slicesLeft  = "kubeproxy_sync_proxy_rules_endpoint_changes_pending"
	slicesSeen  = "kubeproxy_sync_proxy_rules_endpoint_changes_total"
	serviceLeft = "kubeproxy_sync_proxy_rules_service_changes_pending"
	serviceSeen = "kubeproxy_sync_proxy_rules_service_changes_total"
	noLocalName = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
	v4, v6      = " ip_family=IPv4", " ip_family=IPv6"
)

// The first round is a full one, under both families. Later ones are observed
// under those whose changes made a difference.
func TestRounds(t *testing.T) {
	s := newStory(t)
	s.absent("before the first round", rounds+v4)
	s.check("at the start", map[string]float64{lastQueued + v4: 1.7e9, lastQueued + v6: 1.7e9})

	s.wait(9 * time.Second)
	s.ServiceQueued(IPv4)
	s.ServiceRead(IPv4, true)
	s.round(Round{Full: true})
	s.check("after the first round", map[string]float64{
		rounds + v4: 1, rounds + v6: 1, fullRounds + v4: 1, fullRounds + v6: 1,
		lastQueued + v4: 1.7e9 + 9, lastQueued + v6: 1.7e9, lastDone + v4: 1.7e9 + 10, lastDone + v6: 1.7e9 + 10,
	})
	s.absent("after the first round", someRounds+v4)

	s.SliceQueued(IPv6)
	s.SliceRead(slice("web", lb.IPv6), true, time.Time{})
	s.round(Round{})
	s.check("after a change of IPv6", map[string]float64{
		rounds + v4: 1, rounds + v6: 2, someRounds + v6: 1, lastDone + v4: 1.7e9 + 10, lastDone + v6: 1.7e9 + 11,
	})

	s.SliceQueued(IPv4)
	s.SliceRead(slice("web", lb.IPv4), false, time.Time{})
	s.round(Round{})
	s.check("after one that changed nothing", map[string]float64{rounds + v4: 1, lastDone + v4: 1.7e9 + 12})
	s.round(Round{})
	s.check("after a round about nothing", map[string]float64{rounds + v4: 1, lastDone + v4: 1.7e9 + 12})

	s.Queued(Both)
	s.Read(Both, true)
	s.round(Round{})
	s.check("after a change of the Node", map[string]float64{rounds + v4: 2, rounds + v6: 3})
}

// A round that failed counts as one, and is no success. Nor is the next one, of
// something else, a try of what failed.
func TestFailedRound(t *testing.T) {
	s := newStory(t)
	s.round(Round{Full: true})
	s.SliceQueued(IPv4)
	s.SliceRead(slice("web", lb.IPv4), true, time.Time{})
	s.round(Round{Failed: true})
	s.check("after the failure", map[string]float64{rounds + v4: 2, lastDone + v4: 1.7e9 + 1})
	s.round(Round{Retry: true, Failed: true})
	s.check("after a try that failed", map[string]float64{rounds + v4: 3, rounds + v6: 1, lastDone + v4: 1.7e9 + 1})
	s.SliceQueued(IPv6)
	s.SliceRead(slice("web", lb.IPv6), true, time.Time{})
	s.round(Round{})
	s.check("after another change", map[string]float64{rounds + v4: 3, rounds + v6: 2})
	s.round(Round{Retry: true})
	s.check("after a try that did not", map[string]float64{rounds + v4: 4, rounds + v6: 2, lastDone + v4: 1.7e9 + 5})
	s.round(Round{Retry: true})
	s.check("once nothing is left to try", map[string]float64{rounds + v4: 4})
}

func TestChanges(t *testing.T) {
	s := newStory(t)
	s.check("at the start", map[string]float64{slicesLeft: 0, slicesSeen: 0, serviceLeft: 0, serviceSeen: 0})
	s.ServiceQueued(Both)
	s.ServiceQueued(Both)
	s.SliceQueued(IPv4)
	s.check("before anything is read", map[string]float64{slicesLeft: 1, slicesSeen: 1, serviceLeft: 2, serviceSeen: 2})
	s.ServiceRead(IPv4, true)
	s.check("before it is in force", map[string]float64{serviceLeft: 2})
	s.round(Round{Failed: true})
	s.check("after a round", map[string]float64{slicesLeft: 1, serviceLeft: 1, serviceSeen: 2})
	s.ServiceRead(IPv4, false)
	s.SliceGone(slice("web", lb.IPv4))
	s.round(Round{})
	s.check("after all", map[string]float64{slicesLeft: 0, slicesSeen: 1, serviceLeft: 0, serviceSeen: 2})
}

// Latency is from the trigger to the end of the round that programmed it. What
// happened before the start is not observed, nor what changed nothing: after an
// outage the API server sends everything again.
func TestLatency(t *testing.T) {
	s := newStory(t)
	s.SliceRead(slice("web", lb.IPv4), true, start)
	s.SliceRead(slice("web", lb.IPv4), true, start.Add(-time.Hour))
	s.SliceRead(slice("web", lb.IPv4), true, time.Time{})
	s.SliceRead(slice("web", lb.IPv4), false, start.Add(time.Millisecond))
	s.round(Round{Full: true})
	s.absent("a slice without a time", latency+v4)

	s.wait(10 * time.Second)
	s.SliceRead(slice("web", lb.IPv4), true, s.now.Add(-1500*time.Millisecond))
	s.SliceRead(slice("web", lb.IPv4), true, s.now.Add(-time.Second))
	s.SliceRead(slice("dns", lb.IPv6), true, s.now.Add(-4*time.Second))
	s.absent("before the round", latency+v4)
	s.round(Round{})
	s.check("after the round", map[string]float64{latency + v4: 2, latency + v6: 1})
	s.checkSums("after the round", map[string]float64{v4: 2.5 + 2, v6: 5})
	s.round(Round{})
	s.check("once, and no more", map[string]float64{latency + v4: 2, latency + v6: 1})
}

// checkSums compares the sums of latencies with want, by family.
func (s *story) checkSums(when string, want map[string]float64) {
	s.t.Helper()
	registry, err := NewRegistry(s.Sync)
	lab.Must(s.t, err)
	families, err := registry.Gather()
	lab.Must(s.t, err)
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == latency {
				got[" ip_family="+m.GetLabel()[0].GetValue()] = m.GetHistogram().GetSampleSum()
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// A slice that goes takes the pending times of its Service and family with it,
// and of no other.
func TestDeletionDiscards(t *testing.T) {
	s := newStory(t)
	s.wait(time.Minute)
	for _, name := range []string{"web", "dns"} {
		s.SliceRead(slice(name, lb.IPv4), true, s.now)
		s.SliceRead(slice(name, lb.IPv6), true, s.now)
	}
	s.SliceGone(slice("web", lb.IPv4))
	s.SliceGone(nil)
	s.round(Round{Full: true})
	s.check("after the round", map[string]float64{latency + v4: 1, latency + v6: 2})
}

// A Service that waits for days does not fill the memory.
func TestTriggersAreBounded(t *testing.T) {
	s := newStory(t)
	s.wait(time.Minute)
	s.failing[nameOf("web")] = true
	for range 10 * maxTriggers {
		s.SliceRead(slice("web", lb.IPv4), true, s.now)
		s.round(Round{Failed: true})
	}
	delete(s.failing, nameOf("web"))
	s.round(Round{Full: true})
	s.check("after the failures", map[string]float64{latency + v4: maxTriggers})
}

// What could not be programmed is observed when it is, with all the time that it
// took. Other Services do not wait for it.
func TestFailureKeepsTriggers(t *testing.T) {
	s := newStory(t)
	s.round(Round{Full: true})
	s.SliceRead(slice("web", lb.IPv4), true, s.now)
	s.SliceRead(slice("dns", lb.IPv4), true, s.now)
	s.failing[nameOf("web")] = true
	s.round(Round{Failed: true})
	s.check("after the failure", map[string]float64{latency + v4: 1})
	s.wait(28 * time.Second)
	delete(s.failing, nameOf("web"))
	s.round(Round{Retry: true})
	s.check("after the retry", map[string]float64{latency + v4: 2})
	s.checkSums("after the retry", map[string]float64{v4: 1 + 30})
}

func TestNoLocalEndpoints(t *testing.T) {
	s := newStory(t)
	frontend := func(port string, kind lb.Kind, addr string, drop bool) lb.Frontend {
		return lb.Frontend{
			Key:         lb.FrontendKey{Addr: netip.MustParseAddr(addr), Port: 80, Protocol: lb.TCP, Scope: lb.External},
			Kind:        kind,
			Port:        lb.PortName{Service: nameOf("web"), Port: port, Protocol: lb.TCP},
			DropIfEmpty: drop,
		}
	}
	s.Resolved(nameOf("web"), lb.Resolution{Frontends: []lb.Frontend{
		frontend("http", lb.KindClusterIP, "10.96.0.1", true),
		frontend("http", lb.KindClusterIP, "10.96.0.2", true), // the same port, once more
		frontend("https", lb.KindClusterIP, "10.96.0.1", true),
		frontend("metrics", lb.KindClusterIP, "10.96.0.1", false),
		frontend("http", lb.KindNodePort, "0.0.0.0", true),
		frontend("http", lb.KindLoadBalancer, "192.0.2.1", true),
		frontend("http", lb.KindNodePort, "::", true),
	}})
	s.Resolved(nameOf("dns"), lb.Resolution{Frontends: []lb.Frontend{frontend("dns", lb.KindClusterIP, "fd00::1", true)}})
	s.absent("before the first round", noLocalName+v4+" traffic_policy=internal")
	want := func(internal4, external4, internal6, external6 float64) map[string]float64 {
		return map[string]float64{
			noLocalName + v4 + " traffic_policy=internal": internal4, noLocalName + v4 + " traffic_policy=external": external4,
			noLocalName + v6 + " traffic_policy=internal": internal6, noLocalName + v6 + " traffic_policy=external": external6,
		}
	}
	s.round(Round{Full: true})
	s.check("as resolved", want(2, 1, 1, 1))
	s.Resolved(nameOf("web"), lb.Resolution{Frontends: []lb.Frontend{frontend("http", lb.KindNodePort, "0.0.0.0", true)}})
	s.Read(Both, true)
	s.round(Round{})
	s.check("resolved again", want(0, 1, 1, 0))
	s.Resolved(nameOf("web"), lb.Resolution{})
	s.Resolved(nameOf("dns"), lb.Resolution{})
	s.round(Round{Full: true})
	s.check("when the Services are gone", want(0, 0, 0, 0))
}

func TestProbesAndCleanUps(t *testing.T) {
	s := newStory(t)
	s.Probed("/healthz", 503)
	s.Probed("/healthz", 200)
	s.Probed("/healthz", 200)
	s.Probed("/livez", 200)
	begin := s.now
	s.wait(2 * time.Second)
	s.Cleaned(begin, flow.Ended{IPv6: 3})
	s.check("afterwards", map[string]float64{
		"kubeproxy_proxy_healthz_total code=200":                    2,
		"kubeproxy_proxy_healthz_total code=503":                    1,
		"kubeproxy_proxy_livez_total code=200":                      1,
		"kubeproxy_conntrack_reconciler_sync_duration_seconds" + v4: 1,
		"kubeproxy_conntrack_reconciler_sync_duration_seconds" + v6: 1,
		"kubeproxy_conntrack_reconciler_deleted_entries_total" + v6: 3,
	})
	s.absent("for a family without any", "kubeproxy_conntrack_reconciler_deleted_entries_total"+v4)
}

func TestFamiliesOf(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")
	for _, test := range []struct {
		name string
		svc  *lb.Service
		want Families
	}{
		{"no Service", nil, None},
		{"headless", &lb.Service{}, None},
		{"one address", &lb.Service{ClusterIPs: []netip.Addr{v6}}, IPv6},
		{"two addresses", &lb.Service{ClusterIPs: []netip.Addr{v4, v6}}, Both},
		{"what is no address", &lb.Service{ClusterIPs: []netip.Addr{{}}, Families: []lb.Family{lb.IPv4}}, IPv4},
	} {
		if got := FamiliesOf(test.svc); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
}
