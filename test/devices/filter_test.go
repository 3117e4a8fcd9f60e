package devices

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

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

// TestRulesForMarkedPackets has a firewall drop what a client sends to Services by their mark, as
// docs/kube-proxy.md has it. A rule for the node port matches nothing, and the client's other
// connections go on.
//
//	client ══ node port ══▶ mark ══ raw prerouting ══ pod-1-1
//	client ═══════════════════════ raw prerouting ══ pod-1-1, node-1
func TestRulesForMarkedPackets(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{agent: []string{"--mark", "0x100"}})
	node, pod := w.Nodes[0], w.Nodes[0].Pods[1]
	lab.Must(t, w.Client.AddRoute(netip.PrefixFrom(pod.IPv4, 32), node.IPv4))
	c := casesOf(w)
	w.start(t, c.local)
	caller := w.outside(t)
	dial := func(address string) error {
		_, err := caller.Exchange(lab.Exchange{Network: "tcp4", Address: address, Timeout: dialTimeout / 5})

		return err
	}
	toService := c.local.at(nodePort, ipv4, node)
	others := []string{netip.AddrPortFrom(pod.IPv4, podPort).String(), netip.AddrPortFrom(node.IPv4, podPort).String()}
	lab.Must(t, node.Netfilter(fmt.Sprintf(`table ip port {
		chain prerouting {
			type filter hook prerouting priority raw
			tcp dport %d drop
		}
	}`, c.local.nodePort())))
	for _, address := range append(others, toService) {
		lab.Must(t, dial(address))
	}

	page, err := os.ReadFile("../../docs/kube-proxy.md")
	lab.Must(t, err)
	_, rules, _ := strings.Cut(string(page), "```nft\n")
	rules, _, found := strings.Cut(rules, "```")
	if !found {
		t.Fatal("docs/kube-proxy.md has no rules")
	}
	lab.Must(t, node.Netfilter(strings.Replace(rules, "192.0.2.0/24", hostIPs(w.Client)[ipv4].String(), 1)))
	if err := dial(toService); err == nil {
		t.Error("the rule for marked packets drops none")
	}
	for _, address := range others {
		lab.Must(t, dial(address))
	}
}

// TestForeignProgramEndsTheChain puts a program ahead of Sluice's that lets every packet pass
// and calls none behind it. Sluice takes the first place again.
//
//	client ══ load balancer ══▶ other program, Sluice ── node-1 ── pod-1-1
func TestForeignProgramEndsTheChain(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{})
	node := w.Nodes[0]
	uplink, err := node.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "ends_chain", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}, // TC_ACT_OK
	})
	lab.Must(t, err)
	defer program.Close()
	c := casesOf(w)
	w.start(t, c.local)
	caller, address := w.outside(t), c.local.at(loadBalancer, ipv4, nil)
	works := func() error {
		reply, err := caller.Exchange(lab.Exchange{Network: "tcp4", Address: address, Timeout: dialTimeout / 10})
		if err == nil {
			err = expect(reply, "pod-1-1", hostIPs(w.Client)[ipv4])
		}

		return err
	}
	lab.Must(t, works())
	var other link.Link
	err = node.Do(func() error {
		other, err = link.AttachTCX(link.TCXOptions{
			Interface: uplink.Attrs().Index, Program: program, Attach: ebpf.AttachTCXIngress, Anchor: link.Head(),
		})

		return err
	})
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skip("this kernel has no tcx (Linux 6.6)")
	}
	lab.Must(t, err)
	defer other.Close()
	if works() == nil {
		t.Error("it works although Sluice sees no packet")
	}
	// The agent checks when a device comes.
	lab.MustVeth(t, lab.End{Namespace: node.Namespace, Device: "new"}, lab.End{Namespace: w.Client.Namespace, Device: "new"})
	lab.Eventually(t, "it works again", works)
}
