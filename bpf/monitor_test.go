package bpf

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// monitored are device programs on maps of their own, with a Service at 10.96.0.1:80 that has a
// backend, and one at 10.96.0.2:80 that has none. Other addresses of 10.96.0.0/12 are unallocated.
type monitored struct {
	maps         *maps.Pinned
	programs     *DevicePrograms
	listener     *maps.Listener
	served, none uint32 // service port ids
}

func mustMonitored(t testing.TB) monitored {
	t.Helper()
	m := monitored{maps: mapstest.MustCreate(t, nil)}
	m.programs = mustLoadDevice(t, m.maps, DeviceConfig{Class: maps.DeviceUplink})
	hand := mapstest.New(m.maps.Tables)
	lab.Must(t, hand.ServiceCIDR(netip.MustParsePrefix("10.96.0.0/12")))
	mustProgramService(t, hand, layers.IPProtocolTCP, netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("10.0.1.7:8080"))
	vip := netip.MustParseAddrPort("10.96.0.2:80")
	none, err := hand.ServicePort()
	lab.Must(t, err)
	pool, err := hand.Pool(maps.Pool{ServicePortId: none}, nil, nil)
	lab.Must(t, err, hand.Mark(maps.AddrOf(vip.Addr()), maps.AddrService, 0))
	lab.Must(t, hand.Frontend(maps.FrontendKeyOf(vip.Addr(), vip.Port(), unix.IPPROTO_TCP, maps.ScopeExternal), maps.KindClusterIP, pool))
	m.none, m.served = none, none-1

	return m
}

func (m *monitored) mustListen(t testing.TB) {
	t.Helper()
	var err error
	m.listener, err = m.maps.Listen()
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, m.listener.Close()) })
}

// send runs a program on a segment.
func (m *monitored) send(t testing.TB, from, to string, tcp layers.TCP) {
	t.Helper()
	_, _, err := m.programs.Ingress.Test(mustSegment(t, netip.MustParseAddrPort(from), netip.MustParseAddrPort(to), tcp))
	lab.Must(t, err)
}

// reported returns the events since the last call, without their times, in a few words each.
func (m *monitored) reported(t testing.TB) []string {
	t.Helper()
	var all []string
	for {
		e, ok, err := m.listener.Read(time.Now().Add(10 * time.Millisecond))
		lab.Must(t, err)
		if !ok {
			return all
		}
		if age := now(t) - e.Time; age > uint64(time.Minute) {
			t.Errorf("an event is %d ns old", age)
		}
		all = append(all, describeEvent(e))
	}
}

func describeEvent(e maps.MonitorEvent) string {
	return fmt.Sprintf("kind %d at %d of device %d: %s:%d to %s:%d/%d, %s, service port %d, backend %d", e.Kind, e.Place, e.Ifindex,
		e.Client.IP(), maps.Port(e.ClientPort), e.OriginalDst.IP(), maps.Port(e.OriginalPort), e.Proto, maps.Reason(e.Reason).Label(), e.ServicePortId, e.BackendId)
}

// A device reports each new flow and each refusal once, and nothing else.
func TestEventsAtDevices(t *testing.T) {
	m := mustMonitored(t)
	const from = "192.0.2.9:40000"
	m.send(t, from, "10.96.0.1:80", layers.TCP{SYN: true})
	m.mustListen(t)
	for _, test := range []struct {
		name string
		to   string
		tcp  layers.TCP
		want []string
	}{
		{"no packet of a flow that was there before", "10.96.0.1:80", layers.TCP{SYN: true}, nil},
		{"a new flow", "10.96.0.1:80", layers.TCP{SYN: true, SrcPort: 40001},
			[]string{"kind 1 at 1 of device 1: 192.0.2.9:40001 to 10.96.0.1:80/6, translated, service port 1, backend 1"}},
		{"no packet of a flow", "10.96.0.1:80", layers.TCP{ACK: true, SrcPort: 40001}, nil},
		{"a Service without backends", "10.96.0.2:80", layers.TCP{SYN: true},
			[]string{"kind 2 at 1 of device 1: 192.0.2.9:40000 to 10.96.0.2:80/6, reject_no_backend, service port 2, backend 0"}},
		{"an unallocated address, with no Service", "10.96.7.7:80", layers.TCP{SYN: true},
			[]string{"kind 2 at 1 of device 1: 192.0.2.9:40000 to 10.96.7.7:80/6, drop_unallocated, service port 0, backend 0"}},
		{"no other traffic", "198.51.100.1:80", layers.TCP{SYN: true}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			client := netip.MustParseAddrPort(from)
			if test.tcp.SrcPort != 0 {
				client = netip.AddrPortFrom(client.Addr(), uint16(test.tcp.SrcPort))
			}
			m.send(t, client.String(), test.to, test.tcp)
			if diff := cmp.Diff(test.want, m.reported(t)); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

// All who listen get every event. What does not fit into a ring buffer is counted for its listener.
func TestListenersGetAll(t *testing.T) {
	m := mustMonitored(t)
	m.mustListen(t)
	other := m
	other.mustListen(t)
	const flood = 20_000 // more than a ring buffer holds
	_, _, err := m.programs.Ingress.Benchmark(mustSegment(t, netip.MustParseAddrPort("192.0.2.9:40000"), netip.MustParseAddrPort("10.96.7.7:80"), layers.TCP{SYN: true}), flood, nil)
	lab.Must(t, err)
	for name, listener := range map[string]*maps.Listener{"first": m.listener, "second": other.listener} {
		read := uint64(len((&monitored{listener: listener}).reported(t)))
		if lost := listener.Lost(); read == 0 || lost == 0 || read+lost != flood {
			t.Errorf("the %s listener has read %d events and lost %d, of %d", name, read, lost, flood)
		}
	}
}

// A program frees the place of a listener that no longer renews it.
func TestKilledListenerCostsNothing(t *testing.T) {
	m := mustMonitored(t)
	m.mustListen(t)
	listeners := m.maps.Replacements()["sl_listeners"]
	value := make([]byte, listeners.ValueSize())
	binary.NativeEndian.PutUint64(value, now(t)-1)
	lab.Must(t, listeners.Put(uint32(0), value))
	m.send(t, "192.0.2.9:40000", "10.96.0.2:80", layers.TCP{SYN: true})
	lab.Must(t, listeners.Lookup(uint32(0), &value))
	if until := binary.NativeEndian.Uint64(value); until != 0 {
		t.Errorf("the listener has its place until %d", until)
	}
	if events := m.reported(t); events != nil {
		t.Errorf("it still gets %v", events)
	}
}

// Refusals are kept without a listener. A flood of one reason evicts none of another, and most of it
// is not written at all.
func TestFloodOfRefusals(t *testing.T) {
	m := mustMonitored(t)
	m.send(t, "192.0.2.9:40000", "10.96.0.2:80", layers.TCP{SYN: true})
	begin := time.Now()
	for range 10 {
		flood := mustSegment(t, netip.MustParseAddrPort("192.0.2.9:40001"), netip.MustParseAddrPort("10.96.7.7:80"), layers.TCP{SYN: true})
		_, _, err := m.programs.Ingress.Benchmark(flood, 20_000, nil)
		lab.Must(t, err)
	}
	m.send(t, "192.0.2.9:40002", "10.96.0.2:80", layers.TCP{SYN: true})
	recent, err := m.maps.RecentRefusals()
	lab.Must(t, err)
	count := make(map[string]int)
	for i, e := range recent {
		count[describeEvent(e)]++
		if i > 0 && e.Time < recent[i-1].Time {
			t.Error("they are not in order")
		}
	}
	const burst = 32
	flood := "kind 2 at 1 of device 1: 192.0.2.9:40001 to 10.96.7.7:80/6, drop_unallocated, service port 0, backend 0"
	if n := count[flood]; n < burst || n > burst+int(time.Since(begin)/time.Second)+1 {
		t.Errorf("%d of the flood were written in %v", n, time.Since(begin))
	}
	delete(count, flood)
	want := map[string]int{
		"kind 2 at 1 of device 1: 192.0.2.9:40000 to 10.96.0.2:80/6, reject_no_backend, service port 2, backend 0": 1,
		"kind 2 at 1 of device 1: 192.0.2.9:40002 to 10.96.0.2:80/6, reject_no_backend, service port 2, backend 0": 1,
	}
	if diff := cmp.Diff(want, count); diff != "" {
		t.Errorf("the others (-want +got):\n%s", diff)
	}
}

// The cost of a refused packet beyond an empty program, in a flood, as long as no one listens and while
// one does.
//
//	go test -run '^$' -bench Refused ./bpf
func BenchmarkRefused(b *testing.B) {
	for _, listens := range []bool{false, true} {
		b.Run(fmt.Sprintf("one listens: %v", listens), func(b *testing.B) {
			m := mustMonitored(b)
			if listens {
				m.mustListen(b)
				ended := make(chan error, 1)
				ctx, stop := context.WithCancel(b.Context())
				go func() {
					var err error
					for ctx.Err() == nil && err == nil {
						_, _, err = m.listener.Read(time.Now().Add(time.Millisecond))
					}
					ended <- err
				}()
				defer func() {
					stop()
					lab.Must(b, <-ended)
				}()
			}
			frame := mustSegment(b, netip.MustParseAddrPort("192.0.2.9:40000"), netip.MustParseAddrPort("10.96.7.7:80"), layers.TCP{SYN: true})
			compare(b, m.programs.Ingress, frame)
			if listens {
				b.ReportMetric(float64(m.listener.Lost()), "lost")
			}
		})
	}
}
