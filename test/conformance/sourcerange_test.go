package conformance

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// mustAdmit waits until of all clients, these and no others are admitted at a load
// balancer's address of both families.
func (b *balanced) mustAdmit(t *testing.T, who ...*scene.Client) {
	t.Helper()
	for _, vip := range b.vips {
		b.mustAdmitAt(t, vip, who...)
	}
}

func (b *balanced) mustAdmitAt(t *testing.T, vip string, who ...*scene.Client) {
	t.Helper()
	var out []scene.Dial
	for _, c := range b.allClients() {
		if d := c.To("tcp", scene.At(vip, 80)); slices.Contains(who, c) {
			scene.MustReach(t, d, b.here.Name, b.there.Name)
		} else {
			out = append(out, d)
		}
	}
	scene.MustAllFail(t, scene.Dropped, out...)
}

func (b *balanced) allClients() []*scene.Client { return append(b.Clients(), b.another) }

// hosts are single addresses as source ranges.
func hosts(ips ...netip.Addr) scene.Change {
	var ranges []string
	for _, ip := range ips {
		ranges = append(ranges, netip.PrefixFrom(ip, ip.BitLen()).String())
	}

	return scene.SourceRanges(ranges...)
}

// Source ranges apply to all clients, pods and the node included, and to the
// load balancer's addresses alone.
func TestSourceRanges(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	self := b.Lab.Nodes[0]
	everyone := b.allClients()
	b.mustAdmit(t, everyone...)

	b.ChangeService(t, "web", hosts(b.Outside.IPv4, b.Outside.IPv6))
	b.mustAdmit(t, b.Outside)
	b.mustReachBoth(t, scene.At(b.service.Spec.ClusterIPs[0], 80))
	b.mustReachBoth(t, scene.At(b.externals[0], 80))
	b.mustReachBoth(t, scene.At(b.externals[1], 80))
	b.mustReachBoth(t, b.nodePort())

	b.ChangeService(t, "web", hosts(b.Pod.IPv4, b.Pod.IPv6))
	b.mustAdmit(t, b.Pod)
	b.ChangeService(t, "web", hosts(b.Guest.IPv4, b.Guest.IPv6))
	b.mustAdmit(t, b.Guest)
	b.ChangeService(t, "web", hosts(self.IPv4, self.IPv6))
	b.mustAdmit(t, b.Node)

	// What does not restrict: a range of everything, and none of the family.
	b.ChangeService(t, "web", scene.SourceRanges("198.18.0.0/15", "0.0.0.0/0", "2001:db8:1::/48"))
	b.mustAdmitAt(t, b.vips[0], everyone...)
	b.mustAdmitAt(t, b.vips[1])
	b.ChangeService(t, "web", hosts(b.Outside.IPv6))
	b.mustAdmitAt(t, b.vips[0], everyone...)
	b.mustAdmitAt(t, b.vips[1], b.Outside)
}

// A process of the node that has the load balancer's address for its source is
// admitted if the node's own address is.
func TestSourceRangesOfTheNode(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	self := b.Lab.Nodes[0]
	bound := netip.MustParsePrefix(b.vips[0] + "/32")
	lab.Must(t, self.AddAddress("lo", bound))
	t.Cleanup(func() { lab.Must(t, self.RemoveAddress("lo", bound)) })
	vip := scene.At(b.vips[0], 80)
	asItself := lab.Exchange{Network: "tcp", Address: vip, From: b.vips[0] + ":0"}
	mustAnswer := func(want unix.Errno) {
		t.Helper()
		lab.Eventually(t, "a process that is bound to the address gets "+want.Error(), func() bool {
			reply, err := b.Node.Exchange(asItself)
			answer, _ := lab.ParseAnswer(reply.Text)
			// A pod of another node cannot answer an address that only this node has.
			return lab.Errno(err) == want && (want != 0 || answer.Name == b.here.Name)
		})
	}
	b.SetEndpoints(t, "web", scene.ReadyAll(b.here)...)
	scene.MustReach(t, b.Node.To("tcp", vip), b.here.Name)
	mustAnswer(0)
	b.ChangeService(t, "web", hosts(b.Outside.IPv4))
	mustAnswer(unix.EHOSTUNREACH)
	b.ChangeService(t, "web", hosts(b.Outside.IPv4, self.IPv4))
	mustAnswer(0)
}

// Without endpoints, clients in the ranges are refused, and others are still
// dropped.
func TestSourceRangesWithoutEndpoints(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	b.ChangeService(t, "web", hosts(b.Outside.IPv4, b.Outside.IPv6))
	b.SetEndpoints(t, "web")
	for _, vip := range b.vips {
		scene.MustFail(t, b.Outside.To("udp", scene.At(vip, 80)), scene.Rejected)
		others := []*scene.Client{b.Pod, b.Guest, b.Node, b.another}
		scene.MustAllFail(t, scene.Dropped, scene.Dials(others, "udp", scene.At(vip, 80))...)
	}
}
