package datapath

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Only sources in loadBalancerSourceRanges reach a Service that has them. The kernel has not chosen the client's
// address yet when the hook decides, so the device of a pod decides who is admitted.
func TestSourceRanges(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	const pods4, pods6 = "203.0.113.1:80", "[2001:db8::1]:80"
	const node4, node6 = "203.0.113.2:80", "[2001:db8::2]:80"
	const admitted, byDevice, refused = maps.ReasonTranslated, maps.ReasonPassDisabled, maps.ReasonDropSourceRange
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
	above := lab.MustCaller(t, w.aboveDevice(t, "10.9.1.9/24"), w.cgroup)

	for _, test := range []struct {
		name   string
		client *lab.Caller
		from   string
		dial   string
		want   maps.Reason
	}{
		{"a pod in the ranges", pod, "", pods4, byDevice},
		{"a pod in the ranges, bound", pod, "10.244.1.2:0", pods4, byDevice},
		{"a pod in the ranges, IPv6", pod, "", pods6, byDevice},
		{"a pod in the ranges, IPv6, bound", pod, "[fd00:10:244:1::2]:0", pods6, byDevice},
		{"a pod in the ranges, v4-mapped", pod, "", "[::ffff:203.0.113.1]:80", byDevice},
		{"a pod in the ranges, v4-mapped, bound", pod, "[::ffff:10.244.1.2]:0", "[::ffff:203.0.113.1]:80", byDevice},
		{"a pod outside of the ranges", pod, "", node4, refused},
		{"a pod outside of the ranges, IPv6", pod, "", node6, refused},
		{"a pod outside of the ranges, v4-mapped", pod, "", "[::ffff:203.0.113.2]:80", refused},
		{"the node in the ranges", host, "", node4, admitted},
		{"the node in the ranges, IPv6", host, "", node6, admitted},
		{"the node outside of the ranges", host, "", pods4, refused},
		{"the node outside of the ranges, IPv6", host, "", pods6, refused},
		{"the node by an address outside of the ranges", host, "10.244.1.1:0", node4, refused},
		{"a pod with several devices", multi, "", pods4, byDevice},
		{"a pod with several devices, IPv6", multi, "", pods6, byDevice},
		{"a pod with several devices, of which the first is outside", multi, "", node4, byDevice},
		{"the second address, bound", multi, "10.9.2.2:0", pods4, refused},
		{"the second address, bound and allowed", multi, "10.9.2.2:0", node4, byDevice},
		{"the first address where no device sees packets", above, "", pods4, admitted},
		{"the first address where no device sees packets, outside of the ranges", above, "", node4, refused},
		{"no address", lonely, "", pods4, refused},
		{"no address, IPv6", lonely, "", pods6, refused},
	} {
		for _, proto := range []string{"tcp", "udp"} {
			t.Run(test.name+", "+proto, func(t *testing.T) {
				counted := w.counted(t, func() {
					s := mustSocket(t, test.client, network(proto, test.dial))
					if test.from != "" {
						lab.Must(t, s.Bind(test.from))
					}
					call := func() error {
						lab.Must(t, s.SetTimeout(1)) // no answer comes to the other network
						return s.Connect(test.dial)
					}
					if proto == "udp" { // a connect() is not refused
						call = func() error { return s.SendTo("who", test.dial) }
					}
					err := call()
					if test.want == refused && w.Features().SetRetval && lab.Errno(err) != unix.EHOSTUNREACH {
						t.Errorf("got %v, want %v", err, unix.EHOSTUNREACH)
					}
				})
				if counted[test.want] != 1 {
					t.Errorf("counted %v, want %s", counted, test.want)
				}
			})
		}
	}
	t.Run("refused without ranges of the family", func(t *testing.T) {
		w.add(t, service{proto: "udp", at: []string{"203.0.113.3:80"}, to: []string{w.v4(0)}, flags: maps.PoolSourceRanges})
		counted := w.counted(t, func() { _ = mustSocket(t, pod, "udp4").SendTo("who", "203.0.113.3:80") })
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

// Source ranges judge the address with which a packet leaves the pod: not that of a container behind it, and not one
// that the pod gives itself.
func TestSourceRangesOfWhatLeavesThePod(t *testing.T) {
	w, container := newNested(t)
	forged := lab.MustNamespace(t, "forged") // as a pod can make it
	lab.Must(t, forged.AddBridge("eth0", netip.MustParsePrefix("198.51.100.9/24"), netip.MustParsePrefix("2001:db8:9::9/64")),
		w.client.AddAddress("lo", netip.MustParsePrefix("198.51.100.9/32")), w.client.AddAddress("lo", netip.MustParsePrefix("2001:db8:9::9/128")))
	for _, proto := range []string{"tcp", "udp"} {
		for _, s := range []service{
			{at: []string{"203.0.113.1:80"}, to: []string{w.v4(0)}, ranges: []string{"10.244.1.2/32"}},
			{at: []string{"[2001:db8::1]:80"}, to: []string{w.v6(0)}, ranges: []string{"fd00:10:244:1::2/128"}},
			{at: []string{"203.0.113.2:80"}, to: []string{w.v4(0)}, ranges: []string{"172.18.0.0/24", "198.51.100.0/24"}},
			{at: []string{"[2001:db8::2]:80"}, to: []string{w.v6(0)}, ranges: []string{"fd00:0::/64", "2001:db8:9::/64"}},
		} {
			s.proto = proto
			w.add(t, s)
		}
	}
	pods, others := []string{"203.0.113.1:80", "[2001:db8::1]:80"}, []string{"203.0.113.2:80", "[2001:db8::2]:80"}
	pod := w.pod(t)
	for _, test := range []struct {
		name     string
		client   *lab.Caller
		from     []string
		dial     []string
		admitted bool
	}{
		{"a pod in the ranges", pod, nil, pods, true},
		{"a container behind a pod in the ranges", lab.MustCaller(t, container, w.cgroup), nil, pods, true},
		{"a container in the ranges, behind a pod outside of them", lab.MustCaller(t, container, w.cgroup), nil, others, false},
		{"a namespace that a pod has made", lab.MustCaller(t, forged, w.cgroup), nil, others, false},
		{"an address that a pod has given itself", pod, []string{"198.51.100.9:0", "[2001:db8:9::9]:0"}, others, false},
	} {
		for i, at := range test.dial {
			for _, proto := range []string{"tcp", "udp"} {
				t.Run(test.name+", "+network(proto, at), func(t *testing.T) {
					counted := w.counted(t, func() {
						s := mustSocket(t, test.client, network(proto, at))
						lab.Must(t, s.SetTimeout(300*time.Millisecond))
						if test.from != nil {
							lab.Must(t, s.Bind(test.from[i]))
						}
						err := s.Connect(at)
						if err == nil {
							err = s.Send("who\n")
						}
						if err == nil {
							_, _, err = s.Recv()
						}
						if admitted := err == nil; admitted != test.admitted {
							t.Errorf("admitted: %v (%v), want %v", admitted, err, test.admitted)
						}
					})
					if translated := counted[maps.ReasonTranslated] > 0; translated != test.admitted {
						t.Errorf("translated: %v, want %v: %v", translated, test.admitted, counted)
					}
				})
			}
		}
	}
}

// aboveDevice is a namespace with this address on a device above one of the node, as macvlan makes them: here it is
// a tunnel.
func (w *world) aboveDevice(t testing.TB, address string) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, "above")
	w.mustPutAbove(t, ns)
	lab.Must(t, ns.SetUp("above"), ns.AddAddress("above", netip.MustParsePrefix(address)),
		ns.AddDeviceRoute(netip.MustParsePrefix("0.0.0.0/0"), "above"))

	return ns
}
