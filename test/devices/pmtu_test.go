package devices

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestPathMTUToBackend sends more than fits into the tunnel. The node reports that to
// the client, which knows the Service's address only; so the error has to contain
// that address.
//
//	client 1500 ── 1500 eth0 node-1 vxlan0 1300 ── vxlan0 node-2 ── 1500 pod-2-0
//	       ◀── too big, 1300 ──┘
func TestPathMTUToBackend(t *testing.T) {
	for name, filter := range map[string]string{"through the stack": bridgeCNI, "past it": openCNI} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testPathMTUToBackend(t, filter)
		})
	}
}

func testPathMTUToBackend(t *testing.T, filter string) {
	t.Helper()
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: narrow, PodMTU: 1500},
		filter: filter,
	})
	w.mustBeStrict(t)
	c := casesOf(w)
	bulk := service{number: 20, port: bulkPort, backends: c.remote.backends}
	w.start(t, c.remote, bulk)
	w.mustForwardAs(t, filter)
	w.mustSwallow(t)
	caller := w.outside(t)

	for _, f := range families {
		for _, way := range []way{nodePort, loadBalancer} {
			t.Run(fmt.Sprintf("%s, %s", f, way), func(t *testing.T) {
				mustLearn(t, caller, c.remote.at(way, f, w.Nodes[0]))
				if _, _, err := transfer(w.Client.Namespace, bulk.at(way, f, w.Nodes[0]), 4<<20, 4<<20); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// narrow is the MTU of a link that is smaller than those before it.
const narrow = 1300

// mustLearn sends datagrams that may not be fragmented, and expects the kernel to learn
// how large they may be.
func mustLearn(t *testing.T, from *lab.Caller, address string) {
	t.Helper()
	target := netip.MustParseAddrPort(address)
	level, discover, mtu, headers := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_MTU, 28
	if target.Addr().Is6() {
		level, discover, mtu, headers = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_MTU, 48
	}
	socket, err := from.Socket(map[bool]string{false: "udp4", true: "udp6"}[target.Addr().Is6()])
	lab.Must(t, err)
	defer socket.Close()
	lab.Must(t, socket.SetOption(level, discover, unix.IP_PMTUDISC_DO), socket.Connect(address))

	big, fits := strings.Repeat("x", narrow-headers+1), strings.Repeat("x", narrow-headers)
	lab.Must(t, socket.Send(big))
	if text, _, err := socket.Recv(); lab.Errno(err) != unix.EMSGSIZE {
		t.Fatalf("answer to %d bytes: %.40q, %v, want EMSGSIZE", len(big), text, err)
	}
	if known, err := socket.Option(level, mtu); err != nil || known != narrow {
		t.Errorf("MTU of the path is %d, %v, want %d", known, err, narrow)
	}
	if err := socket.Send(big); lab.Errno(err) != unix.EMSGSIZE {
		t.Errorf("the same again: %v, want EMSGSIZE", err)
	}
	lab.Must(t, socket.Send(fits), socket.SetTimeout(dialTimeout))
	if text, _, err := socket.Recv(); err != nil {
		t.Errorf("answer to %d bytes: %.40q, %v", len(fits), text, err)
	}
}

// TestPathMTUToClient has a backend answer with more than fits into a link on the
// way to the client. The router there reports it to the Service's address, behind which
// there is a backend that must get it.
//
//	far client 1500 ── 1300 router ── segment ── node-1 ─┬─ pod-1-1
//	                             └── too big, 1300 ──▶   └─ pod-2-0
func TestPathMTUToClient(t *testing.T) {
	for name, filter := range map[string]string{"through the stack": bridgeCNI, "past it": openCNI} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testPathMTUToClient(t, filter)
		})
	}
}

func testPathMTUToClient(t *testing.T, filter string) {
	t.Helper()
	w := mustWorld(t, setting{
		Config: lab.Config{PodMTU: 1500},
		filter: filter,
		agent:  []string{"--device-attach", "clsact"},
	})
	w.mustBeStrict(t)
	c := casesOf(w)
	c.local.port, c.remote.port = answerPort, answerPort
	bulkHere := service{number: 20, port: bulkPort, backends: c.local.backends}
	bulkThere := service{number: 21, port: bulkPort, backends: c.remote.backends}
	w.start(t, c.local, c.remote, bulkHere, bulkThere)
	w.mustForwardAs(t, filter)
	w.mustSwallow(t)
	far := w.mustFar(t)
	caller := lab.MustCaller(t, far, nil)

	for i, to := range []service{c.local, c.remote} {
		pod := []*lab.Pod{w.Nodes[0].Pods[1], w.Nodes[1].Pods[0]}[i]
		for _, f := range families {
			t.Run(fmt.Sprintf("%s, %s", f, pod.Name), func(t *testing.T) {
				mustGetError(t, caller, to.at(loadBalancer, f, nil), pod, f)
				bulk := []service{bulkHere, bulkThere}[i]
				if _, _, err := transfer(far, bulk.at(loadBalancer, f, nil), 0, 4<<20); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// answerPort is where mustGetError listens.
const answerPort = 9001

// mustGetError asks a backend over UDP, which answers with more than fits and may
// not cut it, and reports it to the backend.
func mustGetError(t *testing.T, from *lab.Caller, address string, pod *lab.Pod, f family) {
	t.Helper()
	level, discover, headers := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, 28
	if f == ipv6 {
		level, discover, headers = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, 48
	}
	network := []string{"udp4", "udp6"}[f]
	server, err := lab.MustCaller(t, pod.Namespace, nil).Socket(network)
	lab.Must(t, err)
	lab.Must(t, server.SetOption(level, discover, unix.IP_PMTUDISC_DO), server.Bind(pod.At(answerPort)[f]))
	client, err := from.Socket(network)
	lab.Must(t, err)
	lab.Must(t, client.Connect(address), client.Send("how are you"))
	question, sender, err := server.Recv()
	if err != nil || question != "how are you" {
		t.Fatalf("question is %q, %v", question, err)
	}

	big, fits := strings.Repeat("x", narrow-headers+1), strings.Repeat("x", narrow-headers)
	lab.Must(t, server.SendTo(big, sender.String()))
	deadline := time.Now().Add(dialTimeout)
	for lab.Errno(err) != unix.EMSGSIZE && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
		err = server.SendTo(big, sender.String())
	}
	if lab.Errno(err) != unix.EMSGSIZE {
		t.Errorf("answer of %d bytes: %v, want EMSGSIZE", len(big), err)
	}
	lab.Must(t, server.SendTo(fits, sender.String()))
	if answer, _, err := client.Recv(); err != nil || answer != fits {
		t.Errorf("answer is %.40q, %v, want %d bytes", answer, err, len(fits))
	}
}

// mustFar makes a client behind a router, whose link to it is narrow.
func (w *world) mustFar(t *testing.T) *lab.Namespace {
	t.Helper()
	router, far := lab.MustNamespace(t, "router"), lab.MustNamespace(t, "far")
	segment := prefixes("192.168.50.90/24", "fd00:50::90/64")
	lab.MustVeth(t,
		lab.End{Namespace: router, Device: "eth0", Addresses: segment},
		lab.End{Namespace: w.Uplink, Device: "router", Bridge: "br0"})
	lab.MustVeth(t,
		lab.End{Namespace: router, Device: "eth1", Addresses: prefixes("192.168.60.1/24", "fd00:60::1/64"), MTU: narrow},
		lab.End{Namespace: far, Device: "eth0", Addresses: prefixes("192.168.60.2/24", "fd00:60::2/64")})
	lab.Must(t, router.Sysctl("net/ipv4/ip_forward", "1"), router.Sysctl("net/ipv6/conf/all/forwarding", "1"))
	for _, f := range families {
		everything := prefixes("0.0.0.0/0", "::/0")[f]
		node := []netip.Addr{w.Nodes[0].IPv4, w.Nodes[0].IPv6}[f]
		lab.Must(t,
			router.AddRoute(everything, node),
			far.AddRoute(everything, prefixes("192.168.60.1/24", "fd00:60::1/64")[f].Addr()),
		)
		for _, node := range w.Nodes {
			lab.Must(t, node.AddRoute(prefixes("192.168.60.0/24", "fd00:60::/64")[f], segment[f].Addr()))
		}
	}

	return far
}

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}

	return all
}
