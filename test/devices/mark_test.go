package devices

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

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
