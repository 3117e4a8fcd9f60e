package maps

import (
	"errors"
	"maps"
	"testing"

	"github.com/cilium/ebpf"
	gocmp "github.com/google/go-cmp/cmp"
)

// mustCount makes every CPU count what a program would.
func mustCount(t *testing.T, p *Pinned, servicePortID uint32, c PortCounts) {
	t.Helper()
	m, at := p.Stats.place(servicePortID)
	if m == nil {
		t.Fatalf("no room to count of service port %d", servicePortID)
	}
	perCPU := make([]PortCounts, ebpf.MustPossibleCPU())
	for cpu := range perCPU {
		perCPU[cpu] = c
	}
	if err := m.Put(at, perCPU); err != nil {
		t.Fatal(err)
	}
}

func mustStats(t *testing.T, p *Pinned) map[StatKey]uint64 {
	t.Helper()
	all := map[StatKey]uint64{}
	for e, err := range p.Stats.All() {
		if err != nil {
			t.Fatal(err)
		}
		if was, ok := all[e.Key]; ok {
			t.Errorf("%+v twice: %d and %d", e.Key, was, e.Value)
		}
		all[e.Key] = e.Value
	}

	return all
}

func TestStats(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	cpus := uint64(ebpf.MustPossibleCPU())
	if ended := p.Stats.Ended(); len(ended) != 0 {
		t.Errorf("ended before the first call: %v", ended)
	}
	refused, fenced := uint32(ReasonRejectNoBackend), uint32(ReasonDropSourceRange)
	web, far := ID(3, 1), ID(700, 2) // in another chunk
	for _, id := range []uint32{web, far} {
		if err := p.Stats.Begin(id); err != nil {
			t.Fatal(err)
		}
		if err := p.ServicePorts.Put(id, ServicePortOf("shop", "web", "http", 6, 4)); err != nil {
			t.Fatal(err)
		}
	}
	mustCount(t, p, web, PortCounts{Connections: 2, BytesSent: 10, BytesReceived: 100})
	mustCount(t, p, far, PortCounts{Connections: 5})
	for key, n := range map[RefusalKey]uint64{
		{ServicePortId: web, Reason: refused}: 7, {ServicePortId: web, Reason: fenced}: 8,
		{ServicePortId: far, Reason: fenced}: 9,
	} {
		if err := p.Stats.refusals.Put(key, n); err != nil {
			t.Fatal(err)
		}
	}
	want := map[StatKey]uint64{
		{web, uint32(ReasonTranslated)}: 2 * cpus, {web, StatBytesSent}: 10 * cpus, {web, StatBytesReceived}: 100 * cpus,
		{web, refused}: 7, {web, fenced}: 8,
		{far, uint32(ReasonTranslated)}: 5 * cpus, {far, fenced}: 9,
	}
	if diff := gocmp.Diff(want, mustStats(t, p)); diff != "" {
		t.Errorf("all (-want +have):\n%s", diff)
	}

	// The id of web is given back, and its place to another service port.
	if err := p.ServicePorts.Delete(web); err != nil {
		t.Fatal(err)
	}
	if err := p.Stats.End(web); err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(want, func(key StatKey, _ uint64) bool { return key.ServicePortId != web })
	if diff := gocmp.Diff(want, p.Stats.Ended()); diff != "" {
		t.Errorf("ended (-want +have):\n%s", diff)
	}
	if ended := p.Stats.Ended(); len(ended) != 0 {
		t.Errorf("ended again: %v", ended)
	}
	next := ID(3, 2)
	if err := p.Stats.Begin(next); err != nil {
		t.Fatal(err)
	}
	if err := p.ServicePorts.Put(next, ServicePortOf("shop", "next", "http", 6, 4)); err != nil {
		t.Fatal(err)
	}
	want = map[StatKey]uint64{{far, uint32(ReasonTranslated)}: 5 * cpus, {far, fenced}: 9}
	if diff := gocmp.Diff(want, mustStats(t, p)); diff != "" {
		t.Errorf("after another service port got the place (-want +have):\n%s", diff)
	}
}

// Refusals that an agent which was killed has left are forgotten.
func TestPruneStats(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	if err := p.ServicePorts.Put(1, ServicePortOf("shop", "web", "", 6, 4)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []uint32{1, ID(1, 1), 2} {
		if err := p.Stats.refusals.Put(RefusalKey{ServicePortId: id, Reason: 6}, 7); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Stats.Prune(); err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(map[StatKey]uint64{{1, 6}: 7}, mustStats(t, p)); diff != "" {
		t.Errorf("left (-want +have):\n%s", diff)
	}
}

// Stats of a service port for which there is no room yet are none.
func TestStatsWithoutRoom(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	if err := p.ServicePorts.Put(ID(5, 0), ServicePortOf("shop", "web", "", 6, 4)); err != nil {
		t.Fatal(err)
	}
	if all := mustStats(t, p); len(all) != 0 {
		t.Errorf("%v, want none", all)
	}
}

// There are as many chunks as can be, and no more are asked for, nor is one pinned that the
// next agent could not use.
func TestStatsGrowToTheEnd(t *testing.T) {
	root := mustRoot(t)
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
