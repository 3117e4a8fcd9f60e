package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// hashedTo is the backend of a client's address in the table of a service.
func (s *service) hashedTo(client netip.Addr) uint32 {
	addr := client.As16()

	return mapstest.Hashed(s.table, addr[:])
}

// ofFamily is the address of the way's family.
func (w way) ofFamily(v4, v6 netip.Addr) netip.Addr {
	if strings.HasSuffix(w.network, "6") {
		return v6
	}

	return v4
}

// from has a client that is bound to an address begin a flow, and returns which backend answers.
func (b balanced) from(t testing.TB, client *lab.Caller, at string, source netip.Addr) uint32 {
	t.Helper()
	reply, err := client.Exchange(lab.Exchange{
		Network: b.way.network, Address: at, Unconnected: b.way.unconnected, From: netip.AddrPortFrom(source, 0).String(),
	})
	lab.Must(t, err)

	return b.backends[slices.Index(b.to, mustAnswer(t, reply.Text).Local.String())]
}

// A client is the address that devices and backends see: also at sockets, where the kernel has not chosen one yet.
func TestClientIsItsAddress(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	pod, host := w.pod(t), w.host(t)
	second4, bridge4 := netip.MustParseAddr("10.244.1.100"), netip.MustParseAddr("10.244.1.1")
	lab.Must(t, w.client.AddAddress("eth0", netip.PrefixFrom(second4, 24)))
	for _, a := range []netip.Addr{w.node.IPv4, w.node.IPv6, bridge4} {
		w.mark(t, a, maps.AddrNode)
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			b := w.balance(t, way, maps.AlgorithmSH, 0)
			must := func(what string, got uint32, client netip.Addr) {
				t.Helper()
				if want := b.hashedTo(client); got != want {
					t.Errorf("%s: backend %d, want %d of %s", what, got, want, client)
				}
			}
			own, node := way.ofFamily(w.client.IPv4, w.client.IPv6), way.ofFamily(w.node.IPv4, w.node.IPv6)
			must("a pod", b.ask(t, pod, b.at[0]), own)
			must("a pod that is bound to its address", b.from(t, pod, b.at[1], own), own)
			must("the node", b.ask(t, host, b.at[0]), node)
			must("the node, bound to its address", b.from(t, host, b.at[1], node), node)
			if own == w.client.IPv4 {
				must("a pod that is bound to its second address", b.from(t, pod, b.at[0], second4), second4)
				must("the node, bound to the bridge's address", b.from(t, host, b.at[0], bridge4), bridge4)
			}
		})
	}
	for _, network := range []string{"tcp6", "udp6"} {
		t.Run(network+" to IPv4", func(t *testing.T) {
			b := w.balance(t, way{network: network[:3] + "4"}, maps.AlgorithmSH, 0)
			for _, from := range []netip.Addr{{}, w.client.IPv4, second4} {
				x := lab.Exchange{Network: network, Address: "[::ffff:" + strings.Replace(b.at[0], ":", "]:", 1)}
				want := w.client.IPv4
				if from.IsValid() {
					want, x.From = from, "[::ffff:"+from.String()+"]:0"
				}
				for _, x.Unconnected = range []bool{false, network == "udp6"} {
					reply, err := pod.Exchange(x)
					lab.Must(t, err)
					if got := b.backends[slices.Index(b.to, mustAnswer(t, reply.Text).Local.String())]; got != b.hashedTo(want) {
						t.Errorf("from %q: backend %d, want %d of %s", x.From, got, b.hashedTo(want), want)
					}
				}
			}
		})
	}
}

// A UDP socket of the node that is connected again keeps the address by which the kernel reached its first peer. It is the
// client that it was, also for source ranges.
func TestClientConnectsAgain(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	host := w.host(t)
	for _, test := range []struct {
		network, other, at, ranges string
		to                         []string
		node, bridge               netip.Addr
	}{
		{"udp4", "10.96.0.1:80", "10.96.0.2:80", "192.168.50.0/24", w.all4(), w.node.IPv4, netip.MustParseAddr("10.244.1.1")},
		{"udp6", "[fd00:96::1]:80", "[fd00:96::2]:80", "fd00:50::/64", w.all6(), w.node.IPv6, netip.MustParseAddr("fd00:10:244:1::1")},
	} {
		t.Run(test.network, func(t *testing.T) {
			for _, a := range []netip.Addr{test.node, test.bridge} {
				w.mark(t, a, maps.AddrNode)
			}
			w.add(t, service{proto: "udp", at: []string{test.other}, to: test.to})
			s := w.add(t, service{
				proto: "udp", at: []string{test.at}, to: test.to, affinity: 1000,
				flags: maps.PoolSourceRanges | maps.PoolNodeInRanges, ranges: []string{test.ranges},
			})
			socket := mustSocket(t, host, test.network)
			lab.Must(t, socket.Connect(test.other))
			if local, err := socket.Local(); err != nil || local.Addr() != test.bridge {
				t.Fatalf("it has the address %s, %v", local, err)
			}
			counted := w.counted(t, func() { lab.Must(t, socket.Connect(test.at)) })
			if counted[maps.ReasonTranslated] != 1 {
				t.Errorf("it is not translated: %v", counted)
			}
			for client, want := range map[netip.Addr]bool{test.node: true, test.bridge: false} {
				_, has, err := w.Maps().Affinity.Lookup(affinityKey(client, s))
				lab.Must(t, err)
				if has != want {
					t.Errorf("%s has affinity: %t", client, has)
				}
			}
		})
	}
}

// backendOfOwn waits for the flow of a socket of the node, and returns its backend.
func (w *world) backendOfOwn(t testing.TB, from, at netip.AddrPort) (id uint32) {
	t.Helper()
	key := maps.FlowKeyOf(maps.HookEgress, unix.IPPROTO_UDP, from, at)
	lab.Eventually(t, fmt.Sprintf("there is a flow from %s to %s", from, at), func() bool {
		for _, table := range []*maps.Map[maps.FlowKey, maps.Flow]{w.Maps().Opening(key.Proto), w.Maps().Flows} {
			f, has, err := table.Lookup(key)
			lab.Must(t, err)
			if has {
				id = f.BackendId

				return true
			}
		}

		return false
	})

	return id
}

// A process of a node with several uplinks is one client. A datagram that no socket hook has translated has the address
// of the uplink to which the route to the Service leads.
func TestClientOfSeveralUplinks(t *testing.T) {
	w := newWorldBy(t, lab.Routed)
	w.needsNode(t)
	device := w.client.Device
	uplink4, uplink6 := netip.MustParseAddr("192.168.60.1"), netip.MustParseAddr("fd00:60::2")
	w.mustAttachPods(t)
	lab.MustDo(t, w.node.Namespace, func() error {
		link, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}

		return w.Maps().Devices.Put(uint32(link.Index), maps.Device{SourceV4: maps.AddrOf(uplink4), SourceV6: maps.AddrOf(uplink6)})
	})
	for _, test := range []struct {
		network, vip          string // of the i-th Service of the j-th client
		services              netip.Prefix
		node, uplink, gateway netip.Addr
		to                    []string
	}{
		{"udp4", "10.96.%d.%d:80", netip.MustParsePrefix("10.96.0.0/16"), w.node.IPv4, uplink4, w.client.IPv4, w.all4()},
		{"udp6", "[fd00:96::%d:%d]:80", netip.MustParsePrefix("fd00:96::/64"), w.node.IPv6, uplink6, w.client.IPv6, w.all6()},
	} {
		t.Run(test.network, func(t *testing.T) {
			lab.Must(t, w.node.AddAddress(device, netip.PrefixFrom(test.uplink, test.uplink.BitLen()-8)))
			w.mark(t, test.node, maps.AddrNode)
			w.mark(t, test.uplink, maps.AddrNode)
			lab.MustDo(t, w.node.Namespace, func() error {
				link, err := net.InterfaceByName(device)
				if err != nil {
					return err
				}

				return w.node.Netlink().RouteReplace(&netlink.Route{
					Dst:       &net.IPNet{IP: test.services.Addr().AsSlice(), Mask: net.CIDRMask(test.services.Bits(), test.services.Addr().BitLen())},
					LinkIndex: link.Index, Gw: test.gateway.AsSlice(), Src: test.uplink.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
				})
			})
			host := w.host(t)
			for i := range 6 {
				for j, client := range []netip.Addr{test.node, test.uplink} {
					at := fmt.Sprintf(test.vip, i, j+1)
					socket := mustSocket(t, host, test.network)
					if client == test.uplink {
						lab.Must(t, socket.Bind(netip.AddrPortFrom(test.uplink, 0).String()))
					}
					lab.Must(t, socket.Connect(at))
					local, err := socket.Local()
					if err != nil || local.Addr() != test.uplink {
						t.Fatalf("it has the address %s, %v", local, err)
					}
					s := w.add(t, service{proto: "udp", at: []string{at}, to: test.to, algorithm: maps.AlgorithmSH, affinity: 1000 * uint32(i%2)})
					if s.hashedTo(test.node) == s.hashedTo(test.uplink) {
						t.Fatal("both addresses have one hash: this shows nothing")
					}
					lab.Must(t, socket.Send("who"))
					if got := w.backendOfOwn(t, local, netip.MustParseAddrPort(at)); got != s.hashedTo(client) {
						t.Errorf("bound: %t: backend %d, want %d of %s", client == test.uplink, got, s.hashedTo(client), client)
					}
				}
			}
		})
	}
}

// Any socket can be bound to an address that is not there, and is no other client by that.
func TestClientIsNotWhatItClaims(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	const at = "10.96.0.9:80"
	s := w.add(t, service{proto: "udp", at: []string{at}, to: w.all4(), affinity: 1000})
	for name, test := range map[string]struct {
		client *lab.Caller
		own    netip.Addr
	}{"a pod": {w.pod(t), w.client.IPv4}, "the node": {w.host(t), w.node.IPv4}} {
		for what, claimed := range map[string]netip.Addr{
			"an address that is not there": netip.MustParseAddr("10.244.1.200"), "what it dials": netip.MustParseAddrPort(at).Addr(),
		} {
			t.Run(name+" claims "+what, func(t *testing.T) {
				socket := mustSocket(t, test.client, "udp4")
				lab.Must(t, socket.SetOption(unix.IPPROTO_IP, unix.IP_FREEBIND, 1), socket.Bind(claimed.String()+":0"))
				for range 2 {
					_ = socket.Connect(at) // no route has that source
				}
				for client, want := range map[netip.Addr]bool{claimed: false, test.own: true} {
					_, has, err := w.Maps().Affinity.Lookup(affinityKey(client, s))
					lab.Must(t, err)
					if has != want {
						t.Errorf("%s has affinity: %t", client, has)
					}
				}
			})
		}
	}
}

// A client whose sockets are translated, and whose packets are at other times, keeps one backend: the one that it got
// first, or that of its hash.
func TestClientAtSocketsAndDevices(t *testing.T) {
	w := newWorldBy(t, lab.Routed)
	w.mustAttachPods(t)
	pod, unseen := w.pod(t), lab.MustCaller(t, w.client.Namespace, nil)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			for i := range 12 { // of two clients, all have the same by chance once in 500,000 times
				b := w.balance(t, way, maps.AlgorithmRandom, 1000)
				clients := []*lab.Caller{pod, unseen}
				if i%2 == 1 {
					slices.Reverse(clients)
				}
				first, then := b.ask(t, clients[0], b.at[0]), b.ask(t, clients[1], b.at[1])
				if first != then {
					t.Fatalf("with affinity: backends %d and %d, with the socket first: %t", first, then, i%2 == 0)
				}
			}
			b, own := w.balance(t, way, maps.AlgorithmSH, 0), way.ofFamily(w.client.IPv4, w.client.IPv6)
			for i, client := range []*lab.Caller{pod, unseen} {
				if got := b.ask(t, client, b.at[i]); got != b.hashedTo(own) {
					t.Errorf("by sh: backend %d, want %d; at the socket: %t", got, b.hashedTo(own), i == 0)
				}
			}
		})
	}
}

// With a seed, a client and an address have the same backend at sockets and at devices, also once the programs have been
// loaded anew.
func TestHashSeed(t *testing.T) {
	seed := bpf.SeedOf("not for clients")
	w := newWorldBy(t, lab.Routed, func(cfg *Config) { cfg.HashSeed = seed })
	w.mustAttachPods(t)
	pod, unseen := w.pod(t), lab.MustCaller(t, w.client.Namespace, nil)
	type choice struct {
		b    balanced
		addr netip.Addr // what is hashed
	}
	var choices []choice
	for _, way := range ways {
		choices = append(choices, choice{w.balance(t, way, maps.AlgorithmSH, 0), way.ofFamily(w.client.IPv4, w.client.IPv6)})
		b := w.balance(t, way, maps.AlgorithmDH, 0)
		choices = append(choices, choice{b, netip.MustParseAddrPort(b.at[0]).Addr()})
	}
	for _, again := range []bool{false, true} {
		if again {
			lab.Must(t, w.Close())
			w.Datapath = w.mustOpen(t, w.cfg)
			w.mustAttach(t)
			w.mustAttachPods(t)
		}
		for _, c := range choices {
			addr := c.addr.As16()
			want := mapstest.HashedBy(seed, c.b.table, addr[:])
			for _, client := range []*lab.Caller{pod, unseen} {
				if got := c.b.ask(t, client, c.b.at[0]); got != want {
					t.Errorf("%s by %s: backend %d, want %d; at the socket: %t, again: %t", c.b.way.name, c.addr, got, want, client == pod, again)
				}
			}
		}
	}
}

// A pod that is made again with its address is the client that it was.
func TestClientIsMadeAgain(t *testing.T) {
	w := newWorld(t)
	var hashed, kept []balanced
	for i := range 18 {
		way := ways[i%len(ways)]
		s := service{proto: way.network[:3], at: []string{fmt.Sprintf("10.96.0.%d:80", i+1)}, to: w.all4()}
		if strings.HasSuffix(way.network, "6") {
			s.at, s.to = []string{fmt.Sprintf("[fd00:96::%d]:80", i+1)}, w.all6()
		}
		if i < len(ways) {
			s.algorithm = maps.AlgorithmSH
			hashed = append(hashed, balanced{w.add(t, s), w, way})
		} else {
			s.affinity = 1000
			kept = append(kept, balanced{w.add(t, s), w, way})
		}
	}
	addresses := []netip.Prefix{netip.MustParsePrefix("10.244.1.99/24"), netip.MustParsePrefix("fd00:10:244:1::99/64")}
	var before []uint32
	for range 3 {
		ns, err := lab.NewNamespace("again")
		lab.Must(t, err)
		lab.Must(t, lab.Veth(lab.End{Namespace: w.node.Namespace, Device: "again", Bridge: "br0"}, lab.End{Namespace: ns, Device: "eth0", Addresses: addresses}))
		pod := lab.MustCaller(t, ns, w.cgroup)
		for _, b := range hashed {
			client := b.way.ofFamily(addresses[0].Addr(), addresses[1].Addr())
			if got := b.ask(t, pod, b.at[0]); got != b.hashedTo(client) {
				t.Errorf("%s by sh: backend %d, want %d", b.way.name, got, b.hashedTo(client))
			}
		}
		var now []uint32
		for _, b := range kept {
			now = append(now, b.ask(t, pod, b.at[0]))
		}
		if before != nil && !slices.Equal(now, before) {
			t.Errorf("with affinity: backends %d, want %d", now, before)
		}
		before = now
		lab.Must(t, w.node.RemoveDevice("again"), ns.Close())
	}
}
