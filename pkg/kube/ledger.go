package kube

import (
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ledger tells a sink about objects, and keeps which it has told about. That
// is how it knows, after an outage, what went away unseen.
type ledger struct {
	sink Sink

	// told has what the sink knows of: true is in force, false is ignored for
	// a reason that was reported.
	told map[key]bool

	// failed has why objects cannot be read of which that was logged.
	failed map[key]string
	log    *slog.Logger

	// ServiceCIDRs are few, and told about all at once.
	cidrs      map[string]*object
	cidrsMoved bool // since they were last told about
}

func newLedger(sink Sink, log *slog.Logger) *ledger {
	return &ledger{sink: sink, log: log, told: map[key]bool{}, failed: map[key]string{}, cidrs: map[string]*object{}}
}

// set tells about an object that is new or may have changed.
func (l *ledger) set(o *object) {
	l.put(o)
	l.tellCIDRs()
	l.sink.Flush()
}

// delete tells that there is no such object. Unknown ones are no news.
func (l *ledger) delete(k key) {
	l.remove(k)
	l.tellCIDRs()
	l.sink.Flush()
}

// replace tells about all there is. What the sink knows of and is not among
// objects has been deleted.
func (l *ledger) replace(objects iter.Seq[*object]) {
	gone := maps.Clone(l.told)
	for o := range objects {
		delete(gone, o.key)
		l.put(o)
	}
	for k := range gone {
		l.remove(k)
	}
	l.tellCIDRs()
	l.sink.Flush()
}

func (l *ledger) put(o *object) {
	if o.failed != "" {
		l.keep(o)
		return
	}
	l.forgive(o.key)
	if o.value == nil {
		l.ignore(o)
		return
	}
	if inForce, known := l.told[o.key]; known && !inForce {
		l.sink.Report(o.key.String(), nil)
	}
	l.told[o.key] = true
	switch value := o.value.(type) {
	case lb.Service:
		l.sink.SetService(value, o.problems)
	case Slice:
		l.sink.SetSlice(value, o.problems)
	case Node:
		l.sink.SetNode(value, o.problems)
	case []netip.Prefix:
		l.cidrs[o.key.name] = o
		l.cidrsMoved = true
	}
}

// keep reports that an object cannot be read. What was told about it stays in force.
func (l *ledger) keep(o *object) {
	if l.failed[o.key] != o.failed {
		l.failed[o.key] = o.failed
		l.log.Error("an object could not be read", "object", o.key, "error", o.failed, "stack", string(o.stack))
	}
	if _, known := l.told[o.key]; !known {
		l.told[o.key] = false // it is known, if not in force
	}
	l.sink.Report(o.key.String(), o.problems)
}

// forgive takes back that an object could not be read.
func (l *ledger) forgive(k key) {
	if _, failed := l.failed[k]; failed {
		delete(l.failed, k)
		l.sink.Report(k.String(), nil)
	}
}

// ignore reports why an object is not in force, and takes back what was.
func (l *ledger) ignore(o *object) {
	if l.told[o.key] {
		l.remove(o.key)
	}
	l.told[o.key] = false
	l.sink.Report(o.key.String(), o.problems)
}

func (l *ledger) remove(k key) {
	inForce, known := l.told[k]
	delete(l.told, k)
	l.forgive(k)
	if !known {
		return
	}
	if !inForce {
		l.sink.Report(k.String(), nil)
		return
	}
	switch k.kind {
	case kindService:
		l.sink.DeleteService(lb.ServiceName{Namespace: k.namespace, Name: k.name})
	case kindSlice:
		l.sink.DeleteSlice(lb.SliceName{Namespace: k.namespace, Name: k.name})
	case kindNode:
		l.sink.SetNode(Node{Node: lb.Node{Name: k.name}}, nil)
	case kindServiceCIDR:
		delete(l.cidrs, k.name)
		l.cidrsMoved = true
	}
}

// tellCIDRs tells the union of all ServiceCIDRs: of a prefix that two name,
// one may go.
func (l *ledger) tellCIDRs() {
	if !l.cidrsMoved {
		return
	}
	l.cidrsMoved = false
	var union []netip.Prefix
	var problems []lb.Problem
	for _, name := range slices.Sorted(maps.Keys(l.cidrs)) {
		union = append(union, l.cidrs[name].value.([]netip.Prefix)...)
		problems = append(problems, l.cidrs[name].problems...)
	}
	slices.SortFunc(union, netip.Prefix.Compare)
	l.sink.SetServiceCIDRs(slices.Compact(union), problems)
}
