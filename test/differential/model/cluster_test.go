package model

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// nodeName is that of the node that we are on.
const nodeName = "node-1"

// cluster is what there is at one moment: all that a Service proxy goes by.
type cluster struct {
	clauseHits

	options  options
	services map[objectKey]*corev1.Service
	slices   map[objectKey]*discoveryv1.EndpointSlice
	cidrs    map[objectKey]*networkingv1.ServiceCIDR
	node     *corev1.Node // ours; nil: there is none
	addrs    []netip.Addr // on the node's devices, now

	// What the Node said last. One that goes, or has none for a moment, changes
	// nothing (docs/decisions).
	nodeIPs  map[corev1.IPFamily]netip.Addr
	podCIDRs []netip.Prefix

	clusterCIDRs []netip.Prefix
	nodePortIn   []netip.Prefix // options.nodePortAddresses, without the node IPs of primary

	ports        []*servicePort // what follows, see read
	serviceCIDRs []netip.Prefix
	otherProxies []netip.Addr // the ClusterIPs of their Services
	claims       claims
}

// options are the agent's.
type options struct {
	detect            detectMode
	clusterCIDRs      []string
	nodePortAddresses []string // empty: primary
	masqueradeAll     bool
	ignoreExternalIPs bool
	algorithm         string
	nodeIP            string // --bind-address; empty: from the Node
	loopbackNodePorts bool
}

// detectMode is how pods are distinguished from other clients.
type detectMode int

const (
	byDevice detectMode = iota
	byClusterCIDR
	byNodeCIDR
)

// objectKey is a namespace and a name.
type objectKey struct{ namespace, name string }

func (k objectKey) compare(l objectKey) int {
	return cmp.Or(strings.Compare(k.namespace, l.namespace), strings.Compare(k.name, l.name))
}

func keyOf(meta *metav1.ObjectMeta) objectKey { return objectKey{meta.Namespace, meta.Name} }

func newCluster(o options) *cluster {
	return &cluster{
		claims:       claims{started: true},
		options:      o,
		services:     map[objectKey]*corev1.Service{},
		slices:       map[objectKey]*discoveryv1.EndpointSlice{},
		cidrs:        map[objectKey]*networkingv1.ServiceCIDR{},
		nodeIPs:      map[corev1.IPFamily]netip.Addr{},
		clusterCIDRs: parsePrefixes(o.clusterCIDRs),
		nodePortIn:   parsePrefixes(expandWords(o.nodePortAddresses)),
	}
}

func (c *cluster) noteIf(cl clause, applied bool) {
	if applied {
		c.note(cl)
	}
}

// setNode: CONTRACT 2.5, the node's IPs, and docs/decisions.
func (c *cluster) setNode(node *corev1.Node) {
	c.node = node
	if node == nil {
		return
	}
	ips := map[corev1.IPFamily]netip.Addr{}
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range node.Status.Addresses {
			ip := parse(a.Address)
			if a.Type == kind && ip.IsValid() && !ips[familyOf(ip)].IsValid() {
				ips[familyOf(ip)] = ip
			}
		}
	}
	maps.Copy(c.nodeIPs, ips)
	if podCIDRs := parsePrefixes(node.Spec.PodCIDRs); len(podCIDRs) > 0 {
		c.podCIDRs = podCIDRs
	}
}

// zone: CONTRACT 1.4.1.
func (c *cluster) zone() string {
	if c.node == nil {
		return ""
	}
	return c.node.Labels[corev1.LabelTopologyZone]
}

// nodeIP: CONTRACT 1.8.7 and 2.5.
func (c *cluster) nodeIP(family corev1.IPFamily) netip.Addr {
	if ip := c.knownNodeIP(family); ip.IsValid() {
		return ip
	}
	return loopback(family)
}

func (c *cluster) knownNodeIP(family corev1.IPFamily) netip.Addr {
	if ip := parse(c.options.nodeIP); ip.IsValid() && familyOf(ip) == family {
		return ip
	}
	return c.nodeIPs[family]
}

func loopback(family corev1.IPFamily) netip.Addr {
	if family == corev1.IPv4Protocol {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// localCIDR: CONTRACT 1.5.1, zero if there is none of the family (1.5.2).
func (c *cluster) localCIDR(family corev1.IPFamily) netip.Prefix {
	cidrs := c.clusterCIDRs
	if c.options.detect == byNodeCIDR {
		cidrs = c.podCIDRs
	}
	for _, p := range cidrs {
		if familyOf(p.Addr()) == family {
			return p
		}
	}
	return netip.Prefix{}
}

// isOfNode reports whether this node has an address.
func (c *cluster) isOfNode(ip netip.Addr) bool { return slices.Contains(c.addrs, ip) }

// expandWords replaces localhost and all by the ranges that they stand for (KEP-6032), and leaves primary out.
func expandWords(list []string) []string {
	words := map[string][]string{"primary": nil, "localhost": {"127.0.0.0/8", "::1/128"}, "all": {"0.0.0.0/0", "::/0"}}
	var ranges []string
	for _, text := range list {
		if of, isWord := words[text]; isWord {
			ranges = append(ranges, of...)
		} else {
			ranges = append(ranges, text)
		}
	}
	return ranges
}

// isNodePortAddress: CONTRACT 1.7.1 to 1.7.5, but for addresses that come later,
// which count at once (DESIGN.md 6.3).
func (c *cluster) isNodePortAddress(ip netip.Addr) bool {
	if !c.isOfNode(ip) || ip.IsLoopback() {
		return false
	}
	selected := slices.Clone(c.nodePortIn)
	if len(selected) == 0 || slices.Contains(c.options.nodePortAddresses, "primary") {
		if nodeIP := c.knownNodeIP(familyOf(ip)); nodeIP.IsValid() && !nodeIP.IsLoopback() {
			selected = append(selected, netip.PrefixFrom(nodeIP, nodeIP.BitLen()))
		}
	}
	ofFamily := slices.DeleteFunc(selected, func(p netip.Prefix) bool { return familyOf(p.Addr()) != familyOf(ip) })
	return len(ofFamily) == 0 || slices.ContainsFunc(ofFamily, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// isServiceCIDR: CONTRACT 1.6.2, but at once, and a CIDR that two objects name
// stays when one of them goes. That Sluice leaves some addresses alone is in differences_test.go.
func (c *cluster) isServiceCIDR(ip netip.Addr) bool {
	in := func(p netip.Prefix) bool { return p.Contains(ip) }
	return slices.ContainsFunc(c.serviceCIDRs, in) && !c.isLeftAlone(ip)
}
