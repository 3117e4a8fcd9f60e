package flows

import corev1 "k8s.io/api/core/v1"

// source is where a flow comes from, as far as this test can be there.
type source string

const (
	fromNode   source = "node"
	fromPod    source = "pod"
	fromDevice source = "device" // no socket of this node: the device datapath's
)

// sourceOf says where a flow comes from, and why if that is no socket. A node's
// own address comes first: no pod has it.
func (s *scenario) sourceOf(f flow) (from source, why string) {
	if f.Protocol != corev1.ProtocolTCP && f.Protocol != corev1.ProtocolUDP {
		return fromDevice, "sockets of " + string(f.Protocol) + " are not translated"
	}
	switch {
	case f.SourceIP.IsLoopback(), s.Node.has(f):
		return fromNode, ""
	case !s.Node.LocalCIDR.IsValid():
		return fromDevice, "the source is outside, for there is no localCIDR"
	case s.Node.LocalCIDR.Contains(f.SourceIP):
		return fromPod, ""
	}

	return fromDevice, "the source is outside"
}

func (n *node) has(f flow) bool {
	for _, ip := range n.LocalIPs {
		if ip == f.SourceIP {
			return true
		}
	}

	return false
}

// driven are the flows that come from sockets of this node.
func (s *scenario) driven() []flow {
	var flows []flow
	for _, f := range s.Flows {
		if from, _ := s.sourceOf(f); from != fromDevice {
			flows = append(flows, f)
		}
	}

	return flows
}
