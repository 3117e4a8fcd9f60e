package devices

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// several are two Services: pods of both nodes answer for them, one node's for each, so
// that a client of another backend is likely to notice it.
func (w *world) several() []service {
	here, there := service{number: 41}, service{number: 42}
	for i := range w.Nodes[0].Pods {
		here.backends = append(here.backends, onPod(w.Nodes[0].Pods[i]))
		there.backends = append(there.backends, onPod(w.Nodes[1].Pods[i]))
	}

	return []service{here, there}
}

// TestForgedSegments has connections, some of which are in use, go on while an attacker who knows
// their addresses and ports, and not their numbers, sends SYNs, FINs and RSTs in the client's name,
// from where the client is, and from where it is not.
//
//	client ══ connections ══▶ load balancer ─┬─ pods of node-1
//	     └─── SYN, FIN, RST ─▶               └─ pods of node-2, masqueraded
//	pod-1-0 ─ SYN, FIN, RST ─▶
func TestForgedSegments(t *testing.T) {
	t.Parallel()
	const connections, forged = 12, 400
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, PodsPerNode: 4}, filter: podMasquerade})
	services := w.several()
	w.start(t, services...)

	var talks []*talk
	for i := range connections {
		conn, err := w.Client.Dial("tcp", services[i%2].at(loadBalancer, ipv4, nil), dialTimeout)
		lab.Must(t, err)
		t.Cleanup(func() { _ = conn.Close() }) // it did what it was for
		talks = append(talks, newTalk(conn))
		lab.Must(t, talks[i].ask("who"))
	}
	stopBusy := keepBusy(talks[connections/2:])
	for _, talk := range talks {
		src, dst := addrPort(talk.LocalAddr()), addrPort(talk.RemoteAddr())
		for _, from := range []*lab.Namespace{w.Client.Namespace, w.Nodes[0].Pods[0].Namespace} {
			lab.Must(t, forge(from, src, dst, func(send func(layers.TCP) error) error {
				for range forged {
					for _, flags := range []layers.TCP{{FIN: true, ACK: true}, {RST: true}, {RST: true, ACK: true}} {
						if err := send(flags); err != nil {
							return err
						}
					}
				}
				for range 4 {
					if err := send(layers.TCP{SYN: true}); err != nil {
						return err
					}
				}

				return nil
			}))
		}
	}
	asked, err := stopBusy()
	if err != nil || asked == 0 {
		t.Errorf("connections in use: %d questions, %v", asked, err)
	}
	for i, talk := range talks {
		if err := talk.ask("who"); err != nil {
			t.Errorf("connection %d: %v", i, err)
		}
	}
}

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }

// forge lets a function send segments in the name of src, with any numbers.
func forge(from *lab.Namespace, src, dst netip.AddrPort, f func(send func(layers.TCP) error) error) error {
	return forgeFrames(from, dst, func(send func([]byte) error) error {
		return f(func(tcp layers.TCP) error {
			frame, err := segment(src, dst, tcp)
			if err != nil {
				return err
			}

			return send(frame)
		})
	})
}

// forgeFirst sends the first packet of an exchange in the name of src.
func forgeFirst(from *lab.Namespace, network string, src, dst netip.AddrPort) error {
	return forgeFrames(from, dst, func(send func([]byte) error) error {
		frame, err := segment(src, dst, layers.TCP{SYN: true})
		switch network {
		case "udp":
			frame, err = datagram(src, dst, "who\n")
		case "sctp":
			frame, err = initiation(src, dst)
		}
		if err != nil {
			return err
		}

		return send(frame)
	})
}

// forgeFrames lets a function send IP packets to a destination.
func forgeFrames(from *lab.Namespace, dst netip.AddrPort, f func(send func([]byte) error) error) error {
	family, to := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: dst.Addr().As16()})
	if dst.Addr().Is4() {
		family, to = unix.AF_INET, &unix.SockaddrInet4{Addr: dst.Addr().As4()}
	}

	return from.Do(func() error {
		socket, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(socket)

		return f(func(frame []byte) error {
			return os.NewSyscallError("sendto", unix.Sendto(socket, frame, 0, to))
		})
	})
}

// network is a header of IP.
type network interface {
	gopacket.NetworkLayer
	gopacket.SerializableLayer
}

func headerOf(src, dst netip.AddrPort, proto layers.IPProtocol) network {
	if dst.Addr().Is6() {
		return &layers.IPv6{
			Version: 6, HopLimit: 64, NextHeader: proto,
			SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice(),
		}
	}

	return &layers.IPv4{
		Version: 4, IHL: 5, TTL: 64, Protocol: proto,
		SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice(),
	}
}

// datagram is one with a text.
func datagram(src, dst netip.AddrPort, text string) ([]byte, error) {
	ip := headerOf(src, dst, layers.IPProtocolUDP)
	udp := layers.UDP{SrcPort: layers.UDPPort(src.Port()), DstPort: layers.UDPPort(dst.Port())}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		return nil, err
	}
	buffer := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, ip, &udp, gopacket.Payload(text))

	return buffer.Bytes(), err
}

// initiation is the INIT of an association of SCTP.
func initiation(src, dst netip.AddrPort) ([]byte, error) {
	sctp := layers.SCTP{SrcPort: layers.SCTPPort(src.Port()), DstPort: layers.SCTPPort(dst.Port())}
	init := layers.SCTPInit{
		SCTPChunk: layers.SCTPChunk{Type: layers.SCTPChunkTypeInit}, InitiateTag: rand.Uint32(), AdvertisedReceiverWindowCredit: 64_000,
		OutboundStreams: 1, InboundStreams: 1, InitialTSN: rand.Uint32(),
	}
	buffer := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		headerOf(src, dst, layers.IPProtocolSCTP), &sctp, &init)

	return buffer.Bytes(), err
}

// segment is one of TCP with any numbers, and these flags.
func segment(src, dst netip.AddrPort, tcp layers.TCP) ([]byte, error) {
	ip := headerOf(src, dst, layers.IPProtocolTCP)
	tcp.SrcPort, tcp.DstPort = layers.TCPPort(src.Port()), layers.TCPPort(dst.Port())
	tcp.Seq, tcp.Window = rand.Uint32(), 64_000
	if tcp.ACK {
		tcp.Ack = rand.Uint32()
	}
	if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
		return nil, err
	}
	buffer := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, ip, &tcp)

	return buffer.Bytes(), err
}

// TestForgottenConnection has a client's kernel lose the state of a connection, and dial again from the
// same port: the backend that has the connection answers the SYN, the client sees that this is
// not what it wants and resets it, and its next SYN gets a connection. Linux sends that at once;
// an older one, after a second.
func TestForgottenConnection(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, PodsPerNode: 4}, filter: bridgeCNI})
	services := w.several()
	w.start(t, services...)
	for _, client := range []struct {
		name string
		*lab.Namespace
		way way
	}{
		{"outside", w.Client.Namespace, loadBalancer},
		{"a pod", w.Nodes[0].Pods[0].Namespace, clusterIP},
	} {
		for _, s := range services {
			for _, f := range families {
				t.Run(fmt.Sprintf("%s dials %s over %s", client.name, s.name(), f), func(t *testing.T) {
					t.Parallel()
					to := s.at(client.way, f, nil)
					old, err := client.Dial("tcp", to, dialTimeout)
					lab.Must(t, err)
					lab.Must(t, newTalk(old).ask("who"))
					from := old.LocalAddr()
					lab.Must(t, forget(old.(*net.TCPConn)))

					begin := time.Now()
					conn, err := dialAs(client.Namespace, from, to)
					lab.Must(t, err)
					defer conn.Close()
					if took := time.Since(begin); took > 2*time.Second {
						t.Errorf("it took %v", took)
					}
					lab.Must(t, newTalk(conn).ask("who"))
				})
			}
		}
	}
}

// forget has the kernel drop a connection without a packet to the other side.
func forget(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1)
	}); err != nil {
		return err
	}
	if failed != nil {
		return os.NewSyscallError("setsockopt", failed)
	}

	return conn.Close()
}

// dialAs connects from an address and a port.
func dialAs(ns *lab.Namespace, from net.Addr, to string) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: dialTimeout, LocalAddr: from}
	dialer.SetMultipathTCP(false)
	err = ns.Do(func() error {
		conn, err = dialer.Dial("tcp", to)

		return err
	})

	return conn, err
}

// TestForgedFirstPackets has a pod and a host outside send first packets to a Service in the name of others, from ports
// that these use: a pod of the other node and one beside it, which talk to the Service's backend as their socket hooks
// have it, and a client outside, which dials the Service itself. Connections that are open go on, and new ones,
// associations and datagrams are answered. Routes do not tell pods behind one bridge apart: there, netfilter has to track
// the connections.
//
//	pod-1-0 ─── first packets "from pod-2-0", "from pod-1-2" ──▶ ClusterIP ──▶ pod-1-1, or another Service's pod-2-1
//	client ──── first packets "from pod-2-0" ──▶ load balancer ──▶ the same
//	pod-2-0, pod-1-2 ══ connections, datagrams ═════════════════════════════▶ pod-1-1, pod-2-1
func TestForgedFirstPackets(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, filter string
		attachment   lab.Attachment
	}{
		{"pods behind devices of their own, untracked", "", lab.Routed},
		{"pods behind devices of their own, tracked", podMasquerade, lab.Routed},
		{"pods behind one bridge, tracked", podMasquerade, lab.Bridged},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, PodsPerNode: 3, Attachment: row.attachment}, filter: row.filter})
			attacker, victims := w.Nodes[0].Pods[0].Namespace, []*lab.Pod{w.Nodes[1].Pods[0], w.Nodes[0].Pods[2]}
			pods := []*lab.Pod{w.Nodes[0].Pods[1], w.Nodes[1].Pods[1]}
			here := service{number: 43, backends: []backend{onPod(pods[0])}}
			there := service{number: 46, backends: []backend{onPod(pods[1])}}
			w.start(t, here, there)
			callers, outside := []*lab.Caller{w.optedOut(t, victims[0]), w.optedOut(t, victims[1])}, w.outside(t)
			for i := range 4 {
				s, f := []service{here, there}[i/2], families[i%2]
				backend := netip.AddrPortFrom(s.backends[0].ips[f], podPort)
				service := netip.MustParseAddrPort(s.at(clusterIP, f, nil))
				external := netip.MustParseAddrPort(s.at(loadBalancer, f, nil))
				go lab.MustSCTP(t, pods[i/2].Namespace, backend.Addr(), podPort).Serve()
				for _, victim := range victims {
					var talks []*talk
					for range 10 {
						conn, err := victim.Dial("tcp", backend.String(), dialTimeout)
						lab.Must(t, err)
						t.Cleanup(func() { _ = conn.Close() }) // it did what it was for
						talks = append(talks, newTalk(conn))
						lab.Must(t, talks[len(talks)-1].ask("who"), forgeFirst(attacker, "tcp", addrPort(conn.LocalAddr()), service))
					}
					for i, talk := range talks {
						if err := talk.ask("who"); err != nil {
							t.Errorf("%s: connection %d of %s to %s: %v", f, i, victim.Name, s.name(), err)
						}
					}
				}
				for i := range uint16(10) {
					for j, dial := range []struct {
						name   string
						caller *lab.Caller
						ns     *lab.Namespace
						from   netip.Addr
						forger *lab.Namespace
						vip    netip.AddrPort
						to     netip.AddrPort
					}{
						{victims[0].Name, callers[0], victims[0].Namespace, podIPs(victims[0])[f], attacker, service, backend},
						{victims[1].Name, callers[1], victims[1].Namespace, podIPs(victims[1])[f], attacker, service, backend},
						{"the client", outside, w.Client.Namespace, hostIPs(w.Client)[f], attacker, external, external},
						{victims[0].Name + ", forged outside", callers[0], victims[0].Namespace, podIPs(victims[0])[f], w.Client.Namespace, external, backend},
					} {
						from := netip.AddrPortFrom(dial.from, uint16(50000+s.number*100+j*20)+i)
						for _, network := range networks {
							lab.Must(t, forgeFirst(dial.forger, network, from, dial.vip))
							answer, err := answerTo(dial.caller, lab.Exchange{Network: network, Address: dial.to.String(), From: from.String(), Timeout: dialTimeout})
							if err != nil || answer.Name != s.backends[0].name {
								t.Errorf("%s, %s of %s to %s: %q, %v", f, network, dial.name, s.name(), answer.Name, err)
							}
						}
						lab.Must(t, forgeFirst(attacker, "sctp", from, dial.vip))
						if _, err := lab.MustSCTP(t, dial.ns, from.Addr(), from.Port()).Associate(dial.to, dialTimeout); err != nil {
							t.Errorf("%s, SCTP of %s to %s: %v", f, dial.name, s.name(), err)
						}
					}
				}
			}
		})
	}
}
