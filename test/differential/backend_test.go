package differential

import (
	"fmt"
	"net/netip"
)

// backend is a possible endpoint: a pod, or a host that serves.
type backend struct {
	name      string
	node      string
	addresses [2]netip.Addr // by family
}

// firstNode is the one with a proxy.
const firstNode = "node-1"

// backends are in all slices; those of the first node come first.
var backends = []backend{
	{"pod-1-1", "node-1", podAddresses(1)},
	{"pod-1-2", "node-1", podAddresses(2)},
	{"node-1", "node-1", hostAddresses(1)},
	{"pod-2-0", "node-2", [2]netip.Addr{netip.MustParseAddr("10.244.2.2"), netip.MustParseAddr("fd00:10:244:2::2")}},
	{"pod-2-1", "node-2", [2]netip.Addr{netip.MustParseAddr("10.244.2.3"), netip.MustParseAddr("fd00:10:244:2::3")}},
	{"node-2", "node-2", hostAddresses(2)},
}

// podAddresses are those of a pod of node-1, in the lab's plan.
func podAddresses(pod int) [2]netip.Addr {
	return [2]netip.Addr{
		netip.MustParseAddr(fmt.Sprintf("10.244.1.%d", pod+2)),
		netip.MustParseAddr(fmt.Sprintf("fd00:10:244:1::%d", pod+2)),
	}
}

// hostAddresses are those of a node on the first segment, which are its node IPs.
func hostAddresses(node int) [2]netip.Addr {
	return [2]netip.Addr{
		netip.MustParseAddr(fmt.Sprintf("192.168.50.%d", node)),
		netip.MustParseAddr(fmt.Sprintf("fd00:50::%d", node)),
	}
}
