// Package kube translates Kubernetes objects to the types of package lb: it follows
// Services, EndpointSlices, this node's Node and ServiceCIDRs, either of an API server
// ([Watcher]) or of a directory of manifests ([Manifests]), and reports them to a [Sink].
//
// It parses and makes no decisions: package lb decides which Services count and which
// frontends they have. It keeps only the names of the objects that it has reported. Parts
// that it cannot parse it leaves out, and reports a problem with object and field.
package kube

import (
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Sink receives the objects of a cluster. Its methods are called from several goroutines,
// though never at the same time for the same object. All but Flush block the source while
// they run: a Sink should queue its work and return.
//
// A Set method is called with the whole object each time that it may have changed, and
// perhaps with one that is the same; the Sink owns the value. The problems are the parts
// of the object that had to be left out; they replace those of the last call and end with
// the object.
type Sink interface {
	SetService(lb.Service, []lb.Problem)
	DeleteService(lb.ServiceName)
	SetSlice(Slice, []lb.Problem)
	DeleteSlice(lb.SliceName)

	// SetNode is called for the node of the configured name only. A node that was deleted
	// has a name and nothing else.
	SetNode(Node, []lb.Problem)

	// SetServiceCIDRs sets the prefixes that ClusterIPs are allocated from: the union
	// of all ServiceCIDR objects, sorted, without duplicates.
	SetServiceCIDRs([]netip.Prefix, []lb.Problem)

	// Report replaces the problems of a source that no Set method is called for: a file
	// or a directory of manifests (its path), a request to the API server ("services"),
	// an EndpointSlice that is ignored ("EndpointSlice ns/name"). Without problems, the
	// source is valid again, or gone.
	Report(source string, problems []lb.Problem)

	// Flush is called when everything that has arrived is reported: the Sink should process
	// it now. Changes that arrive meanwhile wait in the connection. Flush may be called
	// without a change.
	Flush()
}

// Slice is an EndpointSlice and when it was triggered.
type Slice struct {
	lb.EndpointSlice

	// Triggered is when the change happened that the slice was written for, zero if it is
	// not known (annotation endpoints.kubernetes.io/last-change-trigger-time).
	// Network programming latency is measured from it.
	Triggered time.Time
}

// Node is the Node object of this node.
type Node struct {
	lb.Node

	// Exists is false when the cluster has no such Node (any more).
	Exists bool

	// Leaving is set while the Node is being deleted, or is about to be by the
	// cluster autoscaler: load balancers should use other nodes (KEP-3836).
	Leaving bool

	// PodCIDRs is spec.podCIDRs, which detectLocalMode NodeCIDR uses.
	PodCIDRs []netip.Prefix
}
