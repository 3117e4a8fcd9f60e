package agent

import (
	"net/netip"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// NodeFacts are properties of the node that a configuration has to fit, see
// [Config.CheckNode].
type NodeFacts struct {
	// Primary is the family of the node's primary address, IPv4 if that is not
	// known.
	Primary lb.Family
	// IPs are its primary addresses, one of a family at most.
	IPs []netip.Addr
	// PodCIDRs are the Node object's.
	PodCIDRs []netip.Prefix
}

func (m *model) facts() NodeFacts {
	facts := NodeFacts{Primary: lb.IPv4, IPs: m.node.PrimaryIPs, PodCIDRs: m.podCIDRs}
	if len(facts.IPs) > 0 {
		facts.Primary = lb.FamilyOf(facts.IPs[0])
	}

	return facts
}

// checkNode returns an error if the configuration does not fit the node.
func (a *agent) checkNode() error {
	// Without addresses of the Node it is not known which family is the first one.
	if a.cfg.CheckNode == nil || a.model.awaitsNode && len(a.model.node.PrimaryIPs) == 0 {
		return nil
	}

	return a.cfg.CheckNode(a.model.facts())
}
