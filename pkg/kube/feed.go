package kube

import "log/slog"

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
	f.tracker.set(translate(obj))
}

// Delete reports that an object was deleted.
func (f *Feed) Delete(obj any) { f.tracker.delete(translate(obj).key) }
