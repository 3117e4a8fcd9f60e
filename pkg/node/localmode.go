package node

import (
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// LocalMode is how devices detect clients that are pods of this node, for which the
// internal scope applies. The names are those of kube-proxy's detectLocalMode. A mode
// can exclude packets that arrive by a device of pods. Packets that arrive by an uplink
// or a tunnel are external, whatever their source.
type LocalMode string

// The modes.
const (
	// LocalByDevice uses the class of the device, which is detected. It is the
	// default; kube-proxy has no such mode.
	LocalByDevice LocalMode = ""
	// LocalClusterCIDR requires also that the source address is in a cluster CIDR.
	LocalClusterCIDR LocalMode = "ClusterCIDR"
	// LocalNodeCIDR requires also that the source address is in one of the Node's
	// podCIDRs.
	LocalNodeCIDR LocalMode = "NodeCIDR"
	// LocalBridgeInterface requires also that the device is this bridge, or a port
	// of it.
	LocalBridgeInterface LocalMode = "BridgeInterface"
	// LocalInterfaceNamePrefix requires also that the device's name has this prefix,
	// or that it is a port of a bridge whose name has.
	LocalInterfaceNamePrefix LocalMode = "InterfaceNamePrefix"
)

// ParseClusterCIDRs reads a list of address ranges with commas between them.
// An empty text is none.
func ParseClusterCIDRs(text string) ([]netip.Prefix, error) {
	if text == "" {
		return nil, nil
	}
	var prefixes []netip.Prefix
	for s := range strings.SplitSeq(text, ",") {
		prefix, err := lb.ParsePrefix(s)
		if err != nil {
			return nil, err
		}
		prefixes = append(prefixes, prefix)
	}

	return prefixes, nil
}

// LocalDetector is a [LocalMode] with its parameters. Parameters of other modes are ignored. Package config
// checks that there are those of the mode.
type LocalDetector struct {
	Mode                LocalMode
	ClusterCIDRs        []netip.Prefix // one, or one of each family
	BridgeInterface     string
	InterfaceNamePrefix string
}

// BySource reports whether the client's address is checked beside the device by which
// its packets arrive.
func (d LocalDetector) BySource() bool {
	return d.Mode == LocalClusterCIDR || d.Mode == LocalNodeCIDR
}

// Rules returns rules with those of the mode: which devices lead to pods.
func (d LocalDetector) Rules(rules Rules) Rules {
	switch d.Mode {
	case LocalBridgeInterface:
		rules.PodBridge = d.BridgeInterface
	case LocalInterfaceNamePrefix:
		rules.PodPrefix = d.InterfaceNamePrefix
	}

	return rules
}
