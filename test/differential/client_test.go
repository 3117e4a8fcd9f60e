package differential

import (
	"net/netip"
	"slices"
)

// place is where a client sits.
type place int

const (
	onNode    place = iota // on node-1, in no pod
	inPod                  // in a pod of node-1
	outside                // on the segment, in no node
	otherNode              // in a pod of node-2
)

// client dials, on both sides alike.
type client struct {
	name  string
	place place
	pod   int // of its node, with inPod and otherNode

	// socket: hooks see its sockets. Otherwise its packets come by a device.
	// To kube-proxy, it is all the same.
	socket bool

	// answers: the name of the server in the same pod, which may be the backend that it
	// reaches.
	answers string

	// spares are more addresses to dial from, by family. Sluice gives each a
	// budget of refusals: six, and one a second.
	spares [2][]netip.Addr
}

// sparePod is the pod of node-1 with podSpares. Another pod dials from sockets: where a
// namespace has so many addresses, Sluice leaves them to the device.
const sparePod = 3

var (
	podSpares   = prefixes("10.244.1.128/25", "fd00:10:244:1::80/121")
	otherSpares = prefixes("10.244.2.128/25", "fd00:10:244:2::80/121")
	outsiders   = prefixes("10.99.0.0/25", "fd00:99::/121")
)

var clients = []*client{
	{name: "node", place: onNode, socket: true},
	{name: "pod", place: inPod, socket: true},
	{name: "pod by device", place: inPod, pod: sparePod, spares: spares(podSpares)},
	{name: "outside", place: outside, spares: spares(outsiders)},
	{name: "backend", place: inPod, pod: 1, socket: true, answers: "pod-1-1"},
	{name: "backend by device", place: inPod, pod: 2, answers: "pod-1-2"},
	{name: "pod of node-2", place: otherNode, pod: 2, spares: spares(otherSpares)},
}

// podClient's dials show which backends a pod of node-1 reaches. outsider is no
// pod.
var podClient, outsider = clients[1], clients[3]

func spares(ranges []netip.Prefix) [2][]netip.Addr {
	return [2][]netip.Addr{addressesOf(ranges[0]), addressesOf(ranges[1])}
}

// from is what to bind to for the nth dial, or nothing.
func (c *client) from(f family, n int) string {
	all := c.spares[f]
	if len(all) == 0 {
		return ""
	}

	return netip.AddrPortFrom(all[n%len(all)], 0).String()
}

// local reports whether replies to it pass node-1 anyway.
func (c *client) local() bool { return c.place != outside && c.place != otherNode }

// isOwn reports whether an address is the client's. The node has many; which one it
// shows is compared.
func (c *client) isOwn(a netip.Addr) bool {
	switch c.place {
	case onNode:
		return false
	case outside:
		return a == netip.MustParseAddr("192.168.50.100") || a == netip.MustParseAddr("fd00:50::100") ||
			slices.ContainsFunc(outsiders, func(p netip.Prefix) bool { return p.Contains(a) })
	case otherNode:
		return slices.ContainsFunc(otherSpares, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, p := range podAddresses(c.pod) {
		if p == a {
			return true
		}
	}

	return c.pod == sparePod && slices.ContainsFunc(podSpares, func(p netip.Prefix) bool { return p.Contains(a) })
}

// family is 0 for IPv4 and 1 for IPv6.
type family int

const (
	ipv4 family = iota
	ipv6
)

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ipv4
	}

	return ipv6
}
