package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// LocalMode is how a device tells clients that are pods of this node, who look
// up the internal scope, from others. The names are those of kube-proxy's
// detectLocalMode. A mode can exclude what a device of pods brings. What comes
// by an uplink or a tunnel is external, whatever its source.
type LocalMode string

// The modes.
const (
	// LocalByDevice goes by the class of the device: those that lead to pods
	// are found out. The default; kube-proxy has no such mode.
	LocalByDevice LocalMode = ""
	// LocalClusterCIDR asks, too, that the source address is in a cluster CIDR.
	LocalClusterCIDR LocalMode = "ClusterCIDR"
	// LocalNodeCIDR asks, too, that the source address is in one of the Node's
	// podCIDRs.
	LocalNodeCIDR LocalMode = "NodeCIDR"
	// LocalBridgeInterface asks, too, that the device is this bridge, or a port
	// of it.
	LocalBridgeInterface LocalMode = "BridgeInterface"
	// LocalInterfaceNamePrefix asks, too, that the device is named so, or is a
	// port of a bridge that is.
	LocalInterfaceNamePrefix LocalMode = "InterfaceNamePrefix"
)

// ParseLocalMode reads a LocalMode. An empty text is [LocalByDevice].
func ParseLocalMode(text string) (LocalMode, error) {
	mode := LocalMode(text)
	switch mode {
	case LocalByDevice, LocalClusterCIDR, LocalNodeCIDR, LocalBridgeInterface, LocalInterfaceNamePrefix:
		return mode, nil
	}

	return "", fmt.Errorf("%q: it is %s, %s, %s or %s", text,
		LocalClusterCIDR, LocalNodeCIDR, LocalBridgeInterface, LocalInterfaceNamePrefix)
}

// ParseClusterCIDRs reads a list of address ranges with commas between them.
// An empty text is none. How many there may be, says [LocalDetector.Validate].
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

// LocalDetector is a [LocalMode] with what it needs. The zero value goes by
// device. What the mode does not need is ignored.
type LocalDetector struct {
	Mode                LocalMode
	ClusterCIDRs        []netip.Prefix // one, or one of each family
	BridgeInterface     string
	InterfaceNamePrefix string
}

// Validate returns an error that names the flag that is missing or wrong.
func (d LocalDetector) Validate() error {
	if _, err := ParseLocalMode(string(d.Mode)); err != nil {
		return fmt.Errorf("--detect-local-mode: %w", err)
	}
	switch d.Effective() {
	case LocalClusterCIDR:
		return d.validateCIDRs()
	case LocalBridgeInterface:
		if d.BridgeInterface == "" {
			return errors.New("--pod-bridge-interface: --detect-local-mode=BridgeInterface needs it")
		}
	case LocalInterfaceNamePrefix:
		if d.InterfaceNamePrefix == "" {
			return errors.New("--pod-interface-name-prefix: --detect-local-mode=InterfaceNamePrefix needs it")
		}
	}

	return nil
}

func (d LocalDetector) validateCIDRs() error {
	switch {
	case len(d.ClusterCIDRs) == 0:
		return errors.New("--cluster-cidr: --detect-local-mode=ClusterCIDR needs it")
	case len(d.ClusterCIDRs) > 2,
		len(d.ClusterCIDRs) == 2 && len(firstOfEachFamily(d.ClusterCIDRs)) != 2:
		return fmt.Errorf("--cluster-cidr: %v: one, or one of each family", d.ClusterCIDRs)
	}

	return nil
}

// Effective returns the mode that is in force: without one, a cluster CIDR
// means [LocalClusterCIDR], as in kube-proxy.
func (d LocalDetector) Effective() LocalMode {
	if d.Mode == LocalByDevice && len(d.ClusterCIDRs) > 0 {
		return LocalClusterCIDR
	}

	return d.Mode
}

// BySource reports whether a client's address counts beside the device that it
// comes by.
func (d LocalDetector) BySource() bool {
	mode := d.Effective()

	return mode == LocalClusterCIDR || mode == LocalNodeCIDR
}

// firstOfEachFamily returns the prefixes that kube-proxy would heed.
func firstOfEachFamily(prefixes []netip.Prefix) []netip.Prefix {
	var first []netip.Prefix
	for _, p := range prefixes {
		sameFamily := func(q netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == lb.FamilyOf(q.Addr()) }
		if !slices.ContainsFunc(first, sameFamily) {
			first = append(first, p)
		}
	}

	return first
}
