package devices

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestEndlessExchange has hosts send one datagram to a UDP Service in the name of another one, and in the name of what no
// host is. The backends answer whatever they get, so that two Services could go on with each other for ever. With
// kube-proxy's rules they exchange seven datagrams.
//
//	client ── datagram "from" another Service ──▶ node port, load balancer, ClusterIP ─┬─ pod-1-0, pod-1-1
//	pod-1-0 ─ the same ──▶ ClusterIP                                                      └─ pod-2-0
func TestEndlessExchange(t *testing.T) {
	t.Parallel()
	for _, hooked := range []bool{false, true} {
		t.Run(fmt.Sprintf("socket hooks see the backends: %v", hooked), func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
			var received atomic.Int64
			services := []service{{number: 51, port: echoPort}, {number: 52, port: echoPort}, {number: 53, port: echoPort}}
			for i, pod := range []*lab.Pod{w.Nodes[0].Pods[0], w.Nodes[0].Pods[1], w.Nodes[1].Pods[0]} {
				services[i].backends = []backend{onPod(pod)}
				for _, at := range pod.At(echoPort) {
					cgroup := w.cgroups[i/2]
					if !hooked {
						cgroup = nil
					}
					go echo(t, lab.MustCaller(t, pod.Namespace, cgroup), at, &received)
				}
			}
			w.start(t, services...)
			for _, s := range services {
				for _, f := range families {
					mustEcho(t, w, s.at(loadBalancer, f, nil))
				}
			}

			for _, f := range families {
				for _, from := range append(w.servicesAsSources(f, services), w.noHosts(f)...) {
					before, sent := received.Load(), int64(0)
					for _, to := range services {
						for _, at := range everyWay {
							dst := netip.MustParseAddrPort(to.at(at, f, w.Nodes[0]))
							w.mustForgeOutside(t, from.at, dst)
							sent++
							if at == clusterIP {
								lab.Must(t, forgeFirst(w.Nodes[0].Pods[0].Namespace, "udp", from.at, dst))
								sent++
							}
						}
					}
					time.Sleep(150 * time.Millisecond) // an endless exchange has thousands meanwhile
					if n := received.Load() - before; n > from.most*sent {
						t.Errorf("%d datagrams from %s %s: backends got %d, want %d at most", sent, from.name, from.at, n, from.most*sent)
					}
				}
			}
			before := received.Load()
			time.Sleep(500 * time.Millisecond)
			if n := received.Load() - before; n > 0 {
				t.Errorf("backends got %d datagrams when nothing was sent any more", n)
			}
		})
	}
}

// mustForgeOutside sends a datagram from the client to the first node, past the stack, which knows whose addresses these are.
func (w *world) mustForgeOutside(t *testing.T, src, dst netip.AddrPort) {
	t.Helper()
	packet, err := datagram(src, dst, "who\n")
	lab.Must(t, err)
	to := unix.SockaddrLinklayer{Halen: 6}
	lab.Must(t, w.Nodes[0].Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			copy(to.Addr[:], eth0.HardwareAddr)
		}

		return err
	}), w.Client.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		protocol := map[bool]uint16{false: unix.ETH_P_IP, true: unix.ETH_P_IPV6}[dst.Addr().Is6()]
		to.Ifindex, to.Protocol = eth0.Index, protocol>>8|protocol<<8
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(socket)

		return os.NewSyscallError("sendto", unix.Sendto(socket, packet, 0, &to))
	}))
}

// echoPort is where backends answer with what they get.
const echoPort = 8081

// echo sends what it receives back to whom it is from, until the test ends. It counts.
func echo(t *testing.T, caller *lab.Caller, at string, received *atomic.Int64) {
	network := "udp4"
	if netip.MustParseAddrPort(at).Addr().Is6() {
		network = "udp6"
	}
	socket, err := caller.Socket(network)
	if err = errors.Join(err, socket.Bind(at)); err != nil {
		t.Error(err)

		return
	}
	for t.Context().Err() == nil {
		text, from, err := socket.Recv()
		if err != nil {
			continue // nothing came for a while
		}
		received.Add(1)
		_ = socket.SendTo(text, from.String()) // what is forged may not be answered
	}
}

// mustEcho waits until the client gets its datagram back.
func mustEcho(t *testing.T, w *world, at string) {
	t.Helper()
	lab.Eventually(t, at+" answers", func() error {
		conn, err := w.Client.Dial("udp", at, dialTimeout)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			return err
		}
		if _, err := conn.Write([]byte("who\n")); err != nil {
			return err
		}
		_, err = conn.Read(make([]byte, 9))

		return err
	})
}

// forgedSource is in whose name a datagram is sent, and how many datagrams may follow from it.
type forgedSource struct {
	name string
	at   netip.AddrPort
	most int64
}

// servicesAsSources are those of Services.
func (w *world) servicesAsSources(f family, services []service) []forgedSource {
	var sources []forgedSource
	for _, s := range services {
		for _, way := range []way{clusterIP, loadBalancer, externalIP} {
			sources = append(sources, forgedSource{way.String(), netip.MustParseAddrPort(s.at(way, f, nil)), 0})
		}
		// The node's own address is for the stack to judge: IPv6 lets it pass.
		sources = append(sources, forgedSource{"node port", netip.MustParseAddrPort(s.at(nodePort, f, w.Nodes[0])), kubeProxys})
	}

	return sources
}

// kubeProxys is how many datagrams follow from one with rules like kube-proxy's.
const kubeProxys = 7

// noHosts are sources that no host has. The link's own broadcast address is for the stack to refuse.
func (w *world) noHosts(f family) []forgedSource {
	texts := [2]map[string]string{
		{"a group": "224.0.0.251", "all hosts": "255.255.255.255", "no address": "0.0.0.0", "this network": "0.0.0.7", "loopback": "127.0.0.1", "all hosts of the link": "192.168.50.255"},
		{"a group": "ff02::fb", "no address": "::", "loopback": "::1"},
	}[f]
	var sources []forgedSource
	for name, text := range texts {
		sources = append(sources, forgedSource{name, netip.AddrPortFrom(netip.MustParseAddr(text), 40000), 0})
	}

	return sources
}
