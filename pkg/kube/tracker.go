package kube

import (
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

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

// set reports an object that is new or may have changed, and flushes the sink.
func (t *tracker) set(o *object) {
	t.put(o)
	t.flushCIDRs()
	t.sink.Flush()
}

// delete reports that an object was deleted, if the sink knows it, and flushes the sink.
func (t *tracker) delete(k key) {
	t.remove(k)
	t.flushCIDRs()
	t.sink.Flush()
}

// replace reports all objects of a kind. Those that the sink knows and that are not among
// objects have been deleted.
func (t *tracker) replace(objects iter.Seq[*object]) {
	gone := maps.Clone(t.reported)
	for o := range objects {
		delete(gone, o.key)
		t.put(o)
	}
	for k := range gone {
		t.remove(k)
	}
	t.flushCIDRs()
	t.sink.Flush()
}

func (t *tracker) put(o *object) {
	if o.failed != "" {
		t.reportFailure(o)
		return
	}
	t.clearFailure(o.key)
	if o.value == nil {
		t.ignore(o)
		return
	}
	if inForce, known := t.reported[o.key]; known && !inForce {
		t.sink.Report(o.key.String(), nil)
	}
	t.reported[o.key] = true
	switch value := o.value.(type) {
	case lb.Service:
		t.sink.SetService(value, o.problems)
	case Slice:
		t.sink.SetSlice(value, o.problems)
	case Node:
		t.sink.SetNode(value, o.problems)
	case []netip.Prefix:
		t.cidrs[o.key.name] = o
		t.cidrsChanged = true
	}
}

// reportFailure reports that an object cannot be read. Its last version stays in force.
func (t *tracker) reportFailure(o *object) {
	if t.failed[o.key] != o.failed {
		t.failed[o.key] = o.failed
		t.log.Error("an object could not be read", "object", o.key, "error", o.failed, "stack", string(o.stack))
	}
	if _, known := t.reported[o.key]; !known {
		t.reported[o.key] = false // the sink knows it, but it is not in force
	}
	t.sink.Report(o.key.String(), o.problems)
}

// clearFailure clears the report that an object could not be read, if there is one.
func (t *tracker) clearFailure(k key) {
	if _, failed := t.failed[k]; failed {
		delete(t.failed, k)
		t.sink.Report(k.String(), nil)
	}
}

// ignore reports why an object is not in force, and removes the version that was.
func (t *tracker) ignore(o *object) {
	if t.reported[o.key] {
		t.remove(o.key)
	}
	t.reported[o.key] = false
	t.sink.Report(o.key.String(), o.problems)
}

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
	case kindServiceCIDR:
		delete(t.cidrs, k.name)
		t.cidrsChanged = true
	}
}

// flushCIDRs reports the union of all ServiceCIDRs, if it has changed. A prefix of two of
// them stays when one is deleted.
func (t *tracker) flushCIDRs() {
	if !t.cidrsChanged {
		return
	}
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
