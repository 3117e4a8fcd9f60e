package devices

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// The tests of this file have clients and routes that few clusters have. Most need the devices of
// one profile, see lab.Profiles.

// mustReach dials a Service in these ways, from addresses unless they are zero, so often that
// flows are spread over all paths, and wants its one backend to answer.
func (w *world) mustReach(t *testing.T, from *lab.Caller, sources [2]netip.Addr, to service, ways ...way) {
	t.Helper()
	const dials = 8
	var dialling sync.WaitGroup
	for _, f := range families {
		for _, way := range ways {
			for _, network := range networks {
				exchange := lab.Exchange{Network: network, Address: to.at(way, f, w.Nodes[0]), Timeout: dialTimeout}
				if sources[f].IsValid() {
					exchange.From = netip.AddrPortFrom(sources[f], 0).String()
				}
				dialling.Go(func() {
					for range dials {
						answer, err := answerTo(from, exchange)
						if err != nil || answer.Name != to.backends[0].name {
							t.Errorf("%s, %s of the %s of %s: %q, %v, want %s",
								f, network, way, to.name(), answer.Name, err, to.backends[0].name)
							return
						}
					}
				})
			}
		}
	}
	dialling.Wait()
}

func answerTo(from *lab.Caller, exchange lab.Exchange) (lab.Answer, error) {
	reply, err := from.Exchange(exchange)
	if err != nil {
		return lab.Answer{}, err
	}

	return lab.ParseAnswer(reply.Text)
}

// mustRefuse dials a Service without endpoints.
func (w *world) mustRefuse(t *testing.T, from *lab.Caller, to service) {
	t.Helper()
	dialTest{name: "no endpoints", from: from, to: to, ways: []way{clusterIP, loadBalancer}, errno: unix.ECONNREFUSED}.run(t, w)
}

// TestEqualUplinks has flows leave by either of two uplinks, as the stack chooses by their ports or by a mark, and
// the client far behind both of them. The next node takes from each address of node-1 only what comes by its device.
//
//	far client ═╦═ eth0 ═╦═ node-1 ═╦═ eth0 ═╦═ node-2
//	            ╚═ eth1 ═╝          ╚═ eth1 ═╝
func TestEqualUplinks(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, filter string
		byMark       bool
	}{
		{name: "turned around", filter: openCNI},
		{name: "by way of the stack", filter: looseCNI},
		{name: "by a mark", byMark: true, filter: looseCNI + `
		table inet marks {
			chain prerouting {
				type filter hook prerouting priority mangle
				ip daddr 10.244.2.0/24 meta mark set 0x1
				ip6 daddr fd00:10:244:2::/64 meta mark set 0x1
			}
		}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{Profile: "two-uplinks"}, filter: test.filter})
			testEqualUplinks(t, w, test.byMark)
		})
	}
}

func testEqualUplinks(t *testing.T, w *world, byMark bool) {
	first, next := w.Nodes[0], w.Nodes[1]
	far := [2]netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00:18::1")}
	near := hostIPs(w.Client)
	second := [2]netip.Addr{w.Client.SecondIPv4, w.Client.SecondIPv6}
	for _, f := range families {
		only := netip.PrefixFrom(far[f], far[f].BitLen())
		lab.Must(t, w.Client.AddAddress("lo", only), first.AddRoute(only, near[f], second[f]))
		if byMark {
			lab.Must(t, routeMarked(first, [2]netip.Addr{next.SecondIPv4, next.SecondIPv6}[f]))
		}
	}
	lab.Must(t, next.Netfilter(oneDeviceEach(first)))
	c := casesOf(w)
	w.start(t, c.services()...)
	w.mustForwardAs(t, w.setting.filter)
	caller := w.outside(t)
	for _, to := range []service{c.local, c.remote, c.host, c.remoteHost} {
		for _, from := range [][2]netip.Addr{far, near, second} {
			t.Run(fmt.Sprintf("%s to %s", from[ipv4], to.backends[0].name), func(t *testing.T) {
				w.mustReach(t, caller, from, to, everyWay...)
			})
		}
	}
	w.mustRefuse(t, caller, c.empty)
	text, err := w.agents[0].Run("flows", "-o", "json")
	lab.Must(t, err)
	if turned := strings.Contains(text, `"turned"`); turned != (w.setting.filter == openCNI) {
		t.Errorf("flows are turned around: %v", turned)
	}
}

// routeMarked gives marked packets of a node a default route of their own, by its second uplink.
func routeMarked(node *lab.Node, via netip.Addr) error {
	rule := netlink.NewRule()
	rule.Mark, rule.Family = 1, unix.AF_INET
	if via.Is6() {
		rule.Family = unix.AF_INET6
	}

	return routeBy(node, rule, via)
}

// TestPodsWithASecondInterface has the client in the network of the pods' second device: they
// have a way to it that does not pass by their node, for which the agent has --masquerade-all.
//
//	node-1 ── eth0 pod-1-1 net1 172.20.1.3 ══ second segment ══ eth1 172.20.0.100 client
func TestPodsWithASecondInterface(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{
		Config: lab.Config{Profile: "second-interface"}, filter: looseCNI, agent: []string{"--masquerade-all"},
	})
	first := w.Nodes[0]
	near := [2]netip.Addr{netip.MustParseAddr("172.20.0.100"), netip.MustParseAddr("fd00:172:20::100")}
	for _, f := range families {
		network := netip.PrefixFrom(near[f], []int{16, 64}[f])
		lab.Must(t, w.Client.AddAddress("eth1", network), first.AddRoute(network.Masked(), hostIPs(w.Client)[f]))
	}
	c := casesOf(w)
	w.start(t, c.services()...)
	for _, to := range []service{c.local, c.remote, c.host, c.remoteHost} {
		t.Run("the client to "+to.backends[0].name, func(t *testing.T) {
			w.mustReach(t, w.outside(t), near, to, fromOutside...)
		})
		t.Run("a pod to "+to.backends[0].name, func(t *testing.T) {
			w.mustReach(t, lab.MustCaller(t, first.Pods[0].Namespace, w.cgroups[0]), [2]netip.Addr{}, to, everyWay...)
			w.mustReach(t, w.optedOut(t, first.Pods[0]), [2]netip.Addr{}, to, everyWay...)
		})
	}
	w.mustRefuse(t, w.outside(t), c.empty)
}

// TestGatewayPod has a host behind a pod dial Services. Other nodes have no route to it.
//
//	172.30.1.2 ── pod-1-0 ── node-1 ─┬─ pod-1-1, node-1
//	                                 └─ pod-2-0, node-2
func TestGatewayPod(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{Profile: "gateway-pod"}, filter: looseCNI})
	c := casesOf(w)
	w.start(t, c.services()...)
	caller := lab.MustCaller(t, w.Nodes[0].Pods[0].Behind.Namespace, nil)
	for _, to := range []service{c.local, c.remote, c.host, c.remoteHost} {
		t.Run(to.backends[0].name, func(t *testing.T) { w.mustReach(t, caller, [2]netip.Addr{}, to, everyWay...) })
	}
	w.mustRefuse(t, caller, c.empty)
}

// TestNestedCluster has a cluster in a pod whose Services have addresses of the outer
// cluster's. Its processes are in the pod's cgroup.
//
//	172.30.1.2, 10.96.0.2, DNAT of 10.96.0.1 to itself ── pod-1-0 ── node-1 ─┬─ pod-1-1, node-1
//	                                                                        └─ pod-2-0, node-2
func TestNestedCluster(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{Profile: "nested-cluster"}, filter: looseCNI})
	first := w.Nodes[0]
	inner := first.Pods[0].Behind
	c := casesOf(w)
	translated, own := c.local, c.remote // as the inner cluster has them
	translated.backends, own.backends = []backend{{name: "inner"}}, []backend{{name: "inner"}}
	addresses := inner.At(podPort)
	for _, f := range families {
		ip := netip.MustParseAddr(own.ip(clusterIP, f))
		lab.Must(t, inner.AddAddress("lo", netip.PrefixFrom(ip, ip.BitLen())))
		addresses = append(addresses, netip.AddrPortFrom(ip, servicePort).String())
	}
	lab.MustServe(t, inner.Namespace, "inner", addresses...)
	lab.Must(t, inner.Netfilter(fmt.Sprintf(`table inet nested {
		chain output {
			type nat hook output priority -100
			ip daddr %s meta l4proto { tcp, udp } dnat to %s:%d
			ip6 daddr %s meta l4proto { tcp, udp } dnat to [%s]:%[3]d
		}
	}`, translated.ip(clusterIP, ipv4), inner.IPv4, podPort, translated.ip(clusterIP, ipv6), inner.IPv6)))
	w.start(t, c.services()...)

	caller := lab.MustCaller(t, inner.Namespace, w.cgroups[0])
	t.Run("its own Services", func(t *testing.T) {
		w.mustReach(t, caller, [2]netip.Addr{}, translated, clusterIP)
		w.mustReach(t, caller, [2]netip.Addr{}, own, clusterIP)
	})
	for _, to := range []service{c.host, c.remoteHost} {
		t.Run("the outer cluster's: "+to.backends[0].name, func(t *testing.T) {
			w.mustReach(t, caller, [2]netip.Addr{}, to, everyWay...)
		})
	}
	w.mustRefuse(t, caller, c.empty)
	t.Run("the pod itself, and another", func(t *testing.T) {
		for _, pod := range first.Pods {
			for _, cgroup := range []*lab.Cgroup{w.cgroups[0], nil} {
				w.mustReach(t, lab.MustCaller(t, pod.Namespace, cgroup), [2]netip.Addr{}, c.local, everyWay...)
				w.mustReach(t, lab.MustCaller(t, pod.Namespace, cgroup), [2]netip.Addr{}, c.remote, everyWay...)
			}
		}
	})
}

// TestVIPMoves leads the virtual addresses to another node under open connections, as MetalLB
// and equal routes do it when a node is lost. A connection that the new node does not know is
// reset at once, so that its client connects again; datagrams go on.
//
//	client ═╦═ VIP ═▶ node-1, then node-2 ═▶ pod-2-0 or pod-1-1
func TestVIPMoves(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{filter: looseCNI})
	c := casesOf(w)
	w.start(t, c.services()...)
	caller := w.outside(t)
	for _, to := range []service{c.local, c.remote} {
		backend := to.backends[0].name
		t.Run(backend, func(t *testing.T) {
			for _, node := range []*lab.Node{w.Nodes[1], w.Nodes[0]} {
				var streams, datagrams []*lab.Socket
				for f, number := range []string{"4", "6"} {
					address := to.at(loadBalancer, family(f), nil)
					streams = append(streams, mustConnect(t, caller, "tcp"+number, address))
					datagrams = append(datagrams, mustConnect(t, caller, "udp"+number, address))
					lab.Must(t, answeredBy(streams[f], backend), answeredBy(datagrams[f], backend))
				}
				w.leadTo(t, node)
				for _, f := range families {
					begin := time.Now()
					if err := answeredBy(streams[f], backend); lab.Errno(err) != unix.ECONNRESET || time.Since(begin) > atOnce {
						t.Errorf("%s: %v after %v at %s, want %v at once", f, err, time.Since(begin), node.Name, unix.ECONNRESET)
					}
					lab.Must(t, answeredBy(datagrams[f], backend))
				}
				w.mustReach(t, caller, [2]netip.Addr{}, to, loadBalancer, externalIP)
			}
		})
	}
}
