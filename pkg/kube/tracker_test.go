package kube

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// Objects are reported to the sink on every way into the store.
func TestStore(t *testing.T) {
	sink := newRecorder()
	replaced := 0
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() { replaced++ }}
	lab.Must(t, s.Replace([]any{service("a", "10.96.0.1"), service("b", "10.96.0.2")}, "1"))
	mustHave(t, sink, "Service default/a", "Service default/b")

	lab.Must(t, s.Add(service("c", "10.96.0.3")))
	lab.Must(t, s.Update(service("b", "10.96.0.9")))
	lab.Must(t, s.Delete(service("a", "10.96.0.1")))
	lab.Must(t, s.Delete(service("unknown", "10.96.0.1")))
	lab.Must(t, s.Resync())
	mustHave(t, sink, "Service default/b", "Service default/c")
	mustBecome(t, sink, "Service default/b", "[10.96.0.9] [] [80/TCP]")

	streamed, err := s.Transformer()(service("d", "10.96.0.4"))
	lab.Must(t, err)
	lab.Must(t, s.Replace([]any{streamed, service("c", "10.96.0.3")}, "2"))
	mustHave(t, sink, "Service default/c", "Service default/d")

	lab.Must(t, s.Replace(nil, "3"))
	mustHave(t, sink)
	if replaced != 3 {
		t.Errorf("replaced was called %d times, want 3", replaced)
	}
	if n := len(s.tracker.reported); n != 0 {
		t.Errorf("%d names are kept of nothing", n)
	}
}

// Objects of a list are reported in the order of their names, as an API server lists them, although a streamed list comes in
// no order.
func TestStoreReportsInOrder(t *testing.T) {
	sink := newRecorder()
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	lab.Must(t, s.Replace([]any{service("c", "10.96.0.3"), service("a", "10.96.0.1"), service("d", "10.96.0.4"), service("b", "10.96.0.2")}, "1"))
	var names []string
	for _, call := range sink.take() {
		names = append(names, strings.Fields(call)[2])
	}
	if want := []string{"default/a", "default/b", "default/c", "default/d"}; !slices.Equal(names, want) {
		t.Errorf("reported in the order %v, want %v", names, want)
	}
}

// A slice that loses its Service is reported as deleted, and the report ends with
// the slice.
func TestStoreIgnoredSlice(t *testing.T) {
	sink := newRecorder()
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	lost := slice("web-1", "", "10.0.1.7")
	for _, step := range []struct {
		do       func() error
		inForce  int
		reported int
	}{
		{func() error { return s.Add(slice("web-1", "web", "10.0.1.7")) }, 1, 0},
		{func() error { return s.Update(lost) }, 0, 1},
		{func() error { return s.Replace([]any{lost}, "1") }, 0, 1},
		{func() error { return s.Update(slice("web-1", "web", "10.0.1.7")) }, 1, 0},
		{func() error { return s.Update(lost) }, 0, 1},
		{func() error { return s.Replace(nil, "2") }, 0, 0},
	} {
		lab.Must(t, step.do())
		if got := len(sink.names()); got != step.inForce {
			t.Errorf("%d slices are in force, want %d", got, step.inForce)
		}
		if got := len(sink.problems("web-1")); got != step.reported {
			t.Errorf("%d problems are reported, want %d", got, step.reported)
		}
	}
}

// It is told when at least half of the Services or slices that were known have gone in one list, unless they are few. What
// is gone is deleted all the same.
func TestStoreTellsWhatHasGone(t *testing.T) {
	services := func(from, to int) (list []any) {
		for i := from; i < to; i++ {
			list = append(list, service(fmt.Sprintf("s%d", i), "10.96.0.1"))
		}
		return list
	}
	slices := []any{}
	for i := range 12 {
		slices = append(slices, slice(fmt.Sprintf("s%d", i), "web", "10.0.1.7"))
	}
	for _, test := range []struct {
		name          string
		before, after []any
		want          string
	}{
		{"less than half", services(0, 20), services(9, 20), ""},
		{"half", services(0, 20), services(10, 20), "gone Service: 10 of 20"},
		{"all", services(0, 10), nil, "gone Service: 10 of 10"},
		{"half of few", services(0, 9), nil, ""},
		{"all, and others come", services(0, 10), services(10, 30), "gone Service: 10 of 10"},
		{"slices", slices, slices[8:], "gone EndpointSlice: 8 of 12"},
	} {
		t.Run(test.name, func(t *testing.T) {
			sink := newRecorder()
			s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
			lab.Must(t, s.Replace(test.before, "1"))
			lab.Must(t, s.Replace(test.after, "2"))
			var told []string
			for _, call := range sink.take() {
				if strings.HasPrefix(call, "gone ") {
					told = append(told, call)
				}
			}
			if got := strings.Join(told, ", "); got != test.want {
				t.Errorf("told %q, want %q", got, test.want)
			}
			if got := len(sink.names()); got != len(test.after) {
				t.Errorf("%d objects are in force, want %d", got, len(test.after))
			}
		})
	}
}

// A prefix that two ServiceCIDRs name stays until both are gone.
func TestStoreServiceCIDRs(t *testing.T) {
	sink := newRecorder()
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	other := cidr("10.97.0.0/16", "10.96.0.0/16")
	other.Name = "other"
	lab.Must(t, s.Replace([]any{cidr("10.96.0.0/16"), other}, "1"))
	mustBecome(t, sink, "ServiceCIDRs", "[10.96.0.0/16 10.97.0.0/16]")
	lab.Must(t, s.Delete(cidr()))
	mustBecome(t, sink, "ServiceCIDRs", "[10.96.0.0/16 10.97.0.0/16]")
	lab.Must(t, s.Delete(other))
	mustBecome(t, sink, "ServiceCIDRs", "[]")
}

// BenchmarkStore lists 10,000 Services and as many slices of 10 endpoints.
// retained-B/object is what this package keeps of each; the heap before it
// has the objects' names, which a Sink keeps anyway.
func BenchmarkStore(b *testing.B) {
	const n = 10_000
	objects := make([]any, 0, 2*n)
	for i := range n {
		objects = append(objects, benchService(i), benchSlice(i))
	}
	var retained uint64
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		before := heap()
		b.StartTimer()
		s := &store{tracker: newTracker(nowhere{}, slog.New(slog.DiscardHandler)), replaced: func() {}}
		lab.Must(b, s.Replace(objects, "1"))
		b.StopTimer()
		retained += heap() - before
		runtime.KeepAlive(s)
		b.StartTimer()
	}
	runtime.KeepAlive(objects)
	b.ReportMetric(float64(retained)/float64(b.N)/(2*n), "retained-B/object")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2*n), "ns/object")
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func benchService(i int) *corev1.Service {
	s := service(fmt.Sprintf("service-%d", i), fmt.Sprintf("10.96.%d.%d", i/250, i%250+1))
	s.Namespace = fmt.Sprintf("namespace-%d", i%100)
	return s
}

func benchSlice(i int) *discoveryv1.EndpointSlice {
	s := slice(fmt.Sprintf("service-%d-x", i), fmt.Sprintf("service-%d", i))
	s.Namespace = fmt.Sprintf("namespace-%d", i%100)
	for e := range 10 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", e, i/250, i%250)},
			NodeName:  ptr.To(fmt.Sprintf("node-%d", i%1000)),
			Zone:      ptr.To("zone-a"),
		})
	}
	return s
}

// nowhere is a Sink that keeps nothing.
type nowhere struct{}

func (nowhere) SetService(lb.Service, []lb.Problem)          {}
func (nowhere) DeleteService(lb.ServiceName)                 {}
func (nowhere) SetSlice(Slice, []lb.Problem)                 {}
func (nowhere) DeleteSlice(lb.SliceName)                     {}
func (nowhere) SetNode(Node, []lb.Problem)                   {}
func (nowhere) ReportGone(string, int, int)                  {}
func (nowhere) SetDialed(netip.AddrPort)                     {}
func (nowhere) SetServiceCIDRs([]netip.Prefix, []lb.Problem) {}
func (nowhere) SetPod(Pod, []lb.Problem)                     {}
func (nowhere) SetNamespace(Namespace, []lb.Problem)         {}
func (nowhere) Report(string, []lb.Problem)                  {}
func (nowhere) Unread(string, lb.ServiceName, []lb.Problem)  {}
func (nowhere) Flush()                                       {}

// An object that cannot be read for a mistake of ours stays as it was, which is reported and
// logged with the stack once. All others are read.
func TestPanicIsOfOneObject(t *testing.T) {
	broken := read(translate(service("a", "10.96.0.1")).key, func(*object) { panic("this cannot be") })
	if broken.value != nil || broken.failed == "" {
		t.Fatalf("a panic makes %+v", broken)
	}
	for _, test := range []struct {
		name  string
		known bool // before it could not be read
	}{{"one that was read before", true}, {"one that is new", false}} {
		t.Run(test.name, func(t *testing.T) {
			var log bytes.Buffer
			sink := newRecorder()
			s := &store{tracker: newTracker(sink, slog.New(slog.NewTextHandler(&log, nil))), replaced: func() {}}
			var inForce []string
			if test.known {
				lab.Must(t, s.Add(service("a", "10.96.0.1")))
				inForce = []string{"Service default/a"}
			}
			s.tracker.put(broken)
			lab.Must(t, s.Replace([]any{broken, service("b", "10.96.0.2")}, "1"))
			mustHave(t, sink, append(inForce, "Service default/b")...)
			problems := sink.problems("a")
			if len(problems) != 1 || !strings.Contains(fmt.Sprint(problems), "Service default/a: internal error, so it stays as it was: panic: this cannot be") {
				t.Errorf("reported is %v", problems)
			}
			if n := strings.Count(log.String(), "could not be read"); n != 1 || !strings.Contains(log.String(), "tracker_test.go") {
				t.Errorf("logged %d times, want once, with the stack:\n%s", n, log.String())
			}
			lab.Must(t, s.Add(service("a", "10.96.0.9")))
			mustBecome(t, sink, "Service default/a", "[10.96.0.9] [] [80/TCP]")
			if problems := sink.problems("a"); len(problems) != 0 {
				t.Errorf("reported is still %v", problems)
			}
			s.tracker.put(broken)
			lab.Must(t, s.Delete(service("a", "10.96.0.1")))
			mustHave(t, sink, "Service default/b")
			if problems := sink.problems("a"); len(problems) != 0 {
				t.Errorf("reported of one that is gone is %v", problems)
			}
		})
	}
}

// An object that could never be read is not in force: its deletion withdraws its problem, and deletes
// nothing that the sink does not know.
func TestObjectThatCouldNeverBeRead(t *testing.T) {
	broken := read(translate(service("a", "10.96.0.1")).key, func(*object) { panic("this cannot be") })
	sink := newRecorder()
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	s.tracker.put(broken)
	lab.Must(t, s.Delete(service("a", "10.96.0.1")))
	if problems := sink.problems("a"); len(problems) != 0 {
		t.Errorf("reported of one that is gone is %v", problems)
	}
	if slices.Contains(sink.calls, "delete Service default/a") {
		t.Errorf("deleted without having been set: %q", sink.calls)
	}
}

// Of which Service an object is that could never be read is reported, so that what it had can stay; of one that is known
// as it was, not.
func TestUnreadObjectOfAService(t *testing.T) {
	of := func(o *object) *object {
		o.value, o.failed, o.stack = nil, "panic: this cannot be", nil

		return o
	}
	sink := newRecorder()
	s := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	s.tracker.put(of(translate(service("a", "10.96.0.1"))))
	s.tracker.put(of(translate(slice("b-1", "b"))))
	lab.Must(t, s.Add(service("c", "10.96.0.3")))
	s.tracker.put(of(translate(service("c", "10.96.0.3"))))
	var unread []string
	for _, call := range sink.calls {
		if strings.HasPrefix(call, "unread") {
			unread = append(unread, call)
		}
	}
	if want := []string{"unread default/a", "unread default/b"}; !slices.Equal(unread, want) {
		t.Errorf("%q, want %q", unread, want)
	}
}

// Of a list in which every element is wrong, a hundred problems are reported, not thousands.
func TestProblemsOfOneObjectAreLimited(t *testing.T) {
	obj := service("a", "10.96.0.1")
	for range 1000 {
		obj.Spec.ExternalIPs = append(obj.Spec.ExternalIPs, "nonsense")
	}
	if n := len(translate(obj).problems); n != lb.MaxProblems+1 {
		t.Errorf("%d problems, want %d", n, lb.MaxProblems+1)
	}
}
