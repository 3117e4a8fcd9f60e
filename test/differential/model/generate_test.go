package model

import (
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/object"
)

// generator makes objects, and changes of those that it made. Names, addresses
// and numbers are few, so that objects collide.
type generator struct {
	*rand.Rand
	have *cluster
	mode hintMode // of most slices
}

// one is true one time in n.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

func pick[T any](g *generator, from ...T) T { return from[g.IntN(len(from))] }

// some returns up to n of these, in any order and perhaps repeated.
func some[T any](g *generator, n int, from ...T) []T {
	var all []T
	for range g.IntN(n + 1) {
		all = append(all, pick(g, from...))
	}
	return all
}

// Addresses by what they are used for, mostly.
var (
	clusterIPs4 = []string{"172.30.0.41", "172.30.0.42", "172.30.0.43"}
	clusterIPs6 = []string{"fd00:10:96::41", "fd00:10:96::42"}
	vips4       = []string{"1.2.3.4", "5.6.7.8", "192.168.50.1"}
	vips6       = []string{"2001:db8::4", "fd00:2::1"}
	nodeIPs4    = []string{"192.168.0.2", "192.168.50.1", "10.244.1.1"}
	nodeIPs6    = []string{"fd00:1::2", "fd00:2::1"}
	pods4       = []string{"10.244.1.5", "10.244.1.10", "10.244.2.5"}
	pods6       = []string{"fd00:244:1::5", "fd00:244:2::5"}
	outside4    = []string{"203.0.113.5", "198.51.100.20"}
	outside6    = []string{"2001:db8:ffff::5", "2001:db8:aaaa::5"}
	others      = []string{"172.30.0.99", "fd00:10:96::99", "127.0.0.1", "127.0.0.2", "::1", "169.254.1.1", "fe80::1", "192.168.0.3", "198.51.100.7", "2001:db8:ffff::7"}

	// What means an address that is written otherwise, or none.
	ugly = []string{
		"001.002.003.004", "::ffff:1.2.3.4", "2001:0db8:0::0004", "5.6.07.8",
		"", "  ", "1.2.3", "1.2.3.4 ", "fe80::1%eth0", "host.example", "0.0.0.0", "::", "1.2.3.400",
		"127.0.0.1", "127.0.0.2", "::1", "169.254.1.1", "fe80::1", "239.1.2.3", "ff0e::101",
	}
)

// zones, the last is none.
var zones = []string{"za", "zb", ""}

func (g *generator) options() options {
	o := options{
		detect:            pick(g, byDevice, byDevice, byClusterCIDR, byClusterCIDR, byNodeCIDR),
		masqueradeAll:     g.one(4),
		ignoreExternalIPs: g.one(8),
		algorithm:         pick(g, append([]string{"random", "random", "random"}, algorithms...)...),
		nodeIP:            pick(g, "", "", "", "192.168.50.1", "fd00:1::2"),
		loopbackNodePorts: !g.one(4),
	}
	if o.detect == byClusterCIDR {
		o.clusterCIDRs = pick(g,
			[]string{"10.244.0.0/16", "fd00:244::/32"}, []string{"10.244.0.0/16"}, []string{"fd00:244::/32"})
	}
	o.nodePortAddresses = pick(g, nil, []string{"primary"}, []string{"0.0.0.0/0", "::/0"},
		[]string{"192.168.0.0/16"}, []string{"192.168.50.0/24", "fd00:1::/64", "127.0.0.0/8"},
		[]string{"primary", "localhost"}, []string{"10.244.0.0/16", "primary"}, []string{"primary", "all"})
	return o
}

// start is what there is before anything changes.
func (g *generator) start() step {
	s := step{{Addresses: g.addresses()}}
	if !g.one(6) {
		s = append(s, change{Node: g.node()})
	}
	if !g.one(6) {
		s = append(s, change{ServiceCIDR: g.serviceCIDR()})
	}
	for range 1 + g.IntN(4) {
		s = append(s, change{Service: g.service()})
	}
	return s
}

// fill gives the first Services their endpoints.
func (g *generator) fill() step {
	s := step{}
	for range 1 + g.IntN(8) {
		s = append(s, change{Slice: g.slice()})
	}
	return s
}

// next is what changes at once.
func (g *generator) next() step {
	var s step
	for range 1 + g.IntN(3) {
		s = append(s, g.change())
	}
	if g.one(12) {
		s = append(s, change{Restart: g.Uint64() | 1})
	}
	if g.one(5) {
		s = append(s, change{Fail: g.Uint64() | 1})
	}
	if g.one(12) {
		s = append(s, change{Squeeze: g.Uint64() | 1})
	}
	if g.one(4) {
		s = append(s, change{Forget: true})
	}
	return s
}

func (g *generator) change() change {
	switch g.IntN(16) {
	case 0:
		return change{Addresses: g.addresses()}
	case 1:
		return change{Node: g.node(), Delete: g.one(6)}
	case 2:
		return change{ServiceCIDR: g.serviceCIDR(), Delete: g.one(3)}
	}
	c := g.object()
	c.Delete = g.one(7)
	return c
}

// object is a Service or a slice.
func (g *generator) object() change {
	if g.one(2) {
		return change{Service: g.service()}
	}
	return change{Slice: g.slice()}
}

func (g *generator) addresses() []string {
	addrs := []string{"127.0.0.1", "::1"}
	for _, a := range append(append([]string{}, nodeIPs4...), nodeIPs6...) {
		if !g.one(5) {
			addrs = append(addrs, a)
		}
	}
	if g.one(3) {
		addrs = append(addrs, "5.6.7.8") // a VIP that is bound here
	}
	if g.one(12) {
		addrs = append(addrs, "172.30.0.42") // a ClusterIP
	}
	return addrs
}

func (g *generator) node() *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	if g.one(15) {
		node.Name = "node-2"
	}
	if zone := pick(g, zones...); zone != "" || g.one(2) {
		node.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	kinds := []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName}
	texts := []string{"192.168.0.2", "192.168.0.2", "192.168.50.1", "fd00:1::2", "fd00:2::1", "192.168.000.002", "node-1", "127.0.0.1"}
	for _, text := range some(g, 4, texts...) {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: pick(g, kinds...), Address: text})
	}
	node.Spec.PodCIDRs = some(g, 3, "10.244.1.0/24", "10.244.2.0/24", "fd00:244:1::/64", "nonsense")
	return node
}

func (g *generator) serviceCIDR() *networkingv1.ServiceCIDR {
	cidrs := []string{"172.30.0.0/24", "172.30.0.0/16", "fd00:10:96::/112", "172.30.0.96/28"}
	if g.one(5) {
		cidrs = append(cidrs, "192.168.0.0/16", "nonsense", "172.30.000.0/16", "172.30.0.99/32", "fd00:10:96::99/128")
	}
	return object.ServiceCIDR(pick(g, "kubernetes", "more"), some(g, 3, cidrs...)...)
}
