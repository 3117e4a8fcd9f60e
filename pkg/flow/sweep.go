package flow

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Config is what a [Sweeper] needs.
type Config struct {
	Maps     *maps.Pinned // stay the caller's
	Timeouts Timeouts
	Now      func() uint64 // nil: [Now]
}

// Sweeper ends flows. There is one at a time, of the one agent of a node: it
// counts what it deletes. It has no locks; one goroutine owns it.
type Sweeper struct {
	maps     *maps.Pinned
	tables   []table
	timeouts Timeouts
	now      func() uint64
	room     int64 // for entries in flows

	deleted struct{ flows, halfOpen uint64 } // entries
	took    time.Duration                    // the last sweep
	more    bool                             // it left idle flows
	dialled Dialled                          // by the flows of the last sweep
	bytes   tallies
	lost    struct{ flows, halfOpen evictions }
	alarms  struct{ flows, halfOpen alarm }
	status  Status
	ended   Ended // by EndStale, in all
}

// New returns a Sweeper that has ended nothing yet.
func New(cfg Config) (*Sweeper, error) {
	if cfg.Maps == nil {
		return nil, errors.New("flow: no maps")
	}
	if cfg.Now == nil {
		cfg.Now = Now
	}
	room, err := cfg.Maps.FlowsRoom()
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}

	return &Sweeper{
		maps:     cfg.Maps,
		tables:   tablesOf(cfg.Maps),
		timeouts: cfg.Timeouts.orDefault(),
		now:      cfg.Now,
		room:     int64(room),
	}, nil
}

// atOnce is how many flows are ended before the tables are read again. It bounds
// what a sweep holds in memory, and how long it takes.
const atOnce = 1 << 14

// How soon the next sweep is due, and how much longer than one sweep takes.
const (
	usualPace   = 10 * time.Second
	hurriedPace = time.Second
	minRest     = 20
)

// Next returns how long after the last sweep the next one is due.
func (s *Sweeper) Next() time.Duration {
	pace := usualPace
	if s.more || s.alarms.flows.on {
		pace = hurriedPace
	}

	return max(pace, minRest*s.took)
}

// Dialled is what flows have dialled, by a look at all of them.
type Dialled struct {
	Addrs map[maps.Addr]struct{}
	Begin time.Time // of the look: younger flows may be missing
}

// Dialled returns what the flows have dialled that the last sweep has found. The
// caller may keep it. Those that the sweep ended are among them, so that no
// address is given up for which a packet has saved its flow in the last moment.
func (s *Sweeper) Dialled() Dialled { return s.dialled }

// Sweep ends flows that have been idle for too long, clears what the source filter has of
// flows that are gone, and takes stock. After an error the status says what was known before.
func (s *Sweeper) Sweep() (Status, error) {
	begin := time.Now()
	defer func() { s.took = time.Since(begin) }()
	timeouts := s.timeouts.at(s.status.Flows.Percent())
	if s.alarms.flows.on {
		timeouts = timeouts.hurried()
	}
	sources := s.maps.SourceFilter.Begin(s.now())
	if !sources.Idle() {
		if err := s.maps.WaitForPrograms(); err != nil {
			return s.status, fmt.Errorf("flows: %w", err)
		}
	}
	stock, err := s.scan(timeouts, sources)
	if err != nil {
		return s.status, fmt.Errorf("flows: %w", err)
	}
	sources.End()
	s.takeStock(stock)
	s.repairLoads(stock)
	s.repairUsage(stock)
	if err := s.expire(stock, timeouts); err != nil {
		return s.status, fmt.Errorf("idle flows: %w", err)
	}
	s.dialled = Dialled{Addrs: stock.dialled, Begin: begin}
	if err := s.forgetTallies(); err != nil {
		return s.status, err
	}

	return s.status, nil
}

// stock is what was found in the tables.
type stock struct {
	at                  uint64
	before, after       maps.FlowCounts
	inFlows, inHalfOpen int
	opening             byKind             // in half_open, and in unanswered
	idle                map[maps.Flow]bool // the identities of flows that may be over
	more                bool               // there were more of them
	dialled             map[maps.Addr]struct{}
	loads               loads
	usage               usages
}

// scan reads all tables once, and changes nothing.
func (s *Sweeper) scan(timeouts Timeouts, sources maps.SourceSweep) (stock, error) {
	st := stock{at: s.now(), idle: make(map[maps.Flow]bool), dialled: make(map[maps.Addr]struct{})}
	var err error
	if st.before, err = s.maps.FlowCounts(); err != nil {
		return st, err
	}
	st.loads = s.readLoads()
	st.usage.before = s.readUsage()
	for _, t := range s.tables {
		for e, err := range t.All() {
			if err != nil {
				return st, err
			}
			sources.Keep(e.Key, e.Value.Role)
			st.add(t, &e.Value, timeouts)
			st.loads.add(t, e.Key, &e.Value)
		}
	}
	s.readLoadsAgain(&st.loads)
	st.usage.after = s.readUsage()
	st.after, err = s.maps.FlowCounts()

	return st, err
}

func (st *stock) add(t table, f *maps.Flow, timeouts Timeouts) {
	if t.halfOpen {
		st.inHalfOpen++
		st.opening[maps.FlowKind(f.Proto)]++
	} else {
		st.inFlows++
		st.usage.found[maps.FlowKind(f.Proto)]++
	}
	st.dialled[f.Dialled] = struct{}{}
	if since(f.LastSeen, st.at) <= timeouts.soonest(f, t.halfOpen)+refresh {
		return
	}
	if id := identity(*f); len(st.idle) < atOnce || st.idle[id] {
		st.idle[id] = true
	} else {
		st.more = true
	}
}

// expire ends the flows that are over by what all their entries say now.
func (s *Sweeper) expire(st stock, timeouts Timeouts) error {
	for f := range st.idle {
		g, err := gather(s.tables, f)
		if err != nil {
			return err
		}
		if len(g.entries) == 0 || since(g.lastSeen(), st.at) <= timeouts.of(&g)+refresh {
			continue // ended by itself, or alive
		}
		if err := s.end(&g); err != nil {
			return err
		}
		s.status.Expired++
	}
	s.more = st.more

	return nil
}

// end deletes the entries of a flow, and takes it out of its backend's load.
func (s *Sweeper) end(g *group) error {
	counted, err := s.remove(g)
	if counted {
		s.maps.Loads.AddFlows(g.told.BackendId, -1)
	}

	return err
}

// remove deletes the entries of a flow, and says whether one of them had it in
// its backend's load.
func (s *Sweeper) remove(g *group) (counted bool, err error) {
	err = g.remove(func(e entry) {
		if e.table.halfOpen {
			s.deleted.halfOpen++
		} else {
			s.deleted.flows++
			s.maps.FlowUsage.Add(maps.FlowKind(e.key.Proto), -1)
		}
		s.bytes.add(&e.value)
		counted = counted || isCounted(&e.value)
	})

	return counted, err
}
