// Package kube turns what a cluster says into the terms of package lb: it
// follows Services, EndpointSlices, this node's Node and ServiceCIDRs, either
// of an API server ([Watcher]) or of a directory of manifests ([Manifests]),
// and tells a [Sink] about them.
//
// It parses and decides nothing: which Services count, and what follows from
// them, is lb's. Of an object that it has told about it keeps the name only.
// What it cannot parse it leaves out and says so, with object and field.
package kube

import (
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Sink takes what the cluster says. Its methods are called from several
// goroutines, though never at once for the same object. All but Flush hold up
// what calls them: a Sink that has work to do notes it and returns.
//
// A Set method is called with the whole object each time that it may have
// changed; the Sink owns what it is given. It may be called again with
// an object that is the same. The problems are what had to be left out of the
// object; they replace those of the last call and end with the object.
type Sink interface {
	SetService(lb.Service, []lb.Problem)
	DeleteService(lb.ServiceName)
	SetSlice(Slice, []lb.Problem)
	DeleteSlice(lb.SliceName)

	// SetNode is about the node of the configured name only. A node that is
	// gone has a name and nothing else.
	SetNode(Node, []lb.Problem)

	// SetServiceCIDRs says which prefixes ClusterIPs are taken from: the union
	// of all ServiceCIDR objects, sorted, without duplicates.
	SetServiceCIDRs([]netip.Prefix, []lb.Problem)

	// Report replaces what is known to be wrong with a source that is not in
	// force as an object: a file or a directory of manifests (its path), a
	// request to the API server ("services"), an EndpointSlice that is ignored
	// ("EndpointSlice ns/name"). No problems: it is in order again, or gone.
	Report(source string, problems []lb.Problem)

	// Flush is called when all is told that is at hand: now is the time to work
	// on it. What comes meanwhile waits in the connection. It may be called when
	// there is nothing new.
	Flush()
}

// Slice is what an EndpointSlice says.
type Slice struct {
	lb.EndpointSlice

	// Triggered is when what the slice tells of happened, zero if the slice
	// does not say (annotation endpoints.kubernetes.io/last-change-trigger-time).
	// Network programming latency is measured from it.
	Triggered time.Time
}

// Node is what the Node object of this node says.
type Node struct {
	lb.Node

	// Exists is false when the cluster has no such Node (any more).
	Exists bool

	// Leaving is set while the Node is being deleted, or is about to be by the
	// cluster autoscaler: load balancers should look for another (KEP-3836).
	Leaving bool

	// PodCIDRs is spec.podCIDRs, which detectLocalMode NodeCIDR goes by.
	PodCIDRs []netip.Prefix
}
