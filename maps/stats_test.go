package maps

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustCount writes counts of every CPU, as programs do.
func mustCount(t *testing.T, p *Pinned, servicePortID uint32, c PortCounts) {
	t.Helper()
	m, at := p.Stats.counts.place(servicePortID)
	if m == nil {
		t.Fatalf("no room to count of service port %d", servicePortID)
	}
	perCPU := make([]PortCounts, ebpf.MustPossibleCPU())
	for cpu := range perCPU {
		perCPU[cpu] = c
	}
	lab.Must(t, m.Put(at, perCPU))
}

func mustStats(t *testing.T, p *Pinned) map[StatKey]uint64 {
	t.Helper()
	all := map[StatKey]uint64{}
	for e, err := range p.Stats.All() {
		lab.Must(t, err)
		if was, ok := all[e.Key]; ok {
			t.Errorf("%+v twice: %d and %d", e.Key, was, e.Value)
		}
		all[e.Key] = e.Value
	}

	return all
}

func TestStats(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	cpus := uint64(ebpf.MustPossibleCPU())
	if ended := p.Stats.Ended(); len(ended) != 0 {
		t.Errorf("ended before the first call: %v", ended)
	}
	refused, outOfRange := uint32(ReasonRejectNoBackend), uint32(ReasonDropSourceRange)
	web, far := ID(3, 1), ID(700, 2) // in another chunk
	p.Stats.measures = true
	for _, id := range []uint32{web, far} {
		lab.Must(t, p.Stats.Begin(id))
		lab.Must(t, p.ServicePorts.Put(id, ServicePortOf("shop", "web", "http", 6, 4)))
	}
	mustCount(t, p, web, PortCounts{Connections: 2, BytesSent: 10, BytesReceived: 100})
	mustCount(t, p, far, PortCounts{Connections: 5})
	m, at := p.Stats.handshakes.place(web)
	lab.Must(t, m.Put(at, Handshakes{Failed: 3, Buckets: [len(Handshakes{}.Buckets)]uint64{5: 4}}))
	for key, n := range map[RefusalKey]uint64{
		{ServicePortId: web, Reason: refused}: 7, {ServicePortId: web, Reason: outOfRange}: 8,
		{ServicePortId: far, Reason: outOfRange}: 9,
	} {
		lab.Must(t, p.Stats.refusals.Put(key, n))
	}
	want := map[StatKey]uint64{
		{web, uint32(ReasonTranslated)}: 2 * cpus, {web, StatBytesSent}: 10 * cpus, {web, StatBytesReceived}: 100 * cpus,
		{web, StatUnanswered}: 3, {web, StatHandshake + 5}: 4, {web, refused}: 7, {web, outOfRange}: 8,
		{far, uint32(ReasonTranslated)}: 5 * cpus, {far, outOfRange}: 9,
	}
	if diff := gocmp.Diff(want, mustStats(t, p)); diff != "" {
		t.Errorf("all (-want +have):\n%s", diff)
	}

	// The id of web is freed, and its place assigned to another service port.
	lab.Must(t, p.ServicePorts.Delete(web))
	lab.Must(t, p.Stats.End(web))
	maps.DeleteFunc(want, func(key StatKey, _ uint64) bool { return key.ServicePortId != web })
	if diff := gocmp.Diff(want, p.Stats.Ended()); diff != "" {
		t.Errorf("ended (-want +have):\n%s", diff)
	}
	if ended := p.Stats.Ended(); len(ended) != 0 {
		t.Errorf("ended again: %v", ended)
	}
	next := ID(3, 2)
	lab.Must(t, p.Stats.Begin(next))
	lab.Must(t, p.ServicePorts.Put(next, ServicePortOf("shop", "next", "http", 6, 4)))
	mustCount(t, p, next, PortCounts{Connections: 1}) // nothing of the handshakes before
	want = map[StatKey]uint64{
		{far, uint32(ReasonTranslated)}: 5 * cpus, {far, outOfRange}: 9, {next, uint32(ReasonTranslated)}: cpus,
	}
	if diff := gocmp.Diff(want, mustStats(t, p)); diff != "" {
		t.Errorf("after another service port got the place (-want +have):\n%s", diff)
	}
}

// Prune deletes refusals that a killed agent has left.
func TestPruneStats(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	lab.Must(t, p.ServicePorts.Put(1, ServicePortOf("shop", "web", "", 6, 4)))
	for _, id := range []uint32{1, ID(1, 1), 2} {
		lab.Must(t, p.Stats.refusals.Put(RefusalKey{ServicePortId: id, Reason: 6}, 7))
	}
	lab.Must(t, p.Stats.Prune())
	if diff := gocmp.Diff(map[StatKey]uint64{{1, 6}: 7}, mustStats(t, p)); diff != "" {
		t.Errorf("left (-want +have):\n%s", diff)
	}
	mustHave(t, p.Stats.refusals, RefusalKey{ServicePortId: AllServicePorts, Reason: 6}, 0)
}

// A service port without room for counts has none.
func TestStatsWithoutRoom(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	lab.Must(t, p.ServicePorts.Put(ID(5, 0), ServicePortOf("shop", "web", "", 6, 4)))
	if all := mustStats(t, p); len(all) != 0 {
		t.Errorf("%v, want none", all)
	}
}

// No more chunks than allowed are made or pinned.
func TestStatsGrowToTheEnd(t *testing.T) {
	root := lab.MustBPFRoot(t)
	p := mustCreate(t, root, small())
	before := p.Pins()
	if err := p.Stats.Begin(ID(uint32(MaxServicePorts), 0)); !errors.Is(err, ErrFull) {
		t.Errorf("beyond the last chunk: %v, want %v", err, ErrFull)
	}
	if diff := gocmp.Diff(before, p.Pins()); diff != "" {
		t.Errorf("pins (-before +after):\n%s", diff)
	}
	mustCreate(t, root, small())
}

// Counts start from zero in a place that programs have used before, whether an earlier agent has made the
// chunk, or the chunk is younger than its port.
func TestBeginAfterRestart(t *testing.T) {
	for _, withState := range []bool{true, false} {
		root := lab.MustBPFRoot(t)
		p := mustCreate(t, root, small())
		lab.Must(t, p.ServicePorts.Put(3, ServicePortOf("shop", "web", "http", 6, 4)))
		lab.Must(t, p.Stats.Begin(3))
		mustCount(t, p, 3, PortCounts{Connections: 2})
		lab.Must(t, p.Close())
		if !withState {
			lab.Must(t, os.RemoveAll(filepath.Join(root, StateVersion)))
		}
		p = mustCreate(t, root, small())
		mustCount(t, p, 3, PortCounts{Connections: 5})
		lab.Must(t, p.Stats.End(3))
		lab.Must(t, p.Stats.Begin(ID(3, 1)))
		if c, _, err := p.Stats.port(ID(3, 1)); err != nil || c != (PortCounts{}) {
			t.Errorf("with the state kept: %v: it begins with %+v, %v", withState, c, err)
		}
	}
}

func TestReserve(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	first := p.Stats.counts.inner.MaxEntries
	room := Room{Frontends: 5000, Pools: 1, Slots: 17000, Backends: 9000}.Plus(Room{ServicePorts: int(first) + 1})
	lab.Must(t, p.Tables.Reserve(room))
	have := Room{p.Frontends.Len(), p.Pools.Len(), p.Slots.Len(), p.Backends.Len(), int(first) * len(p.Stats.counts.chunks)}
	if want := (Room{8192, 4096, 32768, 12288, 512}); have != want {
		t.Errorf("there is room for %+v, want %+v", have, want)
	}
	if n := p.Loads.Len(); n != p.Backends.Len() {
		t.Errorf("%d loads for %d backends", n, p.Backends.Len())
	}

	err := p.Tables.Reserve(Room{Frontends: p.Frontends.Limit() + 1, Pools: 5000})
	if !errors.Is(err, ErrFull) || p.Pools.Len() != 8192 {
		t.Errorf("too much of one: %v, and room for %d pools; want %v, and all of the others", err, p.Pools.Len(), ErrFull)
	}
}
