package forward

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	connections = 20 // of a batch, one after the other

	backendPort = 9000
	nodePort    = 30080
)

// What leads through node-1 without a Service has addresses of its own at both ends.
var (
	routedClient  = netip.MustParsePrefix("198.18.0.1/32")
	routedBackend = netip.MustParsePrefix("198.19.0.1/32")
)

// A client outside of the cluster talks to a pod of node-2 in three ways: directly; through node-1,
// which routes the packets of both directions and has no programs; and by a node port of node-1,
// which turns them around:
//
//	direct  client ┄┄┄┄┄┄┄┄┄┄┄┄┄┄ node-2 ┄ pod
//	routed  client ┄┄┄ node-1 ┄┄┄ node-2 ┄ pod
//	turned  client ┄┄┄ node-1 ┄┄┄ node-2 ┄ pod
//
// One thread has the sockets of both ends, and a veth passes a packet on in the sender's own time. So the time of a
// connection (handshake, request, answer, close) is what all of its packets cost, without task switches. The ways
// alternate.
//
//	go test -run '^$' -bench Hop ./forward
func BenchmarkHop(b *testing.B) {
	b.Run("connections", func(b *testing.B) { measureHop(b, unix.IPPROTO_TCP) })
	b.Run("datagrams", func(b *testing.B) { measureHop(b, unix.IPPROTO_UDP) })
}

func measureHop(b *testing.B, proto uint8) {
	cluster := lab.MustNew(b, lab.Config{Nodes: 2, PodsPerNode: 1, Client: true})
	mustRoute(b, cluster)
	node, pod := cluster.Nodes[0], cluster.Nodes[1].Pods[0]
	dp, devices := mustOpen(b, node)
	mustProgram(b, dp.Maps())
	mustServeNodePort(b, dp.Maps(), node, proto, netip.AddrPortFrom(pod.IPv4, backendPort))
	server := mustListen(b, pod.Namespace, proto)

	ways := []struct {
		name     string
		from, to netip.AddrPort
		turned   bool
	}{
		{"direct", netip.AddrPortFrom(cluster.Client.IPv4, 0), netip.AddrPortFrom(pod.IPv4, backendPort), false},
		{"routed", netip.AddrPortFrom(routedClient.Addr(), 0), netip.AddrPortFrom(routedBackend.Addr(), backendPort), false},
		{"turned", netip.AddrPortFrom(cluster.Client.IPv4, 0), netip.AddrPortFrom(node.IPv4, nodePort), true},
	}
	batch := sendBatch
	if proto == unix.IPPROTO_TCP {
		batch = connectBatch
	}
	took := make([][]float64, len(ways))
	for range rounds {
		for i, way := range ways {
			if way.turned {
				mustAttach(b, node, dp, devices)
			} else {
				mustAttach(b, node, dp, nil)
			}
			took[i] = append(took[i], fastest(b, cluster.Client.Namespace, func() (float64, error) {
				return batch(server, way.from, way.to)
			}))
		}
	}
	mustBeTurned(b, dp.Maps())
	b.ReportMetric(0, "ns/op")
	for i, way := range ways {
		b.ReportMetric(median(took[i]), way.name+"-ns")
	}
	b.ReportMetric(medianRatio(took[0], took[1]), "routed-x-direct") // speeds
	b.ReportMetric(medianRatio(took[0], took[2]), "turned-x-direct")
	b.ReportMetric(medianRatio(took[1], took[2]), "turned-x-routed")
}

// mustRoute gives both ends their further addresses, with routes through node-1 in both directions.
func mustRoute(b *testing.B, c *lab.Cluster) {
	b.Helper()
	near, far, pod := c.Nodes[0], c.Nodes[1], c.Nodes[1].Pods[0]
	lab.Must(b,
		load.Own(c.Client.Namespace, routedClient),
		load.Own(pod.Namespace, routedBackend),
		c.Client.AddRoute(netip.PrefixFrom(pod.IPv4, 32), far.IPv4),
		c.Client.AddRoute(routedBackend, near.IPv4),
		near.AddRoute(routedBackend, far.IPv4),
		far.AddRoute(routedBackend, pod.IPv4),
		far.AddRoute(routedClient, near.IPv4),
		near.AddRoute(routedClient, c.Client.IPv4),
		// The hosts share a segment, so a router tells them that there is a shorter way.
		near.Sysctl("net/ipv4/conf/all/send_redirects", "0"),
		near.Sysctl("net/ipv4/conf/eth0/send_redirects", "0"),
		c.Client.Sysctl("net/ipv4/tcp_tw_reuse", "1"),
		c.Client.Sysctl("net/ipv4/ip_local_port_range", "1024 65535"),
	)
}

// mustServeNodePort programs a node port with one backend, which is remote, and the devices of the node.
func mustServeNodePort(b *testing.B, m *maps.Pinned, node *lab.Node, proto uint8, backend netip.AddrPort) {
	b.Helper()
	hand := mapstest.New(m.Tables)
	port, err := hand.ServicePort()
	lab.Must(b, err)
	id, err := hand.Backend(port, backend, 0)
	lab.Must(b, err)
	pool, err := hand.Pool(maps.Pool{ServicePortId: port}, []uint32{id}, nil)
	lab.Must(b, err)
	key := maps.FrontendKeyOf(netip.IPv4Unspecified(), nodePort, proto, maps.ScopeExternal)
	lab.Must(b, hand.Frontend(key, maps.KindNodePort, pool))
	address := maps.AddrOf(node.IPv4)
	lab.Must(b, hand.Mark(address, maps.AddrNode|maps.AddrNodePort, uint32(mustIndex(b, node, "eth0"))))
	uplink := maps.Device{SourceV4: address, Flags: maps.DeviceTurns}
	lab.Must(b, m.Devices.Put(uint32(mustIndex(b, node, "eth0")), uplink))
}

// mustBeTurned fails unless there are flows, none of which passes the stack of the node.
func mustBeTurned(b *testing.B, m *maps.Pinned) {
	b.Helper()
	flows := 0
	for entry, err := range m.Flows.All() {
		lab.Must(b, err)
		if !entry.Value.IsTurned() {
			b.Fatalf("the flow of packets from %v to %v passes the stack", entry.Key.Source(), entry.Key.Destination())
		}
		flows++
	}
	if flows == 0 {
		b.Fatal("no flow is in the table")
	}
}

// mustListen returns a socket on all addresses of a pod.
func mustListen(b *testing.B, ns *lab.Namespace, proto uint8) int {
	b.Helper()
	kind := unix.SOCK_STREAM
	if proto == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	fd := -1
	lab.MustDo(b, ns, func() (err error) {
		if fd, err = newSocket(kind); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: backendPort}); err != nil || proto == unix.IPPROTO_UDP {
			return err
		}

		return unix.Listen(fd, 16)
	})
	b.Cleanup(func() { unix.Close(fd) })

	return fd
}

// newSocket returns a socket that waits for a second at most.
func newSocket(kind int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind, 0)
	if err != nil {
		return -1, err
	}

	return fd, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
}

func sockaddr(a netip.AddrPort) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

// connectBatch makes connections, one after the other, and returns nanoseconds for each.
func connectBatch(server int, from, to netip.AddrPort) (float64, error) {
	source, target := sockaddr(from), sockaddr(to)
	begin := time.Now()
	for range connections {
		if err := converse(server, source, target); err != nil {
			return 0, fmt.Errorf("connection to %s: %w", to, err)
		}
	}

	return float64(time.Since(begin).Nanoseconds()) / connections, nil
}

// converse makes a connection, with a request and an answer; the client closes it.
func converse(server int, source, target *unix.SockaddrInet4) error {
	var message [64]byte
	client, err := newSocket(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(client)
	if err := unix.SetsockoptInt(client, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return err
	}
	if err := unix.Bind(client, source); err != nil {
		return err
	}
	if err := unix.Connect(client, target); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	backend, _, err := unix.Accept4(server, 0)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	defer unix.Close(backend)
	for _, way := range [][2]int{{client, backend}, {backend, client}} {
		if _, err := unix.Write(way[0], message[:]); err != nil {
			return err
		}
		if err := expect(way[1], len(message)); err != nil {
			return err
		}
	}
	if err := unix.Shutdown(client, unix.SHUT_WR); err != nil {
		return err
	}

	return expect(backend, 0)
}

// expect reads a message of a length, which is 0 at the end of a connection.
func expect(fd, length int) error {
	var message [64]byte
	n, err := unix.Read(fd, message[:])
	if err == nil && n != length {
		err = fmt.Errorf("%d bytes instead of %d", n, length)
	}

	return err
}

// sendBatch sends datagrams, and returns nanoseconds for each. A flow of a node port is answered before, so that
// it is confirmed.
func sendBatch(server int, from, to netip.AddrPort) (float64, error) {
	var message [64]byte
	client, err := newSocket(unix.SOCK_DGRAM)
	if err != nil {
		return 0, err
	}
	defer unix.Close(client)
	if err := unix.Bind(client, sockaddr(from)); err != nil {
		return 0, err
	}
	if err := unix.Connect(client, sockaddr(to)); err != nil {
		return 0, err
	}
	if to.Port() == nodePort {
		if err := ask(client, server); err != nil {
			return 0, fmt.Errorf("datagram to %s: %w", to, err)
		}
	}
	var begin time.Time
	for i := range 2 * packets {
		// The first half fills the server's socket, which drops the others at once.
		if i == packets {
			begin = time.Now()
		}
		if _, err := unix.Write(client, message[:]); err != nil {
			return 0, err
		}
	}

	return float64(time.Since(begin).Nanoseconds()) / packets, nil
}

// ask has the server, which still has datagrams of earlier batches, answer one of the client.
func ask(client, server int) error {
	var message [64]byte
	for {
		if _, _, err := unix.Recvfrom(server, message[:], unix.MSG_DONTWAIT); err != nil {
			break
		}
	}
	if _, err := unix.Write(client, message[:]); err != nil {
		return err
	}
	_, from, err := unix.Recvfrom(server, message[:], 0)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if err := unix.Sendto(server, message[:], 0, from); err != nil {
		return fmt.Errorf("answer: %w", err)
	}

	return expect(client, len(message))
}
