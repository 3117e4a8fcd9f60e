package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Node is the part of the node that a configuration must fit.
type Node struct {
	// Families are the address families that the kernel has.
	Families []lb.Family
	// Primary is the family of the node's primary address.
	Primary lb.Family
	// IPs are the node's primary addresses, one of a family at most.
	IPs []netip.Addr
	// PodCIDRs are those of the Node object.
	PodCIDRs []netip.Prefix
}

// CheckNode checks a valid configuration against the node. It returns warnings for
// the operator, and an error if kube-proxy would refuse to start.
func CheckNode(cfg *KubeProxy, node Node) (warnings []string, err error) {
	if !slices.Contains(node.Families, node.Primary) {
		return nil, fmt.Errorf("the node's primary address is of %s, which the kernel does not have", node.Primary)
	}
	other := otherFamily(node.Primary)
	alone := !slices.Contains(node.Families, other)
	clusterCIDRs := parsePrefixes(strings.Split(cfg.ClusterCIDR, ","))
	if only(clusterCIDRs, other) {
		text := fmt.Sprintf("clusterCIDR %s has only %s addresses, and the node's primary address is of %s", cfg.ClusterCIDR, other, node.Primary)
		if cfg.DetectLocalMode == LocalClusterCIDR && alone {
			err = errors.New(text + "; detectLocalMode ClusterCIDR needs one of these")
		} else {
			warnings = append(warnings, text)
		}
	}
	if only(node.PodCIDRs, other) && cfg.DetectLocalMode == LocalNodeCIDR {
		err = errors.Join(err, fmt.Errorf("the Node's podCIDRs %v have only %s addresses, and its primary address is of %s; "+
			"detectLocalMode NodeCIDR needs one of these", node.PodCIDRs, other, node.Primary))
	}
	warnings = append(warnings, checkNodePorts(cfg, node, other, dual(clusterCIDRs) || dual(node.PodCIDRs))...)
	warnings = append(warnings, checkLocalhost(cfg)...)
	if alone {
		warnings = append(warnings, checkListening("healthzBindAddress", cfg.HealthzBindAddress, other)...)
		warnings = append(warnings, checkListening("metricsBindAddress", cfg.MetricsBindAddress, other)...)
	}

	return warnings, err
}

// checkNodePorts returns a warning if node ports answer on all addresses of a
// family although the configuration does not ask for it. DualCluster is true if
// other parts of the configuration have both families.
func checkNodePorts(cfg *KubeProxy, node Node, other lb.Family, dualCluster bool) []string {
	var prefixes []netip.Prefix
	// Validate has found what is wrong with the list.
	if ranges, err := lb.ParseNodePortAddresses(cfg.NodePortAddresses); err == nil && len(cfg.NodePortAddresses) > 0 {
		prefixes = ranges.Prefixes
		if ranges.Primary {
			for _, ip := range node.IPs {
				prefixes = append(prefixes, netip.PrefixFrom(ip, ip.BitLen()))
			}
		}
	}
	const open = "all addresses of the node have node ports"
	switch {
	case len(prefixes) == 0:
		return []string{"nodePortAddresses is not set: " + open + `; consider "primary"`}
	case only(prefixes, node.Primary) && dualCluster:
		return []string{fmt.Sprintf("nodePortAddresses has no %s addresses, and the cluster seems to have both families: of %s, %s", other, other, open)}
	case only(prefixes, other):
		return []string{fmt.Sprintf("nodePortAddresses has only %s addresses: of %s, %s", other, node.Primary, open)}
	}

	return nil
}

// checkLocalhost returns a warning if node ports are to answer on loopback addresses, and must not.
func checkLocalhost(cfg *KubeProxy) []string {
	ranges := parsePrefixes(cfg.NodePortAddresses)
	named := slices.Contains(cfg.NodePortAddresses, lb.NodePortsLocalhost) ||
		slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Addr().IsLoopback() })
	if !named || *cfg.IPTables.LocalhostNodePorts {
		return nil
	}

	return []string{fmt.Sprintf("nodePortAddresses %v has loopback addresses, and iptables.localhostNodePorts is false: node ports do not answer there",
		cfg.NodePortAddresses)}
}

func checkListening(name, address string, missing lb.Family) []string {
	addr, err := ParseAddrPort(address)
	if err != nil || addr.Addr().IsUnspecified() || lb.FamilyOf(addr.Addr()) != missing {
		return nil
	}

	return []string{fmt.Sprintf("%s %s is of %s, which the kernel does not have", name, address, missing)}
}

// parsePrefixes returns the address ranges among the texts.
func parsePrefixes(texts []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, text := range texts {
		if prefix, err := lb.ParsePrefix(text); err == nil {
			prefixes = append(prefixes, prefix)
		}
	}

	return prefixes
}

func has(prefixes []netip.Prefix, family lb.Family) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == family })
}

// only reports whether there are prefixes of this family, and none of the other.
func only(prefixes []netip.Prefix, family lb.Family) bool {
	return has(prefixes, family) && !has(prefixes, otherFamily(family))
}

func dual(prefixes []netip.Prefix) bool { return has(prefixes, lb.IPv4) && has(prefixes, lb.IPv6) }

func otherFamily(family lb.Family) lb.Family {
	if family == lb.IPv4 {
		return lb.IPv6
	}

	return lb.IPv4
}
