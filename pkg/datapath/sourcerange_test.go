package datapath

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Only sources in loadBalancerSourceRanges reach a Service that has them. The kernel has
// not chosen the client's address yet when the hook decides.
func TestSourceRanges(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	const pods4, pods6 = "203.0.113.1:80", "[2001:db8::1]:80"
	const node4, node6 = "203.0.113.2:80", "[2001:db8::2]:80"
	for _, proto := range []string{"tcp", "udp"} {
		add := func(at, to string, flags uint16, ranges ...string) {
			w.add(t, service{proto: proto, at: []string{at}, to: []string{to}, flags: flags, ranges: ranges})
		}
		add(pods4, w.v4(0), 0, "10.244.1.2/32", "10.9.1.0/24")
		add(pods6, w.v6(0), 0, "fd00:10:244:1::2/128", "fd00:9:1::/64")
		add(node4, w.v4(0), maps.PoolNodeInRanges, "192.168.50.0/24", "10.9.2.0/24")
		add(node6, w.v6(0), maps.PoolNodeInRanges, "fd00:50::/64")
	}
	pod, host := w.pod(t), w.host(t)
	multi := lab.MustCaller(t, w.multiHomed(t), w.cgroup)
	lonely := lab.MustCaller(t, lab.MustNamespace(t, "lonely"), w.cgroup)

	for _, test := range []struct {
		name    string
		client  *lab.Caller
		from    string
		dial    string
		allowed bool
	}{
		{"a pod in the ranges", pod, "", pods4, true},
		{"a pod in the ranges, bound", pod, "10.244.1.2:0", pods4, true},
		{"a pod in the ranges, IPv6", pod, "", pods6, true},
		{"a pod in the ranges, IPv6, bound", pod, "[fd00:10:244:1::2]:0", pods6, true},
		{"a pod in the ranges, v4-mapped", pod, "", "[::ffff:203.0.113.1]:80", true},
		{"a pod in the ranges, v4-mapped, bound", pod, "[::ffff:10.244.1.2]:0", "[::ffff:203.0.113.1]:80", true},
		{"a pod outside of the ranges", pod, "", node4, false},
		{"a pod outside of the ranges, IPv6", pod, "", node6, false},
		{"a pod outside of the ranges, v4-mapped", pod, "", "[::ffff:203.0.113.2]:80", false},
		{"the node in the ranges", host, "", node4, true},
		{"the node in the ranges, IPv6", host, "", node6, true},
		{"the node outside of the ranges", host, "", pods4, false},
		{"the node outside of the ranges, IPv6", host, "", pods6, false},
		{"the node by an address outside of the ranges", host, "10.244.1.1:0", node4, false},
		{"the first address of several devices", multi, "", pods4, true},
		{"the first address of several devices, IPv6", multi, "", pods6, true},
		{"the second address, bound", multi, "10.9.2.2:0", pods4, false},
		{"the second address, bound and allowed", multi, "10.9.2.2:0", node4, true},
		{"no address", lonely, "", pods4, false},
		{"no address, IPv6", lonely, "", pods6, false},
	} {
		for _, proto := range []string{"tcp", "udp"} {
			t.Run(test.name+", "+proto, func(t *testing.T) {
				counted := w.counted(t, func() {
					s := mustSocket(t, test.client, network(proto, test.dial))
					lab.Must(t, s.SetTimeout(1)) // no answer comes to the other network
					if test.from != "" {
						lab.Must(t, s.Bind(test.from))
					}
					err := s.Connect(test.dial)
					if !test.allowed && w.Features().SetRetval && lab.Errno(err) != unix.EHOSTUNREACH {
						t.Errorf("connect: %v, want %v", err, unix.EHOSTUNREACH)
					}
				})
				want := maps.ReasonDropSourceRange
				if test.allowed {
					want = maps.ReasonTranslated
				}
				if counted[want] != 1 {
					t.Errorf("counted %v, want %s", counted, want)
				}
			})
		}
	}
	t.Run("refused without ranges of the family", func(t *testing.T) {
		w.add(t, service{proto: "udp", at: []string{"203.0.113.3:80"}, to: []string{w.v4(0)}, flags: maps.PoolSourceRanges})
		counted := w.counted(t, func() { _ = mustSocket(t, pod, "udp4").Connect("203.0.113.3:80") })
		if counted[maps.ReasonDropSourceRange] != 1 {
			t.Errorf("counted %v", counted)
		}
	})
}

// multiHomed is a namespace with a device that is down, and two that are up.
func (w *world) multiHomed(t testing.TB) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, "multi")
	for _, device := range []struct{ name, v4, v6 string }{
		{name: "down"},
		{"one", "10.9.1.2/24", "fd00:9:1::2/64"},
		{"two", "10.9.2.2/24", "fd00:9:2::2/64"},
	} {
		end := lab.End{Namespace: ns, Device: device.name}
		if device.name != "down" {
			end.Addresses = []netip.Prefix{netip.MustParsePrefix(device.v4), netip.MustParsePrefix(device.v6)}
		}
		lab.MustVeth(t, end, lab.End{Namespace: w.node.Namespace, Device: "multi-" + device.name})
	}
	lab.Must(t, ns.AddAddress("down", netip.MustParsePrefix("10.9.3.2/24")), ns.SetDown("down"),
		ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.9.1.1")),
		ns.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr("fd00:9:1::1")))

	return ns
}
