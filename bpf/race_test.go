package bpf

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The first two datagrams of a socket, as a resolver sends for both families, that two CPUs get at one moment
// belong to one flow, in each way that a flow can begin.
func TestFirstDatagramsAtOnce(t *testing.T) {
	for _, test := range []struct {
		name     string
		places   []place
		to       []string
		flags    uint16
		entries  int
		affinity uint32
		replaces bool // a flow that has lost an entry
		own      bool // the client is a process of the node
	}{
		{name: "turned", places: []place{turning}, to: []string{remotePod, "8.0.2.9:8080"}, entries: 2},
		{name: "masqueraded by way of the stack", places: []place{uplink}, to: []string{remotePod, "8.0.2.9:8080"}, entries: 4},
		{name: "masqueraded, one backend", places: []place{uplink}, to: []string{remotePod}, entries: 4},
		{name: "all are masqueraded", places: []place{podVeth}, to: []string{tapPod, "8.0.4.9:8080"}, flags: maps.PoolMasquerade, entries: 4},
		{name: "plain", places: []place{uplink, podVeth}, to: []string{tapPod, "8.0.4.9:8080"}, entries: 2},
		{name: "with affinity", places: []place{podVeth}, to: []string{tapPod, "8.0.4.9:8080"}, affinity: 100, entries: 2},
		{name: "a bridge", places: []place{podPort, bridgedNIC}, to: []string{portPod, portPodToo}, entries: 2},
		{name: "in place of another flow", places: []place{uplink}, to: []string{remotePod, "8.0.2.9:8080"}, replaces: true, entries: 4},
		{name: "of a process of the node", places: []place{uplink}, to: []string{remotePod, "8.0.2.9:8080"}, own: true, entries: 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, test.places, func(t *testing.T, w *world, p place) {
				r := race{w: w, place: p, program: w.programs(t, p).Ingress, client: p.client, entries: test.entries}
				if test.own {
					r.program, r.client = w.programs(t, p).Egress, node // without a port, as the socket of a test run
				}
				for n := range batch {
					r.dialled = append(r.dialled, fmt.Sprintf("%s:%d", at(clusterIP).Addr(), 1000+n))
				}
				w.serve(t, service{at: r.dialled, proto: layers.IPProtocolUDP, to: test.to, flags: test.flags, affinity: test.affinity})
				r.run(t, test.replaces)
			})
		})
	}
}

const batch = 100 // pairs

// race is pairs of first datagrams of a client, which two CPUs get at once.
type race struct {
	w       *world
	place   place
	program *ebpf.Program
	client  string
	dialled []string
	entries int // of a flow

	arrived atomic.Int64 // how many datagrams are about to be run
}

// outcomes are what happened to a CPU's datagrams.
type outcomes [batch]struct {
	to   string
	took time.Duration
}

// run checks that each pair has one flow. A pair is passed over if something has held up one of the CPUs for as
// long as the other one waits, which on an emulated machine happens to most.
func (r *race) run(t *testing.T, replaces bool) {
	t.Helper()
	const batches, enough, held = 25, 3 * batch, 100 * time.Microsecond
	cpus := mustCPUs(t, 2)
	mixed, judged := 0, 0
	for i := 0; i < batches && judged < enough; i++ {
		if replaces {
			r.mustBreakFlows(t)
		}
		since := now(t)
		r.arrived.Store(0)
		var had [2]outcomes
		var running errgroup.Group
		for i, cpu := range cpus {
			running.Go(func() error { return r.w.node.Do(func() error { return r.runOn(cpu, &had[i]) }) })
		}
		lab.Must(t, running.Wait())
		created := make(map[uint16][]uint64)
		for _, e := range r.w.entries(t) {
			if port := maps.Port(e.flow.OriginalPort); e.flow.Created >= since {
				created[port] = append(created[port], e.flow.Created)
			}
		}
		for n, dialled := range r.dialled {
			a, b := had[0][n], had[1][n]
			if max(a.took, b.took) > held {
				continue
			}
			judged++
			flow := created[at(dialled).Port()]
			if a.to != b.to || len(flow) != r.entries || len(slices.Compact(flow)) != 1 {
				mixed++
			}
		}
		r.w.forgetDatagrams(t)
	}
	if mixed > 0 {
		t.Errorf("%d of %d pairs have not one flow", mixed, judged)
	}
	if judged < batch {
		t.Errorf("of %d pairs, only in %d was no CPU held up", batches*batch, judged)
	}
}

// mustBreakFlows opens a flow for each pair, which loses an entry.
func (r *race) mustBreakFlows(t *testing.T) {
	t.Helper()
	for _, dialled := range r.dialled {
		r.w.ingress(t, r.place, udp(r.client, dialled))
	}
	for _, e := range r.w.entries(t) {
		if e.flow.Role == maps.FlowToClient {
			r.w.delete(t, e)
		}
	}
}

// runOn runs a datagram of each pair on a CPU.
func (r *race) runOn(cpu int, had *outcomes) error {
	if err := stayOn(cpu); err != nil {
		return err
	}
	for n, dialled := range r.dialled {
		var err error
		if had[n].to, had[n].took, err = r.runOne(udp(r.client, dialled).with(fmt.Sprint("cpu ", cpu)), int64(2*(n+1))); err != nil {
			return err
		}
	}

	return nil
}

// stayOn has the goroutine, and the thread that ends with it, stay on a CPU.
func stayOn(cpu int) error {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("affinity: %w", err)
	}

	return nil
}

// runOne runs a packet as soon as the other CPU is there, and returns the addresses that it leaves with, and how
// long that took.
func (r *race) runOne(in packet, both int64) (to string, took time.Duration, err error) {
	between := ends{src: macOf(in.src.Addr()), dst: r.w.links[r.place.device].Attrs().HardwareAddr}
	if r.place.bridgePort {
		between.dst = r.w.links["br0"].Attrs().HardwareAddr
	}
	frame := r.w.bytes(r.place, in, between)
	context := skBuff{Ifindex: r.w.index(r.place.device)}
	options := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: &context}
	r.arrived.Add(1)
	for r.arrived.Load() < both {
	}
	begin := time.Now()
	_, err = r.program.Run(options)
	took = time.Since(begin)
	if err != nil {
		return "", 0, fmt.Errorf("run: %w", err)
	}
	l3, _ := skipLink(options.DataOut)
	d, ok := dissect(options.DataOut, l3)
	if !ok {
		return "", 0, fmt.Errorf("the program has left no packet: %x", options.DataOut)
	}

	return fmt.Sprintf("%x %x", d.addrs, options.DataOut[d.transport:d.transport+4]), took, nil
}

// mustCPUs returns the first n CPUs of this process.
func mustCPUs(t *testing.T, n int) []int {
	t.Helper()
	var set unix.CPUSet
	lab.Must(t, unix.SchedGetaffinity(0, &set))
	var cpus []int
	for cpu := 0; cpu < 64*len(set) && len(cpus) < n; cpu++ {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) < n {
		t.Skipf("this machine has fewer than %d CPUs", n)
	}

	return cpus
}

// forgetDatagrams deletes all flows that are unanswered.
func (w *world) forgetDatagrams(t *testing.T) {
	t.Helper()
	for _, e := range w.entries(t) {
		lab.Must(t, w.maps.Unanswered.Delete(e.key))
	}
}

// beginning is struct beginning of lib/beginning.h.
type beginning struct {
	Lock   uint32
	Client uint32
	Since  uint64
}

// A CPU that has begun a flow, and never comes back, holds up datagrams of that client for a moment only.
func TestFlowThatIsBegunForEver(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
		begun := mustMapOf(t, w.programs(t, p).Ingress, "sl_beginnings")
		in := udp(p.client, clusterIP)
		w.ingress(t, p, in) // shows which place is that of the client
		w.forgetDatagrams(t)
		for _, age := range []time.Duration{0, time.Minute} {
			mustBegin(t, begun, now(t)-uint64(age))
			o := w.ingress(t, p, in)
			o.ends(verdictNext, maps.ReasonTranslated)
			w.holds(t, 4, true)
			w.forgetDatagrams(t)
		}
		t.Cleanup(func() { mustBegin(t, begun, 0) })
		mustBegin(t, begun, now(t)+uint64(time.Hour)) // never too long ago
		begin := time.Now()
		w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
		if took := time.Since(begin); took > time.Second {
			t.Errorf("the datagram has waited for %v", took)
		}
	})
}

// mustBegin has a CPU begin the flow of each client that has one in m, or had.
func mustBegin(t *testing.T, m *ebpf.Map, since uint64) {
	t.Helper()
	var found int
	for place := range m.MaxEntries() {
		var value beginning
		lab.Must(t, m.Lookup(place, &value))
		if value.Client == 0 {
			continue
		}
		found++
		value.Since = since
		lab.Must(t, m.Put(place, value))
	}
	if found == 0 {
		t.Fatal("no flow was begun")
	}
}

// mustMapOf returns a map of a program.
func mustMapOf(t *testing.T, program *ebpf.Program, name string) *ebpf.Map {
	t.Helper()
	info, err := program.Info()
	lab.Must(t, err)
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		lab.Must(t, err)
		if about, err := m.Info(); err == nil && about.Name == name {
			t.Cleanup(func() { lab.Must(t, m.Close()) })

			return m
		}
		lab.Must(t, m.Close())
	}
	t.Fatalf("the program has no map %s", name)

	return nil
}
