package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The states of a connection in netfilter.
const (
	conntrackSynSent     = 1
	conntrackEstablished = 3
	conntrackTimeWait    = 7
)

// twoPorts is a range of two ports, of which a test uses the first.
func twoPorts(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20001} }

// track adds a connection between two addresses to netfilter, whose replies go to a third one.
func (w *world) track(t testing.TB, proto layers.IPProtocol, from, to, answers string, state uint8) {
	t.Helper()
	w.trackTuples(t, proto, [2]string{from, to}, [2]string{to, answers}, state)
}

// trackTuples adds a connection to netfilter, with the source and the destination of both directions.
func (w *world) trackTuples(t testing.TB, proto layers.IPProtocol, forward, reverse [2]string, state uint8) {
	t.Helper()
	tuple := func(ends [2]string) netlink.IPTuple {
		s, d := w.family.addrPort(at(ends[0])), w.family.addrPort(at(ends[1]))

		return netlink.IPTuple{
			SrcIP: s.Addr().AsSlice(), SrcPort: s.Port(), DstIP: d.Addr().AsSlice(), DstPort: d.Port(), Protocol: uint8(proto),
		}
	}
	flow := &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET, Forward: tuple(forward), Reverse: tuple(reverse), TimeOut: 100,
	}
	if w.family == ipv6 {
		flow.FamilyType = unix.AF_INET6
	}
	if proto == layers.IPProtocolTCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: state}
	}
	lab.Must(t, w.node.Do(func() error {
		return netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(flow.FamilyType), flow)
	}))
	t.Cleanup(func() { lab.Must(t, w.forgetTracked()) })
}

// forgetTracked deletes all connections of netfilter.
func (w *world) forgetTracked() error {
	return w.node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// knowsConntrack reports whether programs can look up connections of netfilter.
func knowsConntrack(t testing.TB) bool {
	t.Helper()
	knows, err := knownConntrack()
	lab.Must(t, err)

	return knows
}

// knownConntrack loads the kernel's connection tracking, as on a node.
var knownConntrack = sync.OnceValues(func() (bool, error) {
	_, _ = netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)

	return KnowsConntrack()
})

// needsConntrack skips a test where programs cannot look up connections of netfilter.
func needsConntrack(t *testing.T) {
	t.Helper()
	if !knowsConntrack(t) {
		if atLeast(t, 5, 18) {
			t.Error("this kernel is new enough, and does not know")
		}
		t.Skip("on this kernel, programs cannot look up connections (Linux 5.18)")
	}
}

// A port with which a socket of the node is connected to the backend is not used for a masquerade. One at which a socket
// listens, or waits for datagrams, is: it has the port, and none of the tuples.
func TestMasqueradeAvoidsConnectedSockets(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		for _, test := range []struct {
			name  string
			peer  string // "": none, the socket is open to all
			taken bool
		}{
			{"avoids the tuple of a socket", remotePod, true},
			{"uses the port of a socket that is connected elsewhere", "8.0.2.8:8080", false},
			{"uses the port of a socket that is open to all", "", false},
		} {
			t.Run(fmt.Sprintf("%s: it %s", proto, test.name), func(t *testing.T) {
				each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
					w.mustSocket(t, proto, at(node).Addr().String()+":20000", test.peer)
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})
					w.ingress(t, p, first(proto, p.client, clusterIP)).ends(verdictNext, maps.ReasonTranslated)
					if port := maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort); test.taken && port != 20001 {
						t.Errorf("port is %d, and the tuple is that of a socket", port)
					}
					if proto == layers.IPProtocolUDP { // an answer may be on its way until then
						w.wait(t, 4*time.Second)
					}
					second := w.ingress(t, p, first(proto, stranger, clusterIP))
					if test.taken && proto == layers.IPProtocolTCP {
						second.drops(maps.ReasonDropMasqueradePort)

						return
					}
					second.ends(verdictNext, maps.ReasonTranslated)
					// The client's datagram, which is unanswered, yields; the socket's tuple does not.
					if port := maps.Port(w.flowOf(t, stranger, clusterIP).MasqueradePort); test.taken && port != 20001 {
						t.Errorf("port is %d, and the tuple is that of a socket", port)
					}
				}, twoPorts)
			})
		}
	}
}

// mustSocket opens a socket of the node until the test ends, see openSocket.
func (w *world) mustSocket(t *testing.T, proto layers.IPProtocol, local, peer string) {
	t.Helper()
	lab.MustDo(t, w.node, func() error {
		socket, err := w.openSocket(proto, local, peer)
		if err == nil {
			t.Cleanup(func() { lab.Must(t, unix.Close(socket)) })
		}

		return err
	})
}

// openSocket opens a socket in the calling thread's namespace, which connects to an address, or listens or waits for
// datagrams without one. No one answers there: the SYN of a connection is on its way.
func (w *world) openSocket(proto layers.IPProtocol, local, peer string) (int, error) {
	domain, kind := unix.AF_INET, unix.SOCK_STREAM
	if w.family == ipv6 {
		domain = unix.AF_INET6
	}
	if proto == layers.IPProtocolUDP {
		kind = unix.SOCK_DGRAM
	}
	address := func(text string) unix.Sockaddr {
		a := w.family.addrPort(at(text))
		if w.family == ipv6 {
			return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
		}

		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	socket, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	err = unix.Bind(socket, address(local))
	switch {
	case err != nil:
	case peer != "":
		if err = unix.Connect(socket, address(peer)); errors.Is(err, unix.EINPROGRESS) {
			err = nil
		}
	case proto == layers.IPProtocolTCP:
		err = unix.Listen(socket, 1)
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("socket at %s: %w", local, err), unix.Close(socket))
	}

	return socket, nil
}

// An ordinary user who has a socket at every port of the masquerade, listening or waiting for datagrams, keeps no client
// out: each gets a port of its own.
func TestMasqueradeBesideASocketAtEachPort(t *testing.T) {
	const ports, clients = 33510, 20
	window := PortRange{Low: 20000, High: 20000 + ports - 1}
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				w.mustHold(t, proto, window)
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})
				used := make(map[uint16]bool)
				for i := range clients {
					client := netip.AddrPortFrom(at(p.client).Addr(), uint16(40000+i)).String()
					w.ingress(t, p, first(proto, client, clusterIP)).ends(p.sendsAway(), maps.ReasonTranslated)
					used[maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)] = true
				}
				if len(used) != clients {
					t.Errorf("%d clients have %d ports", clients, len(used))
				}
			}, func(c *DeviceConfig) { c.MasqueradePorts = window })
		})
	}
}

// mustHold opens a socket of the node that is open to all at each of these ports, until the test ends. Threads with files
// of their own have them: a process may not open that many.
func (w *world) mustHold(t *testing.T, proto layers.IPProtocol, ports PortRange) {
	t.Helper()
	var files unix.Rlimit
	lab.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	ofThread := int(min(files.Cur/2, 10_000))
	var held sync.WaitGroup
	release := make(chan struct{})
	t.Cleanup(func() {
		close(release)
		held.Wait()
	})
	for low := int(ports.Low); low <= int(ports.High); low += ofThread {
		opened := make(chan error)
		held.Go(func() {
			runtime.LockOSThread() // for good: the thread ends with this function, and so do its files
			var sockets []int
			err := unix.Unshare(unix.CLONE_FILES)
			if err == nil {
				err = w.node.Do(func() (err error) {
					for port := low; port < low+ofThread && port <= int(ports.High) && err == nil; port++ {
						socket := 0
						if socket, err = w.openSocket(proto, netip.AddrPortFrom(at(node).Addr(), uint16(port)).String(), ""); err == nil {
							sockets = append(sockets, socket)
						}
					}

					return err
				})
			}
			opened <- err
			<-release
			for _, socket := range sockets { // the thread may end after the next test has begun
				_ = unix.Close(socket)
			}
		})
		lab.Must(t, <-opened)
	}
}

// Nor is a port that netfilter has assigned, in whatever state that connection is.
func TestMasqueradeAvoidsNetfilter(t *testing.T) {
	needsConntrack(t)
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				w.track(t, proto, tapPod, remotePod, fmt.Sprintf("%s:20000", at(node).Addr()), conntrackSynSent)
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})
				w.ingress(t, p, first(proto, p.client, clusterIP)).ends(verdictNext, maps.ReasonTranslated)
				if port := maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort); port != 20001 {
					t.Errorf("port is %d, want the one that netfilter has not lent", port)
				}
			}, twoPorts)
		})
	}
}

// A client that has connected to the backend directly keeps that connection: its Service's
// flow from the same port has another one for the backend. What is over, or was never
// answered, has no port: it may be what is left of a flow.
func TestFlowBesideADirectConnection(t *testing.T) {
	needsConntrack(t)
	for name, test := range map[string]struct {
		state   uint8
		another bool
	}{
		"open":   {conntrackEstablished, true},
		"closed": {conntrackTimeWait, false},
		"begun":  {conntrackSynSent, false},
	} {
		t.Run("that is "+name, func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				w.track(t, layers.IPProtocolTCP, p.client, tapPod, p.client, test.state)
				w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
				in := tcp(p.client, clusterIP, "S")
				o := w.ingress(t, p, in)
				seen := maps.Port(w.flowOf(t, p.client, clusterIP).StackPort)
				o.becomes(in.to(tapPod).fromPort(seen), maps.ReasonTranslated)
				if changed := seen != in.src.Port(); changed != test.another {
					t.Errorf("the backend sees port %d of %s", seen, p.client)
				}
				reply := tcp(tapPod, p.client, "S.").toPort(seen)
				w.egress(t, p, reply).becomes(reply.from(clusterIP).to(p.client), maps.ReasonFlow)
				if test.another {
					w.egress(t, p, tcp(tapPod, p.client, "P.")).passes(maps.ReasonPassOtherTraffic)
				}
			})
		})
	}
}

// A client of a flow may dial its backend itself from the same port: the backend sees another port of the
// direct connection then. The node's own addresses have filters of their own.
func TestDirectConnectionBesideAFlow(t *testing.T) {
	for _, test := range []struct {
		name, backend    string
		datagram, middle maps.Reason // of a datagram, and of a segment in the middle of a connection
	}{
		{"a pod", tapPod, maps.ReasonPassOtherTraffic, maps.ReasonPassOtherTraffic},
		{"this node", hostPod, maps.ReasonPassNoFrontend, maps.ReasonPassNoFlow},
	} {
		t.Run("to "+test.name, func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, layers.IPProtocolTCP, test.backend)
				direct := tcp(p.client, test.backend, "S")
				if p.class == maps.DevicePods { // at uplinks: TestExchangeBesideAFlow
					w.ingress(t, p, direct).passes(maps.ReasonPassNoFrontend) // the other one is unanswered
				}
				c.establish(t)
				w.ingress(t, p, tcp(stranger, test.backend, "S")).passes(maps.ReasonPassNoFrontend)
				w.ingress(t, p, udp(p.client, test.backend)).passes(test.datagram)
				w.ingress(t, p, tcp(p.client, test.backend, ".")).passes(test.middle)

				o := w.ingress(t, p, direct)
				seen := maps.Port(w.flowOf(t, p.client, test.backend).StackPort)
				o.becomes(direct.fromPort(seen), maps.ReasonTranslated)
				if seen == direct.src.Port() {
					t.Error("the backend sees one port of both")
				}
				reply := tcp(test.backend, p.client, "S.").toPort(seen)
				w.egress(t, p, reply).becomes(reply.to(p.client), maps.ReasonFlow)
				again := tcp(p.client, test.backend, ".")
				w.ingress(t, p, again).becomes(again.fromPort(seen), maps.ReasonFlow)
				w.ingress(t, p, tcp(stranger, test.backend, ".")).passes(maps.ReasonPassNoFlow)
				c.says(t, tcp(client, client, "P."))
				c.hears(t, tcp(client, client, "P."))
			})
		})
	}
}

// Beside a flow that is over there is nothing to be minded.
func TestDirectConnectionToTheNodeAfterAFlow(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, hostPod)
		c.establish(t)
		c.closes(t)
		w.ingress(t, p, tcp(p.client, hostPod, "S")).passes(maps.ReasonPassNoFrontend)
	})
}
