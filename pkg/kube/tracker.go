package kube

import (
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"k8s.io/client-go/tools/cache"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// tracker reports objects to a sink and tracks which it has reported. So it finds out after
// an outage which objects have been deleted meanwhile.
type tracker struct {
	sink Sink

	// reported has the objects that the sink knows: true if one is in force, false if it
	// is ignored and a problem was reported.
	reported map[key]bool

	// failed has the errors of objects that could not be read, so that each is logged once.
	failed map[key]string
	log    *slog.Logger

	// ServiceCIDRs are few, and reported all at once.
	cidrs        map[string]*object
	cidrsChanged bool // since the last report
}

func newTracker(sink Sink, log *slog.Logger) *tracker {
	return &tracker{sink: sink, log: log, reported: map[key]bool{}, failed: map[key]string{}, cidrs: map[string]*object{}}
}

// leastToldOf is of how many objects it is told that half of them have gone in one list.
const leastToldOf = 10

// replace reports all objects of a kind, without a flush. Those that the sink knows and that are not
// among them have been deleted.
//
// A Node is the exception: it stays as it is known. If an API server listed no Nodes, all nodes would leave their load
// balancers at once.
func (t *tracker) replace(objects []*object) {
	known, gone := len(t.reported), maps.Clone(t.reported)
	for _, o := range objects {
		delete(gone, o.key)
		t.put(o)
	}
	var kind kind // of all of them
	for k := range gone {
		kind = k.kind
		if kind == kindNode {
			t.sink.Report(k.String(), []lb.Problem{{
				Object: k.String(), Effect: lb.Degraded,
				Message: "the API server does not list it any more; what was known of it stays in force",
				Remedy:  "If the node is to go, end its agent; else find out why the API server does not have the Node",
			}})
			continue
		}
		t.remove(k)
	}
	if (kind == kindService || kind == kindSlice) && known >= leastToldOf && 2*len(gone) >= known {
		t.sink.ReportGone(kindText[kind], len(gone), known)
	}
}

// put reports an object that is new or may have changed, without a flush. If it could not
// be read, its last version stays in force. If it must be ignored, its last version is removed.
func (t *tracker) put(o *object) {
	inForce, known := t.reported[o.key]
	if o.failed != "" {
		if t.failed[o.key] != o.failed {
			t.failed[o.key] = o.failed
			t.log.Error("an object could not be read", "object", o.key, "error", o.failed, "stack", string(o.stack))
		}
		t.reported[o.key] = inForce
		if !inForce && o.service.Name != "" {
			t.sink.Unread(o.key.String(), o.service, o.problems)
		} else {
			t.sink.Report(o.key.String(), o.problems)
		}
		return
	}
	_, failed := t.failed[o.key]
	delete(t.failed, o.key)
	if o.value == nil {
		if inForce {
			t.remove(o.key)
		}
		t.reported[o.key] = false
		t.sink.Report(o.key.String(), o.problems)
		return
	}
	t.reported[o.key] = true
	switch value := o.value.(type) {
	case lb.Service:
		t.sink.SetService(value, o.problems)
	case Slice:
		t.sink.SetSlice(value, o.problems)
	case Node:
		t.sink.SetNode(value, o.problems)
	case Pod:
		t.sink.SetPod(value, o.problems)
	case Namespace:
		t.sink.SetNamespace(value, o.problems)
	case []netip.Prefix: // which are set together
		if failed || known && !inForce {
			t.sink.Report(o.key.String(), nil)
		}
		t.cidrs[o.key.name] = o
		t.cidrsChanged = true
	}
}

// clearFailure clears the report that an object could not be read, if there is one.
func (t *tracker) clearFailure(k key) {
	if _, failed := t.failed[k]; failed {
		delete(t.failed, k)
		t.sink.Report(k.String(), nil)
	}
}

// remove reports that an object was deleted, if the sink knows it, without a flush.
func (t *tracker) remove(k key) {
	inForce, known := t.reported[k]
	delete(t.reported, k)
	t.clearFailure(k)
	if !known {
		return
	}
	if !inForce {
		t.sink.Report(k.String(), nil)
		return
	}
	switch k.kind {
	case kindService:
		t.sink.DeleteService(lb.ServiceName{Namespace: k.namespace, Name: k.name})
	case kindSlice:
		t.sink.DeleteSlice(lb.SliceName{Namespace: k.namespace, Name: k.name})
	case kindNode:
		t.sink.SetNode(Node{Node: lb.Node{Name: k.name}}, nil)
	case kindPod:
		t.sink.SetPod(Pod{Namespace: k.namespace, Name: k.name}, nil)
	case kindNamespace:
		t.sink.SetNamespace(Namespace{Name: k.name}, nil)
	case kindServiceCIDR:
		delete(t.cidrs, k.name)
		t.cidrsChanged = true
	}
}

// flush reports the union of all ServiceCIDRs, if it has changed, and flushes the sink. A
// prefix of two ServiceCIDRs stays when one is deleted.
func (t *tracker) flush() {
	if t.cidrsChanged {
		t.cidrsChanged = false
		var union []netip.Prefix
		var problems []lb.Problem
		for _, name := range slices.Sorted(maps.Keys(t.cidrs)) {
			union = append(union, t.cidrs[name].value.([]netip.Prefix)...)
			problems = append(problems, t.cidrs[name].problems...)
		}
		slices.SortFunc(union, netip.Prefix.Compare)
		t.sink.SetServiceCIDRs(slices.Compact(union), problems)
	}
	t.sink.Flush()
}

// store is the store that a Reflector fills, from one goroutine. It is no cache: it translates every object and
// passes it to the tracker.
type store struct {
	tracker *tracker
	// replaced is called when all objects have been reported.
	replaced func()
}

var _ cache.TransformingStore = (*store)(nil)

// Add implements [cache.Store].
func (s *store) Add(obj any) error {
	s.tracker.put(translate(obj))
	s.tracker.flush()

	return nil
}

// Update implements [cache.Store].
func (s *store) Update(obj any) error { return s.Add(obj) }

// Delete implements [cache.Store].
func (s *store) Delete(obj any) error {
	s.tracker.remove(translate(obj).key)
	s.tracker.flush()

	return nil
}

// Replace reports all objects, in the order of their names. Those of a streamed list have passed the Transformer, those
// of a list in pages have not.
func (s *store) Replace(list []any, _ string) error {
	objects := make([]*object, len(list))
	for i, obj := range list {
		o, ok := obj.(*object)
		if !ok {
			o = translate(obj)
		}
		objects[i] = o
	}
	slices.SortFunc(objects, func(a, b *object) int { return a.key.compare(b.key) })
	s.tracker.replace(objects)
	s.tracker.flush()
	s.replaced()

	return nil
}

// Resync does nothing, because the sink keeps the objects that it needs.
func (s *store) Resync() error { return nil }

// Transformer translates the objects of a streamed list one by one, so that no two
// Kubernetes objects of it are in memory at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return translate(obj), nil }
}

// Feed reports Kubernetes objects to a sink one by one, as a [Watcher] does when they
// change. Tests use it in place of an API server. One goroutine at a time may use it.
type Feed struct {
	tracker  *tracker
	nodeName string
}

// NewFeed returns a Feed that has reported no objects yet. The name of this node must be in
// lower case.
func NewFeed(nodeName string, sink Sink) *Feed {
	return &Feed{tracker: newTracker(sink, slog.Default()), nodeName: nodeName}
}

// Set reports an object that is new or has changed: a pointer to a Service,
// EndpointSlice, Node or ServiceCIDR of k8s.io/api, which stays the caller's. An object
// that no Watcher would select is reported as deleted.
func (f *Feed) Set(obj any) {
	if !selected(obj, f.nodeName) {
		f.Delete(obj)
		return
	}
	f.tracker.put(translate(obj))
	f.tracker.flush()
}

// Delete reports that an object was deleted.
func (f *Feed) Delete(obj any) {
	f.tracker.remove(translate(obj).key)
	f.tracker.flush()
}
