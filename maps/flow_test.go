package maps

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// A flow with another port at the stack, whose backend sees this node.
var drawn = Flow{
	Client: AddrOf(netip.MustParseAddr("198.51.100.7")), ClientPort: Port(40000),
	OriginalDst: AddrOf(netip.MustParseAddr("203.0.113.1")), OriginalPort: Port(80),
	Backend: AddrOf(netip.MustParseAddr("10.244.2.2")), BackendPort: Port(8080),
	Masquerade: AddrOf(netip.MustParseAddr("192.168.50.1")), MasqueradePort: Port(10001),
	StackPort: Port(10002), Proto: 6, Flags: FlowMasqueraded,
}

// The table above enum flow_role in flow_types.h, in addresses.
func TestFlowKeys(t *testing.T) {
	const client, vip = "198.51.100.7:40000", "203.0.113.1:80"
	const stack, backend, masquerade = "198.51.100.7:10002", "10.244.2.2:8080", "192.168.50.1:10001"
	want := map[uint8]string{
		FlowFromClient:  "hook 1: " + client + " -> " + vip,
		FlowToClient:    "hook 2: " + backend + " -> " + stack,
		FlowToBackend:   "hook 2: " + stack + " -> " + backend,
		FlowFromBackend: "hook 1: " + backend + " -> " + masquerade,
	}
	have := map[uint8]string{}
	for _, role := range drawn.Roles() {
		key := drawn.Key(role)
		have[role] = fmt.Sprintf("hook %d: %s -> %s", key.Hook, key.Source(), key.Destination())
		if again := FlowKeyOf(key.Hook, 6, key.Source(), key.Destination()); again != key {
			t.Errorf("role %d: FlowKeyOf makes %v of what %v says", role, again, key)
		}
	}
	if diff := gocmp.Diff(want, have); diff != "" {
		t.Errorf("keys of a masqueraded flow (-want +have):\n%s", diff)
	}

	plain := drawn
	plain.Flags = FlowCounted
	if diff := gocmp.Diff([]uint8{FlowFromClient, FlowToClient}, plain.Roles()); diff != "" {
		t.Errorf("roles of a flow that is not masqueraded (-want +have):\n%s", diff)
	}
}

func TestFlowAddresses(t *testing.T) {
	for what, test := range map[string]struct{ have, want any }{
		"client":     {drawn.ClientAddrPort(), netip.MustParseAddrPort("198.51.100.7:40000")},
		"stack":      {drawn.StackAddrPort(), netip.MustParseAddrPort("198.51.100.7:10002")},
		"vip":        {drawn.OriginalAddrPort(), netip.MustParseAddrPort("203.0.113.1:80")},
		"backend":    {drawn.BackendAddrPort(), netip.MustParseAddrPort("10.244.2.2:8080")},
		"masquerade": {drawn.MasqueradeAddrPort(), netip.MustParseAddrPort("192.168.50.1:10001")},
	} {
		if test.have != test.want {
			t.Errorf("%s: %v, want %v", what, test.have, test.want)
		}
	}
}

// FlowMemory agrees with the kernel. Before Linux 6.4 the kernel only estimates, by keys and values alone.
func TestFlowMemory(t *testing.T) {
	const little = 4096 // for the map itself
	for _, entries := range []uint32{1000, 1024, 65536, 100000} {
		t.Run(fmt.Sprintf("of %d entries", entries), func(t *testing.T) {
			opts := small()
			opts.Capacities[NameHalfOpen] = entries
			opts.Capacities[NameFlows] = 16
			p := mustCreate(t, lab.MustBPFRoot(t), opts)
			facts, err := p.byName[NameHalfOpen].Info()
			lab.Must(t, err)
			kernel, ok := facts.Memlock()
			have := FlowMemory(p.HalfOpen.Capacity())
			estimate := uint64(entries) * (40 + 104)
			exact := have <= kernel && kernel <= have+little
			if !ok || !exact && kernel/4096 != (estimate+4095)/4096 {
				t.Errorf("%d bytes, the kernel says %d (and its estimate would be %d)", have, kernel, estimate)
			}
		})
	}
}

func TestFlowCapacities(t *testing.T) {
	for _, memory := range []uint64{1 << 20, 10_000_000, 64 << 20, 3 << 30, 1 << 36} {
		t.Run(fmt.Sprintf("of %d bytes", memory), func(t *testing.T) {
			room, err := FlowCapacities(memory)
			lab.Must(t, err)
			flows, halfOpen := FlowMemory(int(room[NameFlows])), FlowMemory(int(room[NameHalfOpen]))
			if flows+2*halfOpen > memory {
				t.Errorf("flows take %d and half_open %d bytes, with unanswered more than %d", flows, halfOpen, memory)
			}
			if room[NameUnanswered] != room[NameHalfOpen] {
				t.Errorf("unanswered has room for %d entries, half_open for %d", room[NameUnanswered], room[NameHalfOpen])
			}
			// One more may need twice the buckets.
			if more := FlowMemory(int(room[NameFlows])+1) + 2*FlowMemory(int(room[NameHalfOpen])+1); more <= memory {
				t.Errorf("%v leave %d bytes unused", room, memory-more)
			}
			if flows < 6*halfOpen || flows > 10*halfOpen {
				t.Errorf("flows take %d bytes, half_open %d; want eight times as many", flows, halfOpen)
			}
		})
	}
	for _, flows := range []int{10_000, 131_072, 1 << 20} {
		room, err := FlowCapacities(MemoryForFlows(flows))
		if have := int(room[NameFlows]); err != nil || have < 2*flows || have > 3*flows {
			t.Errorf("room for %d entries, want some more than %d (%v)", have, 2*flows, err)
		}
	}
	for _, memory := range []uint64{0, 1<<20 - 1, 1<<36 + 1} {
		if room, err := FlowCapacities(memory); err == nil {
			t.Errorf("%d bytes: %v, want an error", memory, room)
		}
	}
}

// If two callers remove an entry at once, Remove reports it to one of them.
func TestRemove(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	lab.Must(t, p.Flows.Put(drawn.Key(FlowFromClient), drawn))
	for i, want := range []bool{true, false} {
		if was, err := p.Flows.Remove(drawn.Key(FlowFromClient)); was != want || err != nil {
			t.Errorf("time %d: %v, %v, want %v", i+1, was, err, want)
		}
	}
}

func TestFlowCounts(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	counters := p.byName[NameFlowCounts]
	for index := range counters.MaxEntries() {
		perCPU := make([]uint64, ebpf.MustPossibleCPU())
		for cpu := range perCPU {
			perCPU[cpu] = 1000 + uint64(index)
		}
		lab.Must(t, counters.Put(index, perCPU))
	}
	have, err := p.FlowCounts()
	lab.Must(t, err)
	cpus := uint64(ebpf.MustPossibleCPU())
	want := FlowCounts{
		FlowsPut: 1000 * cpus, FlowsDeleted: 1001 * cpus,
		HalfOpenPut: 1002 * cpus, HalfOpenDeleted: 1003 * cpus,
		Repaired: 1004 * cpus, MasqueradeRetries: 1005 * cpus, StackPorts: 1006 * cpus,
	}
	if have != want {
		t.Errorf("%+v, want %+v", have, want)
	}
}

// A sweep clears the cells of flows that are gone, and none that a program has written since.
func TestSourceSweep(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	const begin, later = uint64(time.Hour), uint64(2 * time.Hour)
	key := func(from string) FlowKey {
		return FlowKeyOf(HookEgress, 6, netip.MustParseAddrPort(from), netip.MustParseAddrPort("192.0.2.1:1"))
	}
	gone, kept, renewed, young, client := key("10.0.0.1:80"), key("10.0.0.2:80"), key("10.0.0.3:80"), key("10.0.0.4:80"), key("10.0.0.5:80")
	for k, at := range map[FlowKey]uint64{gone: begin, kept: begin, renewed: begin, young: later} {
		p.SourceFilter.Note(k, FlowToClient, at)
	}
	p.SourceFilter.Note(client, FlowToBackend, begin)
	opening := key("10.0.0.6:80") // of an unconfirmed flow, to its backend
	p.SourceFilter.Note(opening, FlowToClient, begin)
	anyPort := client
	anyPort.SrcPort = Port(4711)
	if !p.SourceFilter.May(anyPort) {
		t.Error("a client's other ports are kept out")
	}
	other := gone
	other.SrcPort = Port(81)
	if p.SourceFilter.May(other) {
		t.Error("a backend's other ports are let through")
	}

	sweep := p.SourceFilter.Begin(later)
	if sweep.Idle() {
		t.Error("no cell is old")
	}
	sweep.Keep(kept, &Flow{Role: FlowToClient})
	sweep.Keep(opening, &Flow{Role: FlowToBackend})
	p.SourceFilter.Note(renewed, FlowToClient, later)
	sweep.End()
	for what, test := range map[string]struct {
		key  FlowKey
		want bool
	}{
		"of a flow that is gone": {gone, false}, "of one that is there": {kept, true}, "that was renewed": {renewed, true},
		"that is young": {young, true}, "of a client whose flow is unconfirmed": {opening, true}, "of a client that is gone": {client, false},
	} {
		if p.SourceFilter.May(test.key) != test.want {
			t.Errorf("the cell %s lets packets pass is %v, want %v", what, !test.want, test.want)
		}
	}
}
