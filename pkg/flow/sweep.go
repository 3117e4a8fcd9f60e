package flow

import (
	"errors"
	"fmt"
	"hash/maphash"
	stdmaps "maps"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Config is what a [Sweeper] needs.
type Config struct {
	Maps     *maps.Pinned // the caller closes them
	Timeouts Timeouts
	Now      func() uint64 // nil: [maps.Now]
}

// Sweeper ends flows. Only one may exist on a node, because evictions are computed from what it
// deletes. It has no locks; one goroutine owns it.
type Sweeper struct {
	maps     *maps.Pinned
	tables   []table
	timeouts Timeouts
	now      func() uint64
	room     int64 // capacity of the map flows

	deleted      struct{ flows, halfOpen uint64 } // entries
	took         time.Duration                    // duration of the last sweep
	more         bool                             // the last sweep left idle flows
	originalDsts OriginalDsts                     // of the flows in the last sweep
	bytes        uncountedBytes
	lost         struct{ flows, halfOpen evictions }
	alarms       struct{ flows, halfOpen alarm }
	status       Status
}

// New returns a Sweeper.
func New(cfg Config) (*Sweeper, error) {
	if cfg.Maps == nil {
		return nil, errors.New("flow: no maps")
	}
	if cfg.Now == nil {
		cfg.Now = maps.Now
	}
	room, err := cfg.Maps.FlowsRoom()
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	counts, err := cfg.Maps.FlowCounts()
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	s := &Sweeper{
		maps:     cfg.Maps,
		tables:   tablesOf(cfg.Maps),
		timeouts: cfg.Timeouts.orDefault(),
		now:      cfg.Now,
		room:     int64(room),
	}
	s.status.setCounts(counts)

	return s, nil
}

// maxBatch is how many flows are ended before the tables are read again. It bounds
// what a sweep holds in memory, and how long it takes.
const maxBatch = 1 << 14

// The interval between sweeps, and the least multiple of the duration of a sweep that it is.
const (
	sweepInterval     = 10 * time.Second
	emergencyInterval = time.Second
	restFactor        = 20
)

// Next returns how long after the last sweep the next one is due.
func (s *Sweeper) Next() time.Duration {
	interval := sweepInterval
	if s.more || s.alarms.flows.on {
		interval = emergencyInterval
	}

	return max(interval, restFactor*s.took)
}

// OriginalDsts are the original destinations of all flows.
type OriginalDsts struct {
	Addrs map[maps.Addr]struct{}
	Begin time.Time // of the scan: younger flows may be missing
}

// OriginalDsts returns those of the flows in the last sweep. The caller may keep the result. Flows that the
// sweep ended are included, so that no address is given up of which a packet has just kept a flow.
func (s *Sweeper) OriginalDsts() OriginalDsts { return s.originalDsts }

// Sweep ends flows that have been idle for too long, clears cells of the source filter whose flows are
// gone, repairs counters, and updates the status. After an error the status is that of the sweep before.
func (s *Sweeper) Sweep() (Status, error) {
	begin := time.Now()
	defer func() { s.took = time.Since(begin) }()
	timeouts := s.timeouts.at(s.status.Flows.Percent())
	if s.alarms.flows.on {
		timeouts = timeouts.inEmergency()
	}
	sources := s.maps.SourceFilter.Begin(s.now())
	if !sources.Idle() {
		if err := s.maps.WaitForPrograms(); err != nil {
			return s.status, fmt.Errorf("flows: %w", err)
		}
	}
	found, err := s.scan(timeouts, sources)
	if err != nil {
		return s.status, fmt.Errorf("flows: %w", err)
	}
	sources.End()
	s.updateStatus(found)
	s.repair(found)
	if err := s.expire(found, timeouts); err != nil {
		return s.status, fmt.Errorf("idle flows: %w", err)
	}
	s.originalDsts = OriginalDsts{Addrs: found.originalDsts, Begin: begin}
	if err := s.dropUnknownPorts(); err != nil {
		return s.status, err
	}

	return s.status, nil
}

// scanned is the result of reading all tables.
type scanned struct {
	at                  uint64
	before, after       maps.FlowCounts
	inFlows, inHalfOpen int
	opening             byKind             // in half_open, and in unanswered
	idle                map[maps.Flow]bool // identities of flows that may be idle
	more                bool               // there are more than maxBatch
	originalDsts        map[maps.Addr]struct{}
	loads               loads
	usage               usages
}

// scan reads all tables once, and changes nothing.
func (s *Sweeper) scan(timeouts Timeouts, sources maps.SourceSweep) (scanned, error) {
	st := scanned{at: s.now(), idle: make(map[maps.Flow]bool), originalDsts: make(map[maps.Addr]struct{})}
	var err error
	if st.before, err = s.maps.FlowCounts(); err != nil {
		return st, err
	}
	l := &st.loads
	*l = loads{
		before: make(map[uint32]int32), after: make(map[uint32]int32), found: make(map[uint32]int32),
		halfOpen: make(map[uint64]struct{}), seed: maphash.MakeSeed(),
	}
	for index, load := range s.maps.Loads.All() {
		if load.Flows != 0 {
			l.before[index] = load.Flows
		}
	}
	st.usage.before = s.readUsage()
	for _, t := range s.tables {
		for e, err := range t.All() {
			if err != nil {
				return st, err
			}
			sources.Keep(e.Key, &e.Value)
			st.add(t, &e.Value, timeouts)
			l.add(t, e.Key, &e.Value)
		}
	}
	for _, known := range []map[uint32]int32{l.before, l.found} {
		for index := range known {
			l.after[index] = s.maps.Loads.Get(index).Flows
		}
	}
	st.usage.after = s.readUsage()
	st.after, err = s.maps.FlowCounts()

	return st, err
}

func (st *scanned) add(t table, f *maps.Flow, timeouts Timeouts) {
	if t.halfOpen {
		st.inHalfOpen++
		st.opening[maps.FlowKind(f.Proto)]++
	} else {
		st.inFlows++
		st.usage.found[maps.FlowKind(f.Proto)]++
	}
	st.originalDsts[f.OriginalDst] = struct{}{}
	if since(f.LastSeen, st.at) <= timeouts.soonest(f, t.halfOpen)+refresh {
		return
	}
	if id := identity(*f); len(st.idle) < maxBatch || st.idle[id] {
		st.idle[id] = true
	} else {
		st.more = true
	}
}

// expire ends the flows in st.idle that are idle by the content of all their entries now.
func (s *Sweeper) expire(st scanned, timeouts Timeouts) error {
	for f := range st.idle {
		g, err := gather(s.tables, f)
		if err != nil {
			return err
		}
		if len(g.entries) == 0 || since(g.lastSeen(), st.at) <= timeouts.of(&g)+refresh {
			continue // ended meanwhile, or in use
		}
		counted, err := s.remove(&g)
		if counted {
			s.maps.Loads.AddFlows(g.flow.BackendId, -1)
		}
		if err != nil {
			return err
		}
		s.status.Expired++
	}
	s.more = st.more

	return nil
}

// remove deletes the entries of a flow. It reports whether the load of its backend included the
// flow.
func (s *Sweeper) remove(g *group) (counted bool, err error) {
	for _, e := range g.entries {
		was, err := e.table.Remove(e.key)
		if err != nil {
			return counted, err
		}
		if !was {
			continue
		}
		if e.table.halfOpen {
			s.deleted.halfOpen++
		} else {
			s.deleted.flows++
			s.maps.FlowUsage.Add(maps.FlowKind(e.key.Proto), -1)
		}
		s.bytes.add(&e.value)
		counted = counted || isCounted(&e.value)
	}

	return counted, nil
}

// Bytes is what the clients of a service port have sent and received.
type Bytes struct {
	Sent, Received uint64
}

// uncountedBytes are the bytes of flows that the Sweeper has ended, by service port id, which programs
// had not counted yet.
type uncountedBytes struct {
	mu     sync.Mutex
	byPort map[uint32]Bytes
}

// add adds the uncounted bytes of an entry that is deleted.
func (t *uncountedBytes) add(f *maps.Flow) {
	if f.Bytes == 0 || f.Flags&maps.FlowResteered != 0 { // its socket counts them
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byPort == nil {
		t.byPort = make(map[uint32]Bytes)
	}
	b := t.byPort[f.ServicePortId]
	if f.Role == maps.FlowFromClient {
		b.Sent += f.Bytes
	} else {
		b.Received += f.Bytes
	}
	t.byPort[f.ServicePortId] = b
}

// Bytes returns what the flows that this Sweeper has ended had sent and received since programs last
// counted it, by service port id: [maps.Stats] does not include it. Ids that no longer exist are
// dropped from time to time. Any goroutine may call it.
func (s *Sweeper) Bytes() map[uint32]Bytes {
	s.bytes.mu.Lock()
	defer s.bytes.mu.Unlock()

	return stdmaps.Clone(s.bytes.byPort)
}

// manyPorts is the number of ids from which on dropUnknownPorts checks them.
const manyPorts = 4096

// dropUnknownPorts drops the bytes of service port ids that no longer exist.
func (s *Sweeper) dropUnknownPorts() error {
	known := s.Bytes()
	if len(known) < manyPorts {
		return nil
	}
	for id := range known {
		_, ok, err := s.maps.ServicePorts.Lookup(id)
		if err != nil {
			return err
		}
		if !ok {
			s.bytes.mu.Lock()
			delete(s.bytes.byPort, id)
			s.bytes.mu.Unlock()
		}
	}

	return nil
}
