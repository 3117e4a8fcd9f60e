package bpf

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/test/lab"
)

// simulation is connections of clients to the backends of one pool, in simulated time: testdata/heal.c
// picks and judges as the programs do.
type simulation struct {
	t       testing.TB
	program *ebpf.Program
	tables  maps.Tables
	random  *rand.Rand

	pool     uint32
	backends []uint32 // ids
	now      time.Duration
	events   events

	// behave returns what a backend does with a segment that a client sends it now. The default is
	// to answer after a millisecond.
	behave func(backend, client int) behaviour

	picks    []pick
	failures map[int]int
}

// behaviour is what happens to the first segment of a connection.
type behaviour struct {
	lost, refused bool
	after         time.Duration // of the answer
}

// pick is a new connection.
type pick struct {
	at              time.Duration
	backend, client int
	probe           bool
}

// event is something that happens at a time of the simulation.
type event struct {
	at time.Duration
	do func()
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]

	return last
}

// newSimulation returns a simulation of a pool with n backends, which begins an hour after boot.
func newSimulation(t testing.TB, n int, settings maps.Pool) *simulation {
	t.Helper()
	m := mapstest.MustCreate(t, nil)
	spec, err := loadHeal()
	lab.Must(t, err)
	lab.Must(t, spec.Variables[healVarConfigHeal].Set(true))
	programs, err := newLoader(m).load(spec)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, closePrograms(programs)) })
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	s := &simulation{
		t: t, program: programs[healProgHealStep], tables: m.Tables, random: rand.New(rand.NewPCG(seed, 0)), now: time.Hour,
		behave:   func(int, int) behaviour { return behaviour{after: time.Millisecond} },
		failures: make(map[int]int),
	}
	hand := mapstest.New(m.Tables)
	settings.ServicePortId, err = hand.ServicePort()
	lab.Must(t, err)
	var addrs []netip.AddrPort
	for i := range n {
		addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80))
		id, err := hand.Backend(settings.ServicePortId, addrs[i], 0)
		lab.Must(t, err)
		s.backends = append(s.backends, id)
	}
	var table []uint32
	if maps.Hashes(settings.Algorithm) {
		for _, i := range maglev.Table(addrs, maglev.DefaultSize) {
			table = append(table, s.backends[i])
		}
	}
	s.pool, err = hand.Pool(settings, s.backends, table)
	lab.Must(t, err)

	return s
}

// step runs the program.
func (s *simulation) step(op healStepOp, backend, client int, cause maps.HealthCause, begun time.Duration) uint32 {
	s.t.Helper()
	in := healStep{
		Now: uint64(s.now), Op: uint32(op), PoolId: s.pool, Client: uint32(client + 1), Cause: uint32(cause), Seed: s.random.Uint32(), Begun: uint64(begun),
	}
	if backend >= 0 {
		in.BackendId = s.backends[backend]
	}

	return s.runStep(in)
}

// pick returns the id of the backend that a new connection of a hash gets.
func (s *simulation) pick(seed uint32) uint32 {
	s.t.Helper()

	return s.runStep(healStep{Now: uint64(s.now), Op: uint32(healStepOpSTEP_PICK), PoolId: s.pool, Client: 1, Seed: seed})
}

func (s *simulation) runStep(in healStep) uint32 {
	s.t.Helper()
	var data bytes.Buffer
	lab.Must(s.t, binary.Write(&data, binary.NativeEndian, in))
	got, err := s.program.Run(&ebpf.RunOptions{Data: data.Bytes()})
	lab.Must(s.t, err)

	return got
}

func (s *simulation) after(d time.Duration, do func()) {
	heap.Push(&s.events, event{s.now + d, do})
}

// health returns the health of a backend.
func (s *simulation) health(backend int) maps.BackendHealth {
	h, _ := s.tables.HealthOf(s.backends[backend])

	return h
}

// suspects returns how many backends are suspects.
func (s *simulation) suspects() int {
	n := 0
	for i := range s.backends {
		if s.health(i).IsSuspect() {
			n++
		}
	}

	return n
}

// connect begins a connection, whose first segment is sent again after one and three seconds.
func (s *simulation) connect(client int) {
	before := make([]maps.BackendHealth, len(s.backends))
	for i := range s.backends {
		before[i] = s.health(i)
	}
	suspects := s.suspects()
	backend := slices.Index(s.backends, s.step(healStepOpSTEP_PICK, -1, client, 0, 0))
	if backend < 0 {
		s.t.Fatalf("at %v, client %d gets no backend", s.now, client)
	}
	had := before[backend]
	probe := had.IsSuspect() && uint64(s.now) >= had.Until
	s.picks = append(s.picks, pick{s.now, backend, client, probe})
	if had.IsSuspect() && !probe && 2*suspects <= len(s.backends) {
		s.t.Errorf("at %v, backend %d gets a connection, although it is passed over until %v", s.now, backend, time.Duration(had.Until))
	}
	for i := range s.backends {
		if passed := s.health(i).PassedOver - before[i].PassedOver; passed > 0 && (2*suspects > len(s.backends) || len(s.backends) == 1) {
			s.t.Errorf("at %v, backend %d is passed over, although %d of %d are suspects", s.now, i, suspects, len(s.backends))
		}
		if h := s.health(i); h.IsSuspect() {
			if pause := time.Duration(h.Until) - s.now; pause > time.Minute {
				s.t.Errorf("at %v, backend %d is passed over for %v more", s.now, i, pause)
			}
		}
	}
	s.send(backend, client, 0, s.now)
}

// send sends the first segment of a connection that began at a time, for the n-th time.
func (s *simulation) send(backend, client, n int, begun time.Duration) {
	done := func(op healStepOp, cause maps.HealthCause) func() {
		return func() { s.step(op, backend, client, cause, begun) }
	}
	switch b := s.behave(backend, client); {
	case b.refused:
		s.failures[backend]++
		s.after(time.Millisecond, done(healStepOpSTEP_FAILURE, maps.HealthRefused))
	case !b.lost:
		s.after(b.after, done(healStepOpSTEP_SUCCESS, 0))
	case n == 2:
		s.failures[backend]++
	default:
		s.after(time.Second<<n, func() {
			s.step(healStepOpSTEP_RETRANSMIT, backend, client, 0, begun)
			s.send(backend, client, n+1, begun)
		})
	}
}

// run makes connections of random clients at a rate per second for a while.
func (s *simulation) run(d time.Duration, rate float64, clients int) {
	s.t.Helper()
	var next func()
	next = func() {
		s.connect(s.random.IntN(clients))
		s.after(time.Duration(s.random.ExpFloat64()/rate*float64(time.Second)), next)
	}
	s.after(0, next)
	s.runEvents(d)
}

// runEvents does what happens in a while, and drops what would be later.
func (s *simulation) runEvents(d time.Duration) {
	end := s.now + d
	for len(s.events) > 0 && s.events[0].at < end {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
	}
	s.now, s.events = end, nil
}

// last returns when a backend got its last connection that was no probe.
func (s *simulation) last(backend int) time.Duration {
	for _, p := range slices.Backward(s.picks) {
		if p.backend == backend && !p.probe {
			return p.at
		}
	}

	return 0
}

// shares returns how many connections each backend got since a time.
func (s *simulation) shares(since time.Duration) []int {
	shares := make([]int, len(s.backends))
	for _, p := range s.picks {
		if p.at >= since {
			shares[p.backend]++
		}
	}

	return shares
}

// algorithms are all of them, by name.
var algorithms = map[string]uint8{
	"random": maps.AlgorithmRandom, "rr": maps.AlgorithmRR, "lc": maps.AlgorithmLC, "sed": maps.AlgorithmSED, "nq": maps.AlgorithmNQ,
	"sh": maps.AlgorithmSH, "dh": maps.AlgorithmDH, "maglev": maps.AlgorithmMaglev,
}

// A dead backend gets no new connections within a second, by any algorithm, and then only probes,
// in growing intervals. When it works again it is used like the others.
func TestHealDead(t *testing.T) {
	for name, algorithm := range algorithms {
		t.Run(name, func(t *testing.T) {
			s := newSimulation(t, 10, maps.Pool{Algorithm: algorithm})
			s.run(2*time.Second, 1000, 50)
			died := s.now
			s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend == 3, after: time.Millisecond} }
			s.run(20*time.Second, 500, 50)
			if h := s.health(3); !h.IsSuspect() || h.Episodes != 1 || maps.HealthCause(h.Cause) != maps.HealthUnanswered {
				t.Errorf("it is %+v", h)
			}
			if last := s.last(3) - died; last > time.Second {
				t.Errorf("it got its last connection %v after it died", last)
			}
			probes := 0
			for _, p := range s.picks {
				if p.backend == 3 && p.probe {
					probes++
				}
			}
			if probes < 2 || probes > 6 {
				t.Errorf("it got %d probes", probes)
			}
			for i, share := range s.shares(died + time.Second) {
				if i != 3 && (share < 400 || share > 2400) {
					t.Errorf("backend %d got %d of the connections, which are some 9,500", i, share)
				}
			}
			s.behave = func(int, int) behaviour { return behaviour{after: time.Millisecond} }
			s.run(70*time.Second, 100, 50)
			if s.suspects() > 0 {
				t.Error("it is still a suspect")
			}
			if share := s.shares(s.now - 10*time.Second)[3]; share < 40 {
				t.Errorf("it got %d of the last 1,000 connections", share)
			}
		})
	}
}

// What a suspect loses by a table goes to all others alike, and of each client always to the same one.
func TestHealSpreadsByTable(t *testing.T) {
	const n, suspect = 12, 3
	s := newSimulation(t, n, maps.Pool{Algorithm: maps.AlgorithmMaglev})
	pool := s.tables.Pools.Get(s.pool)
	lab.Must(t, s.tables.Health.Put(maps.Index(s.backends[suspect]), maps.BackendHealth{
		Id: s.backends[suspect], Suspected: uint64(s.now), Until: uint64(s.now + time.Hour), Level: 1,
	}))
	got, lost := make(map[uint32]int), 0
	for at := range pool.TableSize {
		if s.tables.Slots.Get(pool.TableBase+at) != s.backends[suspect] {
			continue
		}
		lost++
		seed := uint32((uint64(at)<<32 + 1<<31) / uint64(pool.TableSize)) // in the middle of the entry
		to := s.pick(seed)
		got[to]++
		if again := s.pick(seed); again != to {
			t.Fatalf("seed %#x gets backend %d, and then %d", seed, to, again)
		}
	}
	mean, chi := float64(lost)/(n-1), 0.0
	for i, id := range s.backends {
		if i != suspect {
			chi += (float64(got[id]) - mean) * (float64(got[id]) - mean) / mean
		}
	}
	const limit = 46.9 // of ten degrees of freedom, exceeded once in a million
	if got[s.backends[suspect]] > 0 || chi > limit {
		t.Errorf("of %d entries of a suspect, the others get %v (chi-square %.1f, want at most %.1f)", lost, got, chi, limit)
	}
}

// A backend that refuses is noticed after a few connections.
func TestHealRefuses(t *testing.T) {
	s := newSimulation(t, 10, maps.Pool{})
	s.run(time.Second, 1000, 50)
	s.behave = func(backend, _ int) behaviour { return behaviour{refused: backend == 0, after: time.Millisecond} }
	s.run(900*time.Millisecond, 1000, 50)
	// Four, and as many as come before the next one of a client that has reached another backend meanwhile: one
	// of 20 connections a second of each client does. And perhaps a probe.
	if n := s.failures[0]; n > 16 {
		t.Errorf("it refused %d connections", n)
	}
}

// Clients that reach nothing make no suspects, however much they connect, beside one that connects
// now and then: what they report is no evidence for it, even if it comes to a backend that has had
// no connection but theirs for long.
func TestHealBrokenClients(t *testing.T) {
	for _, broken := range []int{1, 2} {
		t.Run(fmt.Sprint(broken), func(t *testing.T) {
			s := newSimulation(t, 3, maps.Pool{})
			s.behave = func(_, client int) behaviour { return behaviour{lost: client > 0, after: time.Millisecond} }
			var seldom func()
			seldom = func() {
				s.connect(0)
				s.after(70*time.Millisecond, seldom)
			}
			var often func()
			often = func() {
				s.connect(1 + s.random.IntN(broken))
				s.after(5*time.Millisecond, often)
			}
			s.after(0, seldom)
			s.after(0, often)
			s.runEvents(60 * time.Second)
			for i := range s.backends {
				if h := s.health(i); h.Episodes > 0 {
					t.Errorf("backend %d was suspected of %q", i, maps.HealthCause(h.Cause))
				}
			}
		})
	}
}

// What works is not suspected: with a third of the packets lost to one backend, or to all of them;
// with answers that are slow; and with a client that reaches nothing.
func TestHealNoFalseSuspicion(t *testing.T) {
	const broken = 7
	for _, test := range []struct {
		name    string
		rate    float64
		clients int
		behave  func(s *simulation, backend, client int) behaviour
	}{
		{"30 % of the packets to one backend lost", 1000, 50, func(s *simulation, backend, _ int) behaviour {
			return behaviour{lost: backend == 2 && s.random.Float64() < 0.3, after: time.Millisecond}
		}},
		{"30 % of all packets lost", 300, 50, func(s *simulation, _, _ int) behaviour {
			return behaviour{lost: s.random.Float64() < 0.3, after: time.Millisecond}
		}},
		{"few connections, with 30 % of all packets lost", 10, 5, func(s *simulation, _, _ int) behaviour {
			return behaviour{lost: s.random.Float64() < 0.3, after: time.Millisecond}
		}},
		{"slow answers, in a burst", 1000, 50, func(s *simulation, _, _ int) behaviour {
			return behaviour{after: 20*time.Millisecond + time.Duration(s.random.IntN(100))*time.Millisecond}
		}},
		{"answers that are suddenly slow", 1000, 50, func(s *simulation, _, _ int) behaviour {
			if s.now.Truncate(time.Second)%(2*time.Second) == 0 {
				return behaviour{after: 350*time.Millisecond + time.Duration(s.random.IntN(20))*time.Millisecond}
			}

			return behaviour{after: time.Millisecond}
		}},
		{"a client that reaches nothing", 200, 8, func(_ *simulation, _, client int) behaviour {
			return behaviour{lost: client == broken, after: time.Millisecond}
		}},
		{"half of the clients refused by all", 300, 8, func(_ *simulation, _, client int) behaviour {
			return behaviour{refused: client < 4, after: time.Millisecond}
		}},
		{"a client that does not reach one backend, beside another one", 200, 2, func(_ *simulation, backend, client int) behaviour {
			return behaviour{lost: client == 0 && backend == 0, after: time.Millisecond}
		}},
		{"only a client that reaches nothing", 100, 1, func(*simulation, int, int) behaviour { return behaviour{lost: true} }},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSimulation(t, 10, maps.Pool{})
			// The same random numbers each time: of a thousand others, one makes a backend lose as much
			// as one that is dead.
			s.random = rand.New(rand.NewPCG(1, 1))
			s.behave = func(backend, client int) behaviour { return test.behave(s, backend, client) }
			s.run(30*time.Second, test.rate, test.clients)
			for i := range s.backends {
				if h := s.health(i); h.Episodes > 0 {
					t.Errorf("backend %d was suspected of %q", i, maps.HealthCause(h.Cause))
				}
			}
		})
	}
}

// exchange has a client send the first datagram of a socket. The backend answers it with a chance.
func (s *simulation) exchange(client int, answered float64) {
	backend := slices.Index(s.backends, s.step(healStepOpSTEP_PICK, -1, client, 0, 0))
	begun := s.now
	switch b := s.behave(backend, client); {
	case b.refused:
		s.after(time.Millisecond, func() { s.step(healStepOpSTEP_FAILURE, backend, client, maps.HealthRefused, begun) })
	case !b.lost && s.random.Float64() < answered:
		s.after(time.Millisecond, func() { s.step(healStepOpSTEP_DATAGRAM, backend, client, 0, begun) })
	}
}

// exchanges has random clients begin exchanges of datagrams at a rate per second for a while.
func (s *simulation) exchanges(d time.Duration, rate float64, clients int, answered float64) {
	var next func()
	next = func() {
		s.exchange(s.random.IntN(clients), answered)
		s.after(time.Duration(s.random.ExpFloat64()/rate*float64(time.Second)), next)
	}
	s.after(0, next)
	s.runEvents(d)
}

// Datagrams that want no answer, beside some that get one (RADIUS, SIP, QUIC), make no suspects once it is known how
// seldom backends of the port answer. One that has died is noticed.
func TestHealSeldomAnswered(t *testing.T) {
	for _, test := range []struct {
		rate     float64
		clients  int
		answered float64
		within   time.Duration // a dead one is noticed
	}{
		{600, 10, 1, time.Second}, {600, 10, 0.5, 2 * time.Second}, {600, 10, 0.05, 20 * time.Second}, {600, 1, 0.05, 20 * time.Second},
		{3000, 50, 0.01, 20 * time.Second}, {600, 10, 0.001, 0}, {30, 10, 0.01, 0},
	} {
		t.Run(fmt.Sprintf("%v a second of %d clients, %v %% answered", test.rate, test.clients, 100*test.answered), func(t *testing.T) {
			s := newSimulation(t, 3, maps.Pool{})
			passed := func() (n int) {
				for i := range s.backends {
					n += int(s.health(i).PassedOver)
				}

				return n
			}
			known := max(30*time.Second, time.Duration(60/(test.rate*test.answered)*float64(time.Second))) // by 60 answers
			s.exchanges(known, test.rate, test.clients, test.answered)
			before, suspects := passed(), s.suspects()
			s.exchanges(60*time.Second, test.rate, test.clients, test.answered)
			if n := passed() - before; float64(n) > 0.005*60*test.rate || test.answered > 0.1 && n+suspects > 0 {
				t.Errorf("of %v exchanges, %d passed over a backend, and %d backends were suspects before", 60*test.rate, n, suspects)
			}
			if test.within == 0 {
				return
			}
			s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend == 1} }
			s.exchanges(test.within, test.rate, test.clients, test.answered)
			if h := s.health(1); !h.IsSuspect() {
				t.Errorf("%v after it has died, a backend is %+v", test.within, h)
			}
		})
	}
}

// A backend whose datagrams get no answer, while all others' do, stays a suspect for as long as that lasts.
func TestHealDatagramsOfDead(t *testing.T) {
	for name, dead := range map[string]behaviour{"lost": {lost: true}, "refused": {refused: true}} {
		for _, rate := range []float64{10, 100} {
			t.Run(fmt.Sprintf("%s, %v a second", name, rate), func(t *testing.T) {
				s := newSimulation(t, 3, maps.Pool{})
				s.exchanges(10*time.Second, rate, 10, 1)
				s.behave = func(backend, _ int) behaviour {
					if backend == 1 {
						return dead
					}

					return behaviour{}
				}
				s.exchanges(20*time.Second, rate, 10, 1)
				before := s.health(1)
				if !before.IsSuspect() {
					t.Fatalf("after 20 s, it is %+v", before)
				}
				s.exchanges(3*time.Minute, rate, 10, 1)
				if h := s.health(1); h.Suspected != before.Suspected {
					t.Errorf("it was a suspect since %v, and is now %+v", time.Duration(before.Suspected), h)
				}
			})
		}
	}
}

// The end of an outage does not make its silence usual: backends that remain dead stay suspects, and one that dies
// again is noticed as before.
func TestHealDatagramsAfterOutage(t *testing.T) {
	for _, test := range []struct {
		backends int
		rate     float64
	}{{2, 10}, {2, 100}, {4, 10}, {4, 100}} {
		t.Run(fmt.Sprintf("two of %d backends, %v a second", test.backends, test.rate), func(t *testing.T) {
			s := newSimulation(t, test.backends, maps.Pool{})
			s.exchanges(10*time.Second, test.rate, 10, 1)
			s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend < 2} }
			s.exchanges(90*time.Second, test.rate, 10, 1)
			remains := s.health(0)
			if !remains.IsSuspect() || !s.health(1).IsSuspect() {
				t.Fatalf("they are %+v and %+v", remains, s.health(1))
			}
			s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend == 0} }
			for s.health(1).IsSuspect() && s.now < 2*time.Hour {
				s.exchanges(time.Second, test.rate, 10, 1)
			}
			s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend < 2} }
			// It gets 60 exchanges, and more where these take less than a second.
			s.exchanges(time.Second+time.Duration(60*float64(test.backends-1)/test.rate*float64(time.Second)), test.rate, 10, 1)
			if h := s.health(1); !h.IsSuspect() {
				t.Errorf("one that has died again is %+v", h)
			}
			s.exchanges(2*time.Minute, test.rate, 10, 1)
			if h := s.health(0); h.Suspected != remains.Suspected {
				t.Errorf("the one that remained dead was a suspect since %v, and is %+v", time.Duration(remains.Suspected), h)
			}
		})
	}
}

// A silence counts from the begin of the connections that show it, also if their first segments are
// sent again soon: backends of a Service that was idle may take 150 ms for their first answers.
func TestHealSegmentsSentAgainSoon(t *testing.T) {
	s := newSimulation(t, 10, maps.Pool{})
	s.step(healStepOpSTEP_SUCCESS, 0, 0, 0, s.now)
	s.now += 3 * time.Second
	begun := s.now
	for client := range 7 {
		s.step(healStepOpSTEP_SUCCESS, 1, client, 0, begun+20*time.Millisecond)
	}
	s.now += 66 * time.Millisecond
	for client := range 7 {
		s.step(healStepOpSTEP_RETRANSMIT, 0, client, 0, begun)
	}
	if h := s.health(0); h.Evidence < 20 || h.IsSuspect() || time.Duration(h.Unanswered) != begun {
		t.Errorf("after 66 ms it is %+v", h)
	}
	s.now = begun + 250*time.Millisecond
	s.step(healStepOpSTEP_RETRANSMIT, 0, 0, 0, begun)
	if h := s.health(0); !h.IsSuspect() || maps.HealthCause(h.Cause) != maps.HealthRetransmit {
		t.Errorf("after 250 ms it is %+v", h)
	}
}

// If all backends stop, none is passed over for long; the one of a Service never is.
func TestHealFailsOpen(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10} {
		t.Run(fmt.Sprintf("with %d backends", n), func(t *testing.T) {
			s := newSimulation(t, n, maps.Pool{})
			s.run(time.Second, 500, 50)
			s.behave = func(int, int) behaviour { return behaviour{lost: true} }
			s.run(2*time.Second, 500, 50)
			from := s.now
			s.run(5*time.Second, 500, 50)
			for i, share := range s.shares(from) {
				if share < 2500/n/2 {
					t.Errorf("backend %d got %d of 2,500 connections", i, share)
				}
			}
			s.behave = func(int, int) behaviour { return behaviour{after: time.Millisecond} }
			s.run(time.Second, 500, 50)
			if s.suspects() > 0 {
				t.Errorf("when they work again, %d are suspects", s.suspects())
			}
		})
	}
}

// Of many backends, those of one rollout are side by side, and may fail together: all of them are passed over if they are
// less than half, and none if they are more.
func TestHealManyNeighbours(t *testing.T) {
	for _, of := range [][2]int{{120, 256}, {136, 256}, {55, 127}, {72, 127}} {
		suspects, n := of[0], of[1]
		t.Run(fmt.Sprintf("%d of %d", suspects, n), func(t *testing.T) {
			s := newSimulation(t, n, maps.Pool{})
			for _, id := range s.backends[:suspects] {
				lab.Must(t, s.tables.Health.Put(maps.Index(id), maps.BackendHealth{
					Id: id, Suspected: uint64(s.now), Until: uint64(s.now + time.Hour), Level: 1,
				}))
			}
			chosen := 0
			for range 2000 {
				if slices.Index(s.backends, s.pick(s.random.Uint32())) < suspects {
					chosen++
				}
			}
			passed := 0
			for i := range suspects {
				passed += int(s.health(i).PassedOver)
			}
			if few := 2*suspects < n; few && chosen > 0 || !few && passed > 0 {
				t.Errorf("suspects got %d connections, and were passed over %d times", chosen, passed)
			}
		})
	}
}

// A node with one client pod notices a dead backend, too, because the client reaches the others.
func TestHealOneClient(t *testing.T) {
	s := newSimulation(t, 4, maps.Pool{})
	s.run(time.Second, 200, 1)
	died := s.now
	s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend == 1, after: time.Millisecond} }
	s.run(10*time.Second, 200, 1)
	if last := s.last(1) - died; last > 1500*time.Millisecond {
		t.Errorf("it got its last connection %v after it died", last)
	}
}

// A client moves away from a backend that it has affinity to only while that is a suspect.
func TestHealAffinity(t *testing.T) {
	s := newSimulation(t, 5, maps.Pool{AffinitySeconds: 3600})
	s.run(2*time.Second, 500, 50)
	had := make(map[int]int)
	for _, p := range s.picks {
		had[p.client] = p.backend
	}
	died := s.now
	s.behave = func(backend, _ int) behaviour { return behaviour{lost: backend == had[0], after: time.Millisecond} }
	s.run(10*time.Second, 500, 50)
	for _, p := range s.picks {
		if had[p.client] != had[0] && p.backend != had[p.client] {
			t.Fatalf("client %d moved from backend %d, which works, to %d", p.client, had[p.client], p.backend)
		}
	}
	if last := s.last(had[0]) - died; last > time.Second {
		t.Errorf("it got its last connection %v after it died", last)
	}
}

// Backends die, come back, flap, lose packets and slow down at random, for a long time: connect
// checks at each step that no more than half are passed over, that a suspect only gets probes, and
// that no pause is longer than a minute. Once all work, none remains a suspect.
func TestHealAtRandom(t *testing.T) {
	for _, n := range []int{2, 3, 7, 80} {
		t.Run(fmt.Sprintf("with %d backends", n), func(t *testing.T) {
			s := newSimulation(t, n, maps.Pool{Algorithm: uint8(rand.IntN(8))})
			type state struct {
				loss, refuse float64
				delay        time.Duration
			}
			states := make([]state, n)
			s.behave = func(backend, _ int) behaviour {
				b := states[backend]

				return behaviour{lost: s.random.Float64() < b.loss, refused: s.random.Float64() < b.refuse, after: time.Millisecond + b.delay}
			}
			for range 60 {
				b := &states[s.random.IntN(n)]
				switch s.random.IntN(6) {
				case 0:
					*b = state{loss: 1}
				case 1:
					*b = state{refuse: 1}
				case 2:
					*b = state{loss: s.random.Float64()}
				case 3:
					*b = state{delay: time.Duration(s.random.IntN(3000)) * time.Millisecond}
				default:
					*b = state{}
				}
				s.run(time.Duration(s.random.IntN(2000))*time.Millisecond, 20+300*s.random.Float64(), 1+s.random.IntN(40))
			}
			clear(states)
			s.run(62*time.Second, 5*float64(n), 40)
			s.run(4*time.Second, 40*float64(n), 40)
			if got := s.suspects(); got > 0 {
				t.Errorf("%d backends are suspects, although all work", got)
			}
		})
	}
}

// At devices, a first packet that is sent again and a refusal speak against the backend, once each
// wherever the flow passes, and an answer clears it.
func TestHealAtDevices(t *testing.T) {
	type shown struct {
		evidence uint16
		refusals uint16
		answered bool
	}
	for _, backend := range []string{portPod, remotePod} { // the second is masqueraded
		t.Run("to "+backend, func(t *testing.T) {
			each(t, []place{uplink, podVeth, turning}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, layers.IPProtocolTCP, backend)
				id := w.flowOf(t, p.client, clusterIP).BackendId
				check := func(when string, want shown) {
					t.Helper()
					h, _ := w.maps.HealthOf(id)
					if got := (shown{h.Evidence, h.Refusals, h.Answered != 0}); got != want {
						t.Errorf("%s: %+v, want %+v", when, got, want)
					}
				}
				answers := func(c *conversation, in packet) {
					t.Helper()
					if c.masqueradedPort != 0 && !c.isTurned() {
						c.leaves(t, first(c.proto, c.place.client, clusterIP))
						c.returns(t, in)
					}
					c.hears(t, in)
				}
				age := func(d time.Duration) {
					t.Helper()
					for _, e := range w.entries(t) {
						e.flow.Created -= uint64(d)
						e.flow.LastSeen -= uint64(d)
						w.put(t, e)
					}
				}
				age(-time.Hour)
				c.first(t, maps.ReasonFlow)
				check("after a duplicate of the first packet", shown{})
				age(time.Hour + time.Second)
				c.first(t, maps.ReasonFlow)
				check("after it was sent again", shown{evidence: 3})
				if c.masqueradedPort == 0 {
					c.sendsElsewhere(t, tcp(stranger, stranger, "R.").acks(5))
				} else {
					if !c.isTurned() {
						c.leaves(t, first(c.proto, c.place.client, clusterIP))
					}
					c.returns(t, tcp(stranger, stranger, "R.").acks(5))
				}
				check("after a refusal of another connection", shown{evidence: 3})
				answers(c, tcp(stranger, stranger, "R."))
				check("after a refusal", shown{evidence: 3, refusals: 1})

				again := begin(t, w, p, layers.IPProtocolTCP, backend)
				id = w.flowOf(t, p.client, clusterIP).BackendId
				again.first(t, maps.ReasonFlow)
				answers(again, tcp(stranger, stranger, "S."))
				check("after an answer", shown{answered: true})
				again.says(t, tcp(stranger, stranger, "."))
				again.hears(t, tcp(stranger, stranger, "R."))
				check("after the end of a connection", shown{answered: true})

				from := p
				from.client = strings.Replace(p.client, ":40000", ":40001", 1)
				datagram := begin(t, w, from, layers.IPProtocolUDP, backend)
				id = w.flowOf(t, from.client, clusterIP).BackendId
				answers(datagram, udp(stranger, stranger))
				check("after a datagram", shown{answered: true})
			}, func(c *DeviceConfig) { c.Heal = true })
		})
	}
}
