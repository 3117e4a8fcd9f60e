package devices

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// closing is which side ends a connection, and how.
type closing struct {
	byServer bool
	reset    bool
}

func (c closing) String() string {
	text := map[bool]string{false: "client", true: "server"}[c.byServer]

	return map[bool]string{false: "closed", true: "reset"}[c.reset] + " by the " + text
}

// end ends a connection, as one that does so first.
func (c closing) end(conn net.Conn) error {
	if c.reset {
		if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
			return err
		}
	}

	return conn.Close()
}

// reusePort is where servers answer a byte with a byte.
const reusePort = 9001

// mustAnswer starts a server that answers each byte with one. If it is to end connections, it does
// so after the first.
func mustAnswer(t *testing.T, ns *lab.Namespace, address string, how closing) (stop func()) {
	t.Helper()
	listener, err := ns.Listen("tcp", address)
	lab.Must(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // the test is over
			}
			go func() {
				for buffer := make([]byte, 1); ; {
					if _, err := io.ReadFull(conn, buffer); err != nil {
						break // the client has ended it, as it sees
					}
					if _, err := conn.Write(buffer); err != nil || how.byServer {
						break
					}
				}
				_ = how.end(conn) // the client sees how
			}()
		}
	}()

	return func() { lab.Must(t, listener.Close()) }
}

// sources are so many further addresses of the client, by family.
const sources = 24

func sourceAt(f family, i int) netip.Addr {
	format := [...]string{"192.168.50.%d", "fd00:50::1:%d"}[f]

	return netip.MustParseAddr(fmt.Sprintf(format, 128+i%sources))
}

// dialFrom connects from one of them.
func dialFrom(client *lab.Host, source netip.Addr, address string, timeout time.Duration) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: timeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))}
	dialer.SetMultipathTCP(false)
	err = client.Do(func() error {
		conn, err = dialer.Dial("tcp", address)

		return err
	})

	return conn, err
}

// once makes a connection, asks once and ends it.
func (c closing) once(client *lab.Host, source netip.Addr, address string) error {
	conn, err := dialFrom(client, source, address, dialTimeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := ask(conn); err != nil || !c.byServer {
		if err == nil {
			err = c.end(conn)
		}

		return err
	}
	n, err := conn.Read(make([]byte, 1))
	if lab.Errno(err) == unix.ECONNRESET && c.reset || err == io.EOF && !c.reset {
		err = nil
	}
	if n != 0 || err != nil {
		return fmt.Errorf("at the end of the connection, %d bytes came, and %w", n, err)
	}

	return nil
}

// ask has a byte answered.
func ask(conn net.Conn) error {
	question, answer := []byte{'?'}, make([]byte, 1)
	if err := conn.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write(question); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, answer)

	return err
}

// mustHaveFewPorts leaves the node 76 ports to masquerade with, and gives the client its addresses.
func (w *world) mustHaveFewPorts(t *testing.T) {
	t.Helper()
	lab.Must(t,
		w.Nodes[0].Sysctl("net/ipv4/ip_local_port_range", "65460 65535"),
		w.Nodes[0].Sysctl("net/ipv4/ip_unprivileged_port_start", "65460"),
	)
	for _, f := range families {
		for i := range sources {
			lab.Must(t, w.Client.AddAddress("eth0", netip.PrefixFrom(sourceAt(f, i), []int{24, 64}[f])))
		}
	}
}

const fewPorts = 76

// TestPortsAreUsedAgain makes many more connections to one backend than the node has ports for,
// ends them in each way, and never has to wait for a port. What a backend in TIME_WAIT takes for a
// new connection goes by timestamps, or by the numbers of segments where there are none. Another SYN
// would be refused, and sent again after a while.
//
//	client, 24 addresses ══ node port ══ node-1, 76 ports ══ pod-2-0
func TestPortsAreUsedAgain(t *testing.T) {
	t.Parallel()
	const connections = 6 * fewPorts
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	w.mustHaveFewPorts(t)
	service := casesOf(w).remote
	service.port = reusePort
	w.start(t, service)
	backend := w.Nodes[1].Pods[0]
	number := 0 // of a connection

	for _, stamps := range []string{"1", "0"} {
		lab.Must(t, backend.Sysctl("net/ipv4/tcp_timestamps", stamps))
		for _, how := range []closing{{}, {byServer: true}, {reset: true}, {byServer: true, reset: true}} {
			for _, f := range families {
				t.Run(fmt.Sprintf("%s over %s, timestamps %s", how, f, stamps), func(t *testing.T) {
					address := netip.AddrPortFrom(podIPs(backend)[f], reusePort).String()
					defer mustAnswer(t, backend.Namespace, address, how)()
					to := service.at(nodePort, f, w.Nodes[0])
					var slowest time.Duration
					before := mustCountRetransmissions(t, w.Client.Namespace)
					for range connections {
						number++
						begin := time.Now()
						if err := how.once(w.Client, sourceAt(f, number), to); err != nil {
							t.Fatalf("connection %d: %v", number, err)
						}
						slowest = max(slowest, time.Since(begin))
					}
					if slowest >= atOnce {
						t.Errorf("the slowest connection took %v", slowest)
					}
					// A busy machine may see one or another.
					if again := mustCountRetransmissions(t, w.Client.Namespace) - before; again > connections/20 {
						t.Errorf("%d segments were sent again, for %d connections", again, connections)
					}
				})
			}
		}
	}
}

// mustCountRetransmissions returns how many segments of TCP were sent again from a namespace.
func mustCountRetransmissions(t *testing.T, ns *lab.Namespace) (n int) {
	t.Helper()
	lab.Must(t, ns.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		_, tcp, _ := strings.Cut(string(text), "\nTcp: ")
		names, values, _ := strings.Cut(tcp, "\nTcp: ")
		at := slices.Index(strings.Fields(names), "RetransSegs")
		n, err = strconv.Atoi(strings.Fields(values)[at])

		return err
	}))

	return n
}

// TestLateFIN repeats the FIN of a connection whose port another one has since: that goes on.
//
//	client ══ node port ══ node-1:port ══ pod-2-0
//	                            ◀── FIN ──┘
func TestLateFIN(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
	w.mustHaveFewPorts(t)
	service := casesOf(w).remote
	service.port = reusePort
	w.start(t, service)
	backend := w.Nodes[1].Pods[0]
	to := service.at(nodePort, ipv4, w.Nodes[0])
	at := netip.AddrPortFrom(backend.IPv4, reusePort)
	listener, err := backend.Listen("tcp", at.String())
	lab.Must(t, err)
	defer listener.Close()

	old, seen := mustDialAndAccept(t, w, listener, to)
	lab.Must(t, old.Close())
	var open net.Conn
	for range 3 * fewPorts {
		conn, as := mustDialAndAccept(t, w, listener, to)
		if as == seen {
			open = conn

			break
		}
		lab.Must(t, conn.Close())
	}
	if open == nil {
		t.Fatalf("no connection was given %s again", seen)
	}
	defer open.Close()
	for range 20 {
		lab.Must(t, sendFIN(backend.Namespace, at, seen), ask(open))
	}
	for i := range 3 * fewPorts {
		conn, as := mustDialAndAccept(t, w, listener, to)
		lab.Must(t, conn.Close())
		if as == seen {
			t.Fatalf("connection %d was given %s, which another one has", i, seen)
		}
		lab.Must(t, ask(open))
	}
}

// mustDialAndAccept makes a connection, and returns the client as the backend sees it.
func mustDialAndAccept(t *testing.T, w *world, listener net.Listener, to string) (net.Conn, netip.AddrPort) {
	t.Helper()
	client, err := w.Client.Dial("tcp", to, dialTimeout)
	lab.Must(t, err)
	server, err := listener.Accept()
	lab.Must(t, err)
	go func() {
		defer server.Close()
		_, _ = io.Copy(server, server) // the client sees whether it answers
	}()
	lab.Must(t, ask(client))

	return client, server.RemoteAddr().(*net.TCPAddr).AddrPort()
}

// sendFIN sends a FIN as a backend would, with any number.
func sendFIN(from *lab.Namespace, src, dst netip.AddrPort) error {
	return forge(from, src, dst, func(send func(layers.TCP) error) error { return send(layers.TCP{FIN: true, ACK: true}) })
}
