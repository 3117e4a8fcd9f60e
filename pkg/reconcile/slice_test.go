package reconcile

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// While a Service with 50,000 frontends is published, switched or retired, a change of
// another one waits for one slice at most, and no Apply does much more than a slice.
func TestSlices(t *testing.T) {
	const slice = 500
	fakes := maps.NewFakes(1 << 20)
	operations := 0
	fakes.Observe(func(table, _ string) error {
		if table != maps.NameSlots {
			operations++
		}

		return nil
	}, nil)
	clock := newTestClock()
	r, err := New(Config{Tables: fakes.Tables, Now: clock.read, Slice: slice, TableSize: smallTable})
	lab.Must(t, err)
	apply := func() {
		t.Helper()
		operations = 0
		lab.Must(t, r.Apply())
		if operations > slice+10 {
			t.Fatalf("%d map operations, want %d at most", operations, slice)
		}
	}
	h := newHeavy(1, 0, 25_000, 2)
	other := lb.ServiceName{Namespace: "default", Name: "service-7"}
	for _, step := range []struct {
		name   string
		change func()
	}{
		{"published", func() {}},
		{"switched", h.moveEndpoint},
		{"retired", func() { h.ClusterIPs = nil }},
	} {
		step.change()
		r.Set(h.Name, time.Time{}, h.resolve())
		apply()
		_, res := clusterIP(7, 3, len(step.name))
		r.Set(other, time.Time{}, res)
		apply()
		apply()
		if status, _ := r.Status(other); !status.Programmed {
			t.Errorf("%s: the other Service waits for more than a slice", step.name)
		}
		rounds, paused := 0, 0
		heavy := r.services[h.Name]
		before := r.Counters().Writes[maps.NameFrontends].Puts
		for {
			if heavy.work != nil && heavy.worker != nil {
				paused++
			}
			next, ok := r.Next()
			if !ok && len(r.retirement.queue) == 0 {
				break
			}
			if ok && next.After(clock.now) {
				t.Fatalf("%s: nothing is due", step.name)
			}
			if r.Retired() && rounds%50 == 0 {
				r.BeginGrace()
			} else if rounds%50 == 20 {
				r.EndGrace()
				if rounds < 400 {
					_, res := clusterIP(7, 3, rounds/50%2)
					r.Set(other, time.Time{}, res)
					apply()
					apply()
					if status, _ := r.Status(other); !status.Programmed {
						t.Errorf("%s: the other Service waits for what is used again", step.name)
					}
				}
			}
			apply()
			rounds++
		}
		if paused == 0 {
			t.Errorf("%s: never cut short", step.name)
		}
		// Each frontend is written once: work that was cut short continues where it stopped.
		if puts := r.Counters().Writes[maps.NameFrontends].Puts - before; puts > 50_000+100 {
			t.Errorf("%s: %d writes to frontends", step.name, puts)
		}
		if status, _ := r.Status(h.Name); !status.Programmed || rounds < 50_000/slice {
			t.Errorf("%s: programmed is %v after %d slices", step.name, status.Programmed, rounds)
		}
	}
	if used := r.Counters().Fill[maps.NameFrontends].Used; used != 4 {
		t.Errorf("%d frontends are left, want 4", used)
	}
}

// What a Service wants while it is worked on is published next, the newest only. It does not make
// the work begin again, so that a large Service that changes all the time is written to its end.
func TestPlanOfMeanwhile(t *testing.T) {
	const frontends = 2000
	fakes, clock := maps.NewFakes(1<<16), newTestClock()
	r, err := New(Config{Tables: fakes.Tables, Now: clock.read, Slice: 100, TableSize: smallTable})
	lab.Must(t, err)
	h := newHeavy(1, 0, frontends/2, 2)
	for _, change := range []func(){func() {}, h.moveEndpoint, h.moveEndpoint, h.moveEndpoint} {
		change()
		r.Set(h.Name, time.Time{}, h.resolve())
		for mustApply(t, r); len(fakes.FrontendIDs.Entries) < 100; {
			mustApply(t, r)
		}
		if r.Programmed(h.Name) {
			t.Error("it is programmed before its last plan is")
		}
	}
	applyAll(t, r, clock)
	if !r.Programmed(h.Name) {
		t.Error("it is not programmed")
	}
	w := r.Counters().Writes
	if backends := w[maps.NameBackends].Puts; backends != 3 {
		t.Errorf("%d backends were written, want the two of the first plan and one of the last", backends)
	}
	if puts := w[maps.NameFrontends].Puts; puts < 2*frontends || puts > 2*frontends+100 {
		t.Errorf("%d writes to frontends, want two for each of %d", puts, frontends)
	}
	want := h.Slices[0].Endpoints[0].Addr.String()
	for key, id := range fakes.FrontendIDs.Entries {
		v := fakes.Pools.Get(fakes.Frontends.Get(id).PoolId)
		if key.Port == 0 {
			continue
		}
		var have []string
		for i := range v.SlotCount {
			b := fakes.Tables.Backends.Get(maps.Index(fakes.Slots.Get(v.SlotBase + i)))
			have = append(have, b.Addr.IP().String())
		}
		if len(have) != 2 || !slices.Contains(have, want) {
			t.Fatalf("%s leads to %v, want %v among them", modelKey(key), have, want)
		}
	}
}

// However many Services take several slices at a time, no coroutine is left of them but one.
func TestWorkersEnd(t *testing.T) {
	const services = 20
	fakes, clock := maps.NewFakes(1<<16), newTestClock()
	r, err := New(Config{Tables: fakes.Tables, Now: clock.read, Slice: 100, TableSize: smallTable})
	lab.Must(t, err)
	before := runtime.NumGoroutine()
	for i := range services {
		h := newHeavy(400, 0, 0, 2)
		r.Set(lb.ServiceName{Namespace: "default", Name: fmt.Sprint(i)}, time.Time{}, h.resolve())
	}
	most := 0
	for r.due.Len() > 0 {
		mustApply(t, r)
		most = max(most, runtime.NumGoroutine()-before)
	}
	if most < services/2 {
		t.Errorf("only %d Services were worked on at a time", most)
	}
	if left := runtime.NumGoroutine() - before; left > 1 {
		t.Errorf("%d goroutines are left", left)
	}
}

// No Set and no Apply does more than a slice, whatever the Service and its change are: not in the
// maps, not in the slots, which take no system call, and not in claims, which write nothing.
func TestPiecesAreSmall(t *testing.T) {
	const slice = 100
	for _, test := range []struct {
		name                          string
		ports, externalIPs, endpoints int
		algorithm                     lb.Algorithm
	}{
		{"many addresses", 1, 10_000, 2, lb.Random},
		{"many ports", 5000, 0, 2, lb.Random},
		{"many endpoints", 1, 0, 30_000, lb.Random},
		{"a large table", 1, 0, 5000, lb.Maglev},
	} {
		t.Run(test.name, func(t *testing.T) {
			fakes, clock := maps.NewFakes(1<<20), newTestClock()
			r, err := New(Config{Tables: fakes.Tables, Now: clock.read, Slice: slice, TableSize: smallTable})
			lab.Must(t, err)
			var operations, slots, claims int
			fakes.Observe(func(table, _ string) error {
				if table == maps.NameSlots {
					slots++
				} else {
					operations++
				}

				return nil
			}, nil)
			moved := r.claims.Moved
			r.claims.Moved = func(s *lb.Claimant, number int, owns bool) {
				claims++
				moved(s, number, owns)
			}
			most := 0
			piece := func(do func()) {
				t.Helper()
				operations, slots, claims = 0, 0, 0
				do()
				// An operation takes as long as 64 writes to slots, or three changes of claims.
				units := 64*operations + slots + 22*claims
				if most = max(most, units); units > 64*(slice+20) {
					t.Fatalf("%d map operations, %d slots and %d claims in one piece", operations, slots, claims)
				}
			}
			pieces := 0
			finish := func() {
				t.Helper()
				for at, ok := r.Next(); ok || r.Retired(); at, ok = r.Next() {
					if ok && at.After(clock.now) {
						t.Fatal("something failed")
					}
					if !ok {
						r.BeginGrace()
						r.EndGrace()
					}
					piece(func() { mustApply(t, r) })
					pieces++
				}
			}
			h := newHeavy(test.ports, 0, test.externalIPs, test.endpoints)
			h.Algorithm = test.algorithm
			for _, change := range []func(){
				func() {},
				h.moveEndpoint,
				h.moveEndpoints,
				func() { h.ExternalIPs = h.ExternalIPs[:len(h.ExternalIPs)/2] },
			} {
				change()
				planned := PlanOf(h.resolve(), nil)
				piece(func() { r.SetPlanned(h.Name, time.Time{}, planned) })
				finish()
				if status, _ := r.Status(h.Name); !status.Programmed {
					t.Errorf("status %+v, want programmed", status)
				}
			}
			piece(func() { r.Delete(h.Name) })
			finish()
			if found, err := r.Drift(false); len(found) > 0 || err != nil {
				t.Errorf("drift %v, %v", found, err)
			}
			if n := len(fakes.FrontendIDs.Entries); n > 0 || most < 64*slice/2 {
				t.Errorf("%d frontends are left; the largest piece took %d units", n, most)
			}
			t.Log(pieces, "pieces")
		})
	}
}

// If entering the claims of a plan panics, the Service keeps its state, and so do all others.
func TestPanicInClaims(t *testing.T) {
	fakes, clock := maps.NewFakes(1000), newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	name, res := clusterIP(1, 3, 0)
	r.Set(name, time.Time{}, res)
	mustApply(t, r)
	before := len(fakes.FrontendIDs.Entries)

	moved, panics := r.claims.Moved, true
	r.claims.Moved = func(s *lb.Claimant, number int, owns bool) {
		if panics && number == 1 && owns {
			panic("a bug")
		}
		moved(s, number, owns)
	}
	res.Frontends[0].Key.Port, res.Frontends[1].Key.Port = 81, 81
	r.Set(name, time.Time{}, res)
	for range 3 {
		if err := r.Apply(); err == nil || !strings.Contains(err.Error(), "service default/service-1: ") || !strings.Contains(err.Error(), "a bug") {
			t.Errorf("Apply: %v, want the panic with the Service", err)
		}
		clock.pass(time.Minute)
	}
	if n := len(fakes.FrontendIDs.Entries); n != before {
		t.Errorf("%d frontends are in the maps, want the %d of before", n, before)
	}
	for key := range fakes.FrontendIDs.Entries {
		if r.claims.Owner(key) == nil {
			t.Errorf("%s is claimed no more", modelKey(key))
		}
	}
	panics = false
	applyAll(t, r, clock)
	if status, _ := r.Status(name); !status.Programmed || len(fakes.FrontendIDs.Entries) != before {
		t.Errorf("status %+v, want programmed", status)
	}
	if found, err := r.Drift(false); len(found) > 0 || err != nil {
		t.Errorf("drift %v, %v", found, err)
	}
}

// A panic is a failure of the Service for which it occurs, and of no other one.
func TestPanic(t *testing.T) {
	fakes := maps.NewFakes(1000)
	clock := newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	bad, res := clusterIP(1, 3, 0)
	good, fine := clusterIP(2, 3, 0)
	panics := true
	fakes.FrontendIDs.Fail = func(string, string) error {
		if panics && len(fakes.FrontendIDs.Entries) == 1 {
			panics = false
			panic("a bug")
		}

		return nil
	}
	r.Set(bad, time.Time{}, res)
	r.Set(good, time.Time{}, fine)
	err := r.Apply()
	if err == nil || !strings.Contains(err.Error(), "service default/service-1: ") ||
		!strings.Contains(err.Error(), "panic: a bug") || !strings.Contains(err.Error(), "publishFrontend") {
		t.Errorf("Apply: %v, want the panic with Service and stack", err)
	}
	if status, _ := r.Status(good); !status.Programmed {
		t.Error("the other Service is not programmed")
	}
	if status, _ := r.Status(bad); status.Programmed || len(status.Failures) != 1 {
		t.Errorf("status %+v, want one failure", status)
	}
	panics = true
	clock.pass(time.Second)
	if err := r.Apply(); err != nil {
		t.Errorf("Apply, later: %v", err)
	}
	applyAll(t, r, clock)
	if status, _ := r.Status(bad); !status.Programmed {
		t.Errorf("status %+v, want programmed", status)
	}
	if found, err := r.Drift(false); len(found) > 0 || err != nil {
		t.Errorf("drift %v, %v", found, err)
	}
}

// A Service whose plan cannot be rebuilt keeps its state until it can.
func TestPanicWhenPlannedAgain(t *testing.T) {
	fakes, clock := maps.NewFakes(1000), newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	_, res := clusterIP(1, 3, 0)
	_, others := clusterIP(1, 3, 1)
	winner, loser := lb.ServiceName{Namespace: "default", Name: "winner"}, lb.ServiceName{Namespace: "default", Name: "loser"}
	fails := true
	r.Set(winner, time.Unix(1, 0), res)
	others.Frontends = append(others.Frontends, others.Frontends[0]) // one that is its own
	others.Frontends[len(others.Frontends)-1].Key.Port = 81
	r.SetPlanned(loser, time.Unix(2, 0), PlanOf(others, func() lb.Resolution {
		if fails {
			panic("a bug")
		}

		return others
	}))
	mustApply(t, r)
	applyAll(t, r, clock)

	r.Delete(winner)
	if err := r.Apply(); err == nil || !strings.Contains(err.Error(), "service default/loser: internal error: panic: a bug") {
		t.Errorf("Apply: %v, want the panic with Service", err)
	}
	if status, _ := r.Status(loser); status.Programmed || len(status.Failures) != 1 {
		t.Errorf("status %+v, want one failure", status)
	}
	own := keyOf(others.Frontends[len(others.Frontends)-1].Key)
	if _, there := fakes.FrontendIDs.Entries[own]; !there {
		t.Error("the Service has lost a frontend that is its own")
	}
	fails = false
	clock.pass(time.Second)
	mustApply(t, r)
	applyAll(t, r, clock)
	if n := len(fakes.FrontendIDs.Entries); n != 5 {
		t.Errorf("there are %d frontends, want 5", n)
	}
	if status, _ := r.Status(loser); !status.Programmed {
		t.Errorf("status %+v, want programmed", status)
	}
}

// Where there is no room for another pool, backends that are gone are taken out of the existing pool:
// after each store it is sorted, and has no backends that it did not have before.
func TestTakeOut(t *testing.T) {
	for _, algorithm := range []lb.Algorithm{lb.Random, lb.Maglev} {
		for gone := range 1 << 5 {
			fakes := maps.NewFakes(200)
			r := mustNew(t, fakes.Tables, newTestClock())
			name, res := clusterIP(1, 5, 0)
			for i := range res.Frontends {
				res.Frontends[i].Algorithm = algorithm
			}
			r.Set(name, time.Time{}, res)
			mustApply(t, r)
			fakes.Slots.SetLimit(r.spans.used + 1)
			id := fakes.Tables.Frontends.Get(1).PoolId
			before := []uint32{1, 2, 3, 4, 5}
			fakes.Observe(nil, func(table, _ string) {
				v := fakes.Pools.Get(id)
				var members []uint32
				for i := range v.SlotCount {
					members = append(members, fakes.Slots.Get(v.SlotBase+i))
				}
				if !slices.IsSorted(members) || slices.ContainsFunc(members, func(id uint32) bool { return !holds(before, id) }) {
					t.Errorf("gone %05b: members %v", gone, members)
				}
			})
			stay := slices.Clone(res.Frontends[0].Backends)
			var endpoints []lb.EndpointState
			for i := len(stay) - 1; i >= 0; i-- {
				if gone>>i&1 != 0 {
					stay = slices.Delete(stay, i, i+1)
				} else {
					endpoints = append(endpoints, res.Endpoints[i])
				}
			}
			res.Frontends[0].Backends, res.Frontends[1].Backends, res.Endpoints = stay, stay, endpoints
			r.Set(name, time.Time{}, res)
			if err := r.Apply(); gone != 0 && len(stay) > 0 && algorithm == lb.Maglev && !errors.Is(err, maps.ErrFull) {
				t.Errorf("gone %05b: %v, want a full map", gone, err)
			}
			v := fakes.Pools.Get(fakes.Tables.Frontends.Get(1).PoolId)
			if int(v.SlotCount) != len(stay) {
				t.Errorf("gone %05b: %d backends, want %d", gone, v.SlotCount, len(stay))
			}
			for _, s := range []span{{v.SlotBase, v.SlotCount}, {v.TableBase, v.TableSize}} {
				for i := range s.count {
					b := fakes.Tables.Backends.Get(maps.Index(fakes.Slots.Get(s.base + i)))
					if !slices.ContainsFunc(stay, func(want lb.Backend) bool { return want.Addr == b.AddrPort() }) {
						t.Fatalf("gone %05b: slot %d leads to %s", gone, s.base+i, b.AddrPort())
					}
				}
			}
			graces(r)
			if used := r.Counters().Fill[maps.NameBackends].Used; used != len(stay) {
				t.Errorf("gone %05b: %d backends are left, want %d", gone, used, len(stay))
			}
		}
	}
}

// A Service of which a backend was taken out without room for another pool is programmed: it is not
// tried again.
func TestTakenOutIsAsPlanned(t *testing.T) {
	fakes, clock := maps.NewFakes(200), newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	name, res := clusterIP(1, 5, 0)
	r.Set(name, time.Time{}, res)
	mustApply(t, r)
	fakes.Slots.SetLimit(r.spans.used + 1)
	stay := res.Frontends[0].Backends[1:]
	res.Frontends[0].Backends, res.Frontends[1].Backends, res.Endpoints = stay, stay, res.Endpoints[1:]
	r.Set(name, time.Time{}, res)
	if err := r.Apply(); !errors.Is(err, maps.ErrFull) {
		t.Errorf("%v, want %v", err, maps.ErrFull)
	}
	clock.pass(2 * time.Second)
	mustApply(t, r)
	if status, ok := r.Status(name); !ok || !status.Programmed {
		t.Errorf("status %+v, want that it is programmed", status)
	}
}

func TestPlaces(t *testing.T) {
	busy := map[uint32]bool{}
	p := places{
		what: "things", limit: func() int { return 5 }, next: 1, generations: []uint8{0}, spare: 1,
		busy: func(place uint32) bool { return busy[place] },
	}
	mustTake := func(want uint32) {
		t.Helper()
		place, err := p.take()
		if got := p.id(place); got != want || err != nil {
			t.Fatalf("took %d of generation %d, %v, want %d", maps.Index(got), maps.Generation(got), err, want)
		}
	}
	mustTake(1)
	mustTake(2)
	p.give(1)
	mustTake(3) // 1 is the spare one
	p.give(2)
	busy[1] = true
	mustTake(maps.ID(2, 1))
	mustTake(4)
	if _, err := p.take(); !errors.Is(err, maps.ErrFull) {
		t.Errorf("took one that is busy: %v", err)
	}
	busy[1] = false
	mustTake(maps.ID(1, 1))
	for range 255 {
		p.give(1)
		if _, err := p.take(); err != nil {
			t.Fatal(err)
		}
	}
	if id := p.id(1); id != 1 {
		t.Errorf("after 256 generations, the id is %d", id)
	}
}

// Places that are reclaimed in any order are not allocated twice, and places that come and go leave nothing behind.
func TestReclaimedPlaces(t *testing.T) {
	const n = 100_000
	p := places{what: "things", limit: func() int { return n + 1 }, next: 1, generations: []uint8{0}}
	ids := make([]uint32, n)
	for i := range ids {
		place, err := p.take()
		lab.Must(t, err)
		ids[i] = p.id(place)
	}
	for _, id := range ids {
		p.give(maps.Index(id))
	}
	for _, id := range slices.Backward(ids[1:]) {
		p.reclaim(id)
	}
	for range 1000 {
		p.give(maps.Index(ids[1]))
		p.reclaim(ids[1])
	}
	p.give(maps.Index(ids[2]))
	if place, err := p.take(); place != maps.Index(ids[0]) || err != nil {
		t.Errorf("took %d, %v, want the first that is free, %d", place, err, maps.Index(ids[0]))
	}
	if id := p.id(maps.Index(ids[1])); id != ids[1] {
		t.Errorf("the reclaimed id is %d, want %d", id, ids[1])
	}
	if place, err := p.take(); place != maps.Index(ids[2]) || err != nil {
		t.Errorf("took %d, %v, want %d, which was given back again", place, err, maps.Index(ids[2]))
	}
	if _, err := p.take(); !errors.Is(err, maps.ErrFull) || p.used != n {
		t.Errorf("with %d of %d in use: %v, want %v", p.used, n, err, maps.ErrFull)
	}
	if len(p.free) > 2 || p.voids != 0 && len(p.free) == 0 {
		t.Errorf("%d entries are left, %d of them void", len(p.free), p.voids)
	}
}

// A new agent does not assign an id to another backend.
func TestGenerationsOutliveTheAgent(t *testing.T) {
	fakes := maps.NewFakes(1000)
	clock := newTestClock()
	seen := make(map[uint32]lb.Backend)
	for generation := range 20 {
		r := mustNew(t, fakes.Tables, clock)
		mustApply(t, r)
		graces(r)
		r.backendPlaces.spare = 0
		name, res := clusterIP(1, 1, generation)
		r.Set(name, time.Time{}, res)
		r.Prune()
		mustApply(t, r)
		graces(r)
		for _, v := range fakes.Tables.Backends.All() {
			want := res.Frontends[0].Backends[0]
			if was, again := seen[v.Id]; v.Id != 0 && again && was != want {
				t.Fatalf("agent %d: backend %d is %s and was %s", generation, v.Id, want.Addr, was.Addr)
			}
			seen[v.Id] = want
		}
	}
	for id := range seen {
		if maps.Index(id) > 3 {
			t.Errorf("backend %d: places are not used again", id)
		}
	}
}
