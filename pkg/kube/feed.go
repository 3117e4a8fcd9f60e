package kube

import "log/slog"

// Feed tells a sink about Kubernetes objects one by one, as a [Watcher] does
// when an API server says that they changed. It is for tests that have no API
// server. One goroutine at a time may use it.
type Feed struct {
	ledger   *ledger
	nodeName string
}

// NewFeed returns a Feed of which the sink has not been told anything yet.
// nodeName is that of this node, in lower case.
func NewFeed(nodeName string, sink Sink) *Feed {
	return &Feed{ledger: newLedger(sink, slog.Default()), nodeName: nodeName}
}

// Set tells about an object that is new or has changed: a pointer to a Service,
// EndpointSlice, Node or ServiceCIDR of k8s.io/api, which stays the caller's. One
// that no Watcher asks for is to the sink as one that was deleted.
func (f *Feed) Set(obj any) {
	if !selected(obj, f.nodeName) {
		f.Delete(obj)
		return
	}
	f.ledger.set(translate(obj))
}

// Delete tells that there is no such object any more.
func (f *Feed) Delete(obj any) { f.ledger.delete(translate(obj).key) }
