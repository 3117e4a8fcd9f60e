package flows

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// place is where a client sits.
type place string

const (
	onNode place = "node"
	inPod  place = "pod"    // of this node
	beyond place = "beyond" // the uplink: no pod, or one of another node
)

// path is one way for a flow to pass Sluice.
type path struct {
	from place

	// socket: the hooks of the client's socket see it. Otherwise its packets
	// come by a device, from a client that no hook sees.
	socket bool
}

func (p path) String() string {
	if p.socket {
		return "socket " + string(p.from)
	}

	return "device " + string(p.from)
}

// paths are all the ways on which a flow can be sent. A source address determines
// whether it is the node's or, in localCIDR, a pod's, but not where that pod is:
// it is driven as one of this node, with and without socket hooks, and as one of
// another node. Without localCIDR it may be anything.
func (s *scenario) paths(f flow) []path {
	hooked := f.Protocol == corev1.ProtocolTCP || f.Protocol == corev1.ProtocolUDP
	if s.Node.has(f.SourceIP) {
		return []path{{onNode, hooked}}
	}
	local := s.isLocalEndpoint(f.SourceIP)

	var paths []path
	if s.mayBePod(f.SourceIP) && hooked {
		paths = append(paths, path{inPod, true})
	}
	// What a pod sends to itself passes no device.
	if (s.mayBePod(f.SourceIP) || local) && f.SourceIP != f.DestIP {
		paths = append(paths, path{inPod, false})
	}
	if !local {
		paths = append(paths, path{beyond, false})
	}

	return paths
}

func (s *scenario) mayBePod(ip netip.Addr) bool {
	return !s.Node.LocalCIDR.IsValid() || s.Node.LocalCIDR.Contains(ip)
}

// has reports whether an address is the node's own: no pod has it.
func (n *node) has(ip netip.Addr) bool {
	return ip.IsLoopback() || slices.Contains(n.LocalIPs, ip)
}

// runs reports whether an endpoint is on this node.
func (n *node) runs(e endpoint) bool { return e.NodeName != nil && *e.NodeName == n.Name }

// isLocalEndpoint reports whether a pod of this node has an address: any endpoint
// of this kind counts, also one that is replaced by another. A pod that is here for
// one Service port may be elsewhere for another: see [scenario.isLocalTarget].
func (s *scenario) isLocalEndpoint(ip netip.Addr) bool {
	return slices.Contains(s.localEndpoints(), ip)
}

// localEndpoints are the addresses of pods of this node that endpoints name.
func (s *scenario) localEndpoints() []netip.Addr {
	var all []netip.Addr
	for _, es := range s.EndpointSlices {
		for _, e := range es.Endpoints {
			if !s.Node.runs(e) {
				continue
			}
			for _, address := range e.Addresses {
				if ip := parseSloppy(address); ip.IsValid() && !s.Node.has(ip) {
					all = append(all, ip)
				}
			}
		}
	}

	return all
}
