package devices

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// TestFlood has the client send 200,000 first packets with forged sources, much
// more than the tables have room for, while 50 connections are open. Those that
// are in use go on, those that are not are there when they are needed again.
//
//	client ══ 50 connections ═══▶ load balancer ─┬─ pod-1-1
//	     └─── SYN, SYN, SYN … ───▶               └─ pod-2-0, masqueraded
//
// What is found invalid is not counted: when a forged connection has been pushed
// out, its backend's answer belongs to no known connection.
func TestFlood(t *testing.T) {
	t.Parallel()
	const connections, syns = 50, 200_000
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450},
		filter: podMasquerade, // see above
		agent:  []string{"--flow-table-memory", "4Mi"},
	})
	w.mustBeStrict(t)
	c := casesOf(w)
	w.start(t, c.local, c.remote)

	var talks []*talk
	for i := range connections {
		to := []service{c.local, c.remote}[i%2]
		conn, err := w.Client.Dial("tcp", to.at(loadBalancer, families[i/2%2], nil), dialTimeout)
		lab.Must(t, err)
		t.Cleanup(func() { _ = conn.Close() }) // it did what it was for
		talks = append(talks, newTalk(conn))
		lab.Must(t, talks[i].ask("who"))
	}
	idle, busy := talks[:connections/2], talks[connections/2:]
	stopBusy := keepBusy(busy)
	mustFlood(t, w.Client.Namespace, syns, c.local.at(loadBalancer, ipv4, nil), c.remote.at(loadBalancer, ipv4, nil))
	asked, err := stopBusy()
	if err != nil || asked == 0 {
		t.Errorf("connections in use: %d questions, %v", asked, err)
	}
	for i, talk := range idle {
		if err := talk.ask("who"); err != nil {
			t.Errorf("connection %d, which was not in use: %v", i, err)
		}
	}
	lab.Eventually(t, "the status reports the flood", func() error {
		status, err := w.agents[0].Status()
		if err == nil && status.Flows.HalfOpen.Evicted == 0 {
			err = fmt.Errorf("flows: %+v", status.Flows)
		}
		return err
	})
	if !strings.Contains(w.agents[0].Log(), "more flows are begun than can be remembered") {
		t.Error("the log does not report the flood")
	}
}

// TestAnsweredFlood has the client begin four times as many flows as the table has room for, all of
// which are answered, and answered again: first datagrams, then connections. 50 connections that were open
// before, and are idle meanwhile, are there when they are needed; what has no room is refused.
//
//	client ══ 50 connections ═══▶ load balancer ─┬─ pod-1-1
//	     └─── flow, flow, flow ══▶               └─ pod-2-0, masqueraded
func TestAnsweredFlood(t *testing.T) {
	t.Parallel()
	const idle, parallel = 50, 400
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--flow-table-memory", "1Mi"}})
	c := casesOf(w)
	w.start(t, c.local, c.remote)
	targets := []string{c.local.at(loadBalancer, ipv4, nil), c.remote.at(loadBalancer, ipv4, nil)}
	pinned := sluice.MustLoad(t, w.agents[0])
	room, err := pinned.FlowsRoom()
	lab.Must(t, err)
	flows := 4 * pinned.Flows.Capacity() / 2 // of two entries each

	var talks []*talk
	for i := range idle {
		conn, err := w.Client.Dial("tcp", targets[i%2], dialTimeout)
		lab.Must(t, err)
		defer conn.Close()
		talks = append(talks, newTalk(conn))
		lab.Must(t, talks[i].ask("who"))
	}
	mustStay := func() {
		t.Helper()
		var asking sync.WaitGroup
		for i, talk := range talks {
			asking.Go(func() {
				if err := talk.ask("who"); err != nil {
					t.Errorf("connection %d: %v", i, err)
				}
			})
		}
		asking.Wait()
	}

	for i := range flows {
		lab.Must(t, exchange(w.Client.Namespace, targets[i%2]))
	}
	if used := pinned.FlowUsage.Load(maps.FlowsUDP); used < int64(room/3) {
		t.Errorf("the datagrams have %d of %d entries: that is no flood", used, room)
	}
	mustStay()

	var refused atomic.Int64
	var flood errgroup.Group
	flood.SetLimit(parallel)
	for i := range flows {
		flood.Go(func() error {
			conn, err := w.Client.Dial("tcp", targets[i%2], silence)
			if err != nil {
				refused.Add(1)

				return nil
			}
			t.Cleanup(func() { _ = conn.Close() }) // it did what it was for
			talk := newTalk(conn)

			return errors.Join(talk.ask("who"), talk.ask("who"))
		})
	}
	if err := flood.Wait(); err != nil {
		t.Errorf("a connection that was not refused: %v", err)
	}
	counts, err := pinned.ReasonCounts()
	lab.Must(t, err)
	if refused.Load() == 0 || counts[maps.ReasonDropFlowTable] == 0 {
		t.Errorf("%d of %d connections were refused, and %d SYNs", refused.Load(), flows, counts[maps.ReasonDropFlowTable])
	}
	mustStay()
	lab.Eventually(t, "the status reports it", func() error {
		status, err := w.agents[0].Status()
		if err == nil && (status.Flows.Emergency == "" || status.Flows.Flows.Evicted > 0) {
			err = fmt.Errorf("flows: %+v", status.Flows)
		}

		return err
	})
}

// TestFloodOfExchanges has the client send 40,000 datagrams with forged sources to a node port, whose backend is on the
// other node and answers each once: more than there are ports to masquerade with, all within the half minute in which each
// of them holds one. 100 clients then have their exchanges, as with rules like kube-proxy's, and so have those of before.
//
//	client ── 40,000 ──▶ node-1:30045 ── masqueraded ──▶ pod-2-0
func TestFloodOfExchanges(t *testing.T) {
	t.Parallel()
	const flood, clients, streams = 40_000, 100, 10
	for _, rules := range []bool{false, true} {
		t.Run(map[bool]string{false: "Sluice", true: "rules like kube-proxy's"}[rules], func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--flow-table-memory", "64Mi"}})
			s := service{number: 45, backends: []backend{onPod(w.Nodes[1].Pods[0])}}
			if rules {
				lab.Must(t, w.Nodes[0].Netfilter(fmt.Sprintf(`
					table ip proxy {
						chain prerouting {
							type nat hook prerouting priority dstnat
							udp dport %d meta mark set 0x4000 dnat to %s:%d
						}
						chain postrouting {
							type nat hook postrouting priority srcnat
							meta mark 0x4000 masquerade fully-random
						}
					}`, s.nodePort(), s.backends[0].ips[ipv4], podPort)))
			} else {
				w.start(t, s)
			}
			lab.Must(t, w.Nodes[0].AddRoute(netip.MustParsePrefix("198.18.0.0/15"), w.Client.IPv4))
			to := s.at(nodePort, ipv4, w.Nodes[0])
			var talks []*talk
			dial := func(n int) {
				for range n {
					conn, err := w.Client.Dial("udp", to, dialTimeout)
					lab.Must(t, err)
					t.Cleanup(func() { _ = conn.Close() }) // it did what it was for
					talks = append(talks, newTalk(conn))
				}
			}
			ask := func() (answered int) {
				var asking sync.WaitGroup
				var good atomic.Int64
				for _, talk := range talks {
					asking.Go(func() {
						if talk.ask("who") == nil {
							good.Add(1)
						}
					})
				}
				asking.Wait()

				return int(good.Load())
			}
			dial(streams)
			ask()
			time.Sleep(2500 * time.Millisecond) // from then on they are streams
			ask()
			began := time.Now()
			lab.Must(t, sendInNames(w.Client.Namespace, flood, netip.MustParseAddrPort(to)))
			ports := make(map[netip.AddrPort]bool)
			if !rules {
				for e, err := range sluice.MustLoad(t, w.agents[0]).Flows.All() {
					lab.Must(t, err)
					ports[e.Value.MasqueradeAddrPort()] = true
				}
				if len(ports) < 33_000 {
					t.Errorf("the flood has taken %d ports: that is none", len(ports))
				}
			}
			dial(clients)
			first, second := ask(), ask()
			t.Logf("%d and %d of %d exchanges, %v after the flood has begun; %d ports are taken", first, second, len(talks), time.Since(began), len(ports))
			if first < len(talks) || second < len(talks) {
				t.Errorf("%d of %d clients were answered, and then %d", first, len(talks), second)
			}
		})
	}
}

// sendInNames sends a question to a destination in the name of many addresses that no host has: see mustFlood.
func sendInNames(from *lab.Namespace, count int, to netip.AddrPort) error {
	return forgeFrames(from, to, func(send func([]byte) error) error {
		for i := range count {
			src := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
			frame, err := datagram(netip.AddrPortFrom(src, 40_000), to, "who\n")
			if err != nil {
				return err
			}
			if err := send(frame); err != nil {
				return err
			}
			if i%40 == 39 {
				time.Sleep(5 * time.Millisecond) // so that all are answered
			}
		}

		return nil
	})
}

// exchange asks twice from a port of its own, over UDP.
func exchange(from *lab.Namespace, to string) error {
	conn, err := from.Dial("udp", to, dialTimeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	talk := newTalk(conn)

	return errors.Join(talk.ask("who"), talk.ask("who"))
}

// talk is a connection to a [lab.Server].
type talk struct {
	net.Conn
	lines *bufio.Reader
}

func newTalk(conn net.Conn) *talk { return &talk{Conn: conn, lines: bufio.NewReader(conn)} }

func (c *talk) ask(question string) error {
	if err := c.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(c, question); err != nil {
		return err
	}
	line, err := c.lines.ReadString('\n')
	if err != nil {
		return err
	}
	_, err = lab.ParseAnswer(line)

	return err
}

// keepBusy asks on every connection until it is stopped.
func keepBusy(talks []*talk) (stop func() (asked int64, err error)) {
	var stopped atomic.Bool
	var count atomic.Int64
	var asking sync.WaitGroup
	errs := make([]error, len(talks))
	for i, talk := range talks {
		asking.Go(func() {
			for errs[i] == nil && !stopped.Load() {
				errs[i] = talk.ask("wait 5ms")
				count.Add(1)
			}
		})
	}

	return func() (int64, error) {
		stopped.Store(true)
		asking.Wait()
		return count.Load(), errors.Join(errs...)
	}
}

// mustFlood sends the first packets of connections that never come to be, from
// addresses that no host has: 198.18.0.0/15, which is reserved for that.
func mustFlood(t *testing.T, from *lab.Namespace, count int, targets ...string) {
	t.Helper()
	lab.Must(t, from.Do(func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		for i := range count {
			to := netip.MustParseAddrPort(targets[i%len(targets)])
			frame, err := syn(netip.AddrFrom4([4]byte{198, 18, byte(rand.Uint32()), byte(rand.Uint32())}), to)
			if err != nil {
				return err
			}
			err = unix.Sendto(socket, frame, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
			if err != nil && !errors.Is(err, unix.ENOBUFS) {
				return err
			}
		}
		return nil
	}))
}

// syn is a first packet from some port.
func syn(from netip.Addr, to netip.AddrPort) ([]byte, error) {
	return segment(netip.AddrPortFrom(from, uint16(1024+rand.IntN(60_000))), to, layers.TCP{SYN: true})
}
