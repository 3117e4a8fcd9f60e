package flow

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestList(t *testing.T) {
	w := newWorld(t, 1024)
	lab.Must(t,
		w.ServicePorts.Put(1, maps.ServicePortOf("shop", "web", "http", tcp, 4)),
		w.ServicePorts.Put(2, maps.ServicePortOf("kube-system", "dns", "", udp, 4)),
	)
	created := func(f maps.Flow, ago time.Duration) maps.Flow {
		f.Created = w.clock - uint64(ago)

		return f
	}
	w.put(t, created(flowOf(tcp, 40000), time.Hour), note{fromClient, maps.FlowOpen, false, 90 * time.Second}, note{toClient, maps.FlowOpen, false, 30*time.Second + 1})
	dns := created(masqueraded(flowOf(udp, 53000)), 10*time.Second)
	dns.ServicePortId, dns.StackPort = 2, maps.Port(10007)
	w.put(t, dns, note{fromClient, maps.FlowOpen, true, 0}, note{fromBackend, maps.FlowNew, true, 9 * time.Second})
	begun := created(to(flowOf(sctp, 1), "[fd00:10:96::1]:80"), 0)
	begun.Client, begun.Backend, begun.ServicePortId = addr("fd00::7"), addr("fd00::2"), 7
	w.put(t, begun, note{toClient, maps.FlowNew, true, 0})
	// It was seen before it moved, and after.
	// Packets of it were seen after we looked at the clock.
	moved := created(flowOf(tcp, 39999), -3*time.Second)
	w.put(t, moved, note{fromClient, maps.FlowOpen, false, -3 * time.Second}, note{fromClient, maps.FlowNew, true, 0})

	turned := created(masqueraded(flowOf(tcp, 40001)), time.Hour)
	turned.ServicePortId, turned.Flags = 8, turned.Flags|maps.FlowTurned
	w.put(t, turned, note{fromClient, maps.FlowOpen, false, 0}, note{fromBackend, maps.FlowFin, false, 0})
	// One of its entries has already been switched to the network stack.
	turned.ServicePortId = 9
	turned.ClientPort, turned.MasqueradePort = maps.Port(40002), maps.Port(40002)
	w.put(t, turned, note{fromClient, maps.FlowOpen, false, 0})
	turned.Flags &^= maps.FlowTurned
	w.put(t, turned, note{fromBackend, maps.FlowOpen, false, 0})

	client := func(port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("198.51.100.7"), port)
	}
	vip, backend := netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("10.244.2.2:8080")
	web := []Flow{
		{Service: "shop/web:http", Protocol: "TCP", Client: client(39999), OriginalDst: vip, Backend: backend, State: Established},
		{Service: "shop/web:http", Protocol: "TCP", Client: client(40000), OriginalDst: vip, Backend: backend, State: Established, AgeSeconds: 3600, IdleSeconds: 30},
	}
	all := append([]Flow{
		{
			Service: "id 7", Protocol: "SCTP", State: Opening, Client: netip.MustParseAddrPort("[fd00::7]:1"),
			OriginalDst: netip.MustParseAddrPort("[fd00:10:96::1]:80"), Backend: netip.MustParseAddrPort("[fd00::2]:8080"),
		},
		{
			Service: "id 8", Protocol: "TCP", Client: client(40001), OriginalDst: vip, Backend: backend, State: Closing,
			Masquerade: netip.MustParseAddrPort("192.168.50.1:40001"), AgeSeconds: 3600, Turned: true,
		},
		{
			Service: "id 9", Protocol: "TCP", Client: client(40002), OriginalDst: vip, Backend: backend, State: Established,
			Masquerade: netip.MustParseAddrPort("192.168.50.1:40002"), StackPort: 40001, AgeSeconds: 3600,
		},
		{
			Service: "kube-system/dns", Protocol: "UDP", Client: client(53000), OriginalDst: vip, Backend: backend, State: Unanswered,
			Masquerade: netip.MustParseAddrPort("192.168.50.1:53000"), StackPort: 10007, AgeSeconds: 10,
		},
	}, web...)
	for service, want := range map[string][]Flow{"": all, "shop/web": web, "shop/nosuch": {}, "kube-system/dns": all[3:4]} {
		have, err := List(w.Pinned, service, w.clock)
		lab.Must(t, err)
		if diff := gocmp.Diff(want, have, gocmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("of Service %q (-want +have):\n%s", service, diff)
		}
	}
}

// Each flow is listed once, and the list is sorted.
func TestListOfMany(t *testing.T) {
	w := newWorld(t, 1024)
	for n := range 100 {
		f := masqueraded(flowOf(tcp, 1000-n))
		f.ServicePortId = uint32(1 + n%2)
		w.put(t, f, live...)
		if n%3 == 0 {
			w.put(t, f, note{fromClient, maps.FlowNew, true, 0}) // left behind
		}
	}
	l := lister{maps: w.Pinned, tables: tablesOf(w.Pinned), names: make(map[uint32]name)}
	standing := 0
	for _, table := range l.tables {
		for e, err := range table.All() {
			lab.Must(t, err)
			_, ok, err := l.flow(table, e, "", w.clock)
			lab.Must(t, err)
			if ok {
				standing++
			}
		}
	}
	flows, err := List(w.Pinned, "", w.clock)
	lab.Must(t, err)
	inOrder := slices.IsSortedFunc(flows, func(a, b Flow) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), int(a.Client.Port())-int(b.Client.Port()))
	})
	if standing != 100 || len(flows) != 100 || !inOrder {
		t.Errorf("%d entries stand for %d flows, in order: %v; want 100 and 100 in order", standing, len(flows), inOrder)
	}
}

// A flow that moves from one table to the other while they are read is listed once, whenever it moves.
func TestListOfMovingFlow(t *testing.T) {
	for _, at := range []int{1, 2} {
		w := newWorld(t, 1024)
		f := flowOf(tcp, 1)
		w.put(t, f, note{fromClient, maps.FlowNew, true, 0})
		passes := 0
		h := &hooked{all: func() {
			if passes++; passes == at {
				w.put(t, f, note{fromClient, maps.FlowOpen, false, 0})
				lab.Must(t, w.HalfOpen.Delete(f.Key(fromClient)))
			}
		}}
		tables := tablesOf(w.Pinned)
		first, second := *h, *h
		first.entries, second.entries = tables[0].entries, tables[1].entries
		tables[0].entries, tables[1].entries = &first, &second
		l := lister{maps: w.Pinned, tables: tables, names: make(map[uint32]name)}
		flows, err := l.list("", w.clock)
		lab.Must(t, err)
		if len(flows) != 1 {
			t.Errorf("moved before pass %d: listed %d times", at, len(flows))
		}
	}
}
