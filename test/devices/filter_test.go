package devices

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// What is counted here may not happen: the connections that the kernel tracks
// are always whole ones, and, for IPv6 as rp_filter is for IPv4, packets come
// from where they would be answered.
const (
	// bridgeCNI is a firewall, and a masquerade as every CNI plugin has it: what
	// pods send to the world outside comes from their node.
	bridgeCNI = invalidFilter + pathFilter + podMasquerade

	// flannelCNI masquerades also what comes to other nodes' pods from outside.
	flannelCNI = invalidFilter + pathFilter + podMasquerade + `
		table ip flannel {
			chain postrouting {
				type nat hook postrouting priority srcnat
				ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 oifname "vxlan0" masquerade fully-random
			}
		}
		table ip6 flannel {
			chain postrouting {
				type nat hook postrouting priority srcnat
				ip6 saddr != fd00:10:244::/48 ip6 daddr fd00:10:244::/48 oifname "vxlan0" masquerade fully-random
			}
		}`

	// looseCNI lets packets come from anywhere.
	looseCNI = invalidFilter + podMasquerade

	// The kernel finds its own IPv6 redirects invalid.
	invalidFilter = `
		table inet lab {
			counter invalid {}
			chain input {
				type filter hook input priority filter
				ct state invalid counter name invalid drop
			}
			chain forward {
				type filter hook forward priority filter
				ct state invalid counter name invalid drop
			}
			chain output {
				type filter hook output priority filter
				icmpv6 type nd-redirect accept
				ct state invalid counter name invalid drop
			}
		}`

	pathFilter = `
		table inet path {
			counter astray {}
			chain prerouting {
				type filter hook prerouting priority raw
				meta l4proto { tcp, udp, sctp } fib saddr . iif oif missing counter name astray drop
			}
		}`

	podMasquerade = `
		table ip cni {
			chain postrouting {
				type nat hook postrouting priority srcnat
				ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade
			}
		}
		table ip6 cni {
			chain postrouting {
				type nat hook postrouting priority srcnat
				ip6 saddr fd00:10:244::/48 ip6 daddr != fd00:10:244::/48 masquerade
			}
		}`
)

// mustHaveCountedNothing fails the test if a counter of a node has counted.
func (w *world) mustHaveCountedNothing(t *testing.T) {
	t.Helper()
	for _, node := range w.Nodes {
		counters, err := node.NetfilterCounters()
		lab.Must(t, err)
		for name, packets := range counters {
			if packets != 0 {
				t.Errorf("%s dropped %d packets as %s", node.Name, packets, name)
			}
		}
	}
}

// mustBeStrict makes nodes refuse IPv4 packets that come by another device than
// answers would go.
func (w *world) mustBeStrict(t *testing.T) {
	t.Helper()
	for _, node := range w.Nodes {
		lab.Must(t, node.Sysctl("net/ipv4/conf/all/rp_filter", "1"))
	}
}

// mustSetBridgeNetfilter sets whether bridges pass what they forward to netfilter, as
// Kubernetes requires it, or not. Where the kernel cannot, they do not.
func (w *world) mustSetBridgeNetfilter(t *testing.T, value string) {
	t.Helper()
	for _, node := range w.Nodes {
		for _, setting := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
			if err := node.Sysctl("net/bridge/"+setting, value); !errors.Is(err, fs.ErrNotExist) {
				lab.Must(t, err)
			}
		}
	}
}
