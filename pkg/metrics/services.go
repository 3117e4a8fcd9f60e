package metrics

import (
	"context"
	"errors"
	"iter"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Tables are the maps that say which Service an id belongs to.
type Tables struct {
	ServicePorts maps.Table[uint32, maps.ServicePort] // by frontend id
	Backends     maps.Table[uint32, maps.Backend]     // by backend id
	Loads        maps.Loads
}

// Stats is what programs have counted: [maps.Stats], or a test's.
type Stats interface {
	All() iter.Seq2[maps.Entry[maps.StatKey, uint64], error]
	Delete(maps.StatKey) error
}

// Bytes is what clients have sent and received.
type Bytes struct{ Sent, Received uint64 }

// ServicesConfig is what [Services] needs.
type ServicesConfig struct {
	Tables Tables
	Stats  Stats
	// Ended yields, by frontend id, what the clients of flows have sent and
	// received that the agent has ended, and programs had not counted yet. Counts
	// grow until the id is gone; nil: nobody ends flows.
	Ended func() iter.Seq2[uint32, Bytes]
	// Limit is how many Services have series of their own, at least 1. First
	// come, first served: a Service keeps its series while it exists, and one
	// that found none left stays among the others while it does. All others
	// share one series each, with an empty namespace.
	Limit int
	// Moved returns a number that changes whenever Tables do.
	Moved func() uint64
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
}

// Validate returns an error that names the field that cannot be used.
func (c ServicesConfig) Validate() error {
	switch {
	case c.Tables.ServicePorts == nil || c.Tables.Backends == nil || c.Tables.Loads == nil:
		return errors.New("metrics: Tables: a map is missing")
	case c.Stats == nil:
		return errors.New("metrics: Stats is nil")
	case c.Moved == nil:
		return errors.New("metrics: Moved is nil")
	case c.Limit < 1:
		return errors.New("metrics: Limit: no Service would have series")
	}

	return nil
}

// Services knows what the clients of each Service have done, by what programs
// have counted. It reads their maps when it is asked, though not all the time,
// and deletes what was counted for ids that are no more. Any goroutine may use it.
type Services struct {
	cfg ServicesConfig

	mu     sync.Mutex
	index  index
	moved  uint64 // as the index was built
	built  bool
	strays map[uint32]time.Time // ids in no map, and when that was found first
	read   time.Time
	ended  map[uint32]Bytes // that were added to the Services
	others tally            // of those Services without series that are gone
	count  int              // entries in the map of counts
}

const (
	// freshness is how old the counts are that a scrape may be given.
	freshness = 5 * time.Second
	// strayGrace is how long after an id is gone its counts are deleted. Programs
	// that have just looked it up have long ended then, and so has the reading of
	// maps that did not see an id which is new.
	strayGrace = 30 * time.Second
	// sweepInterval is how often stray counts are looked for, where nobody scrapes.
	sweepInterval = 10 * time.Minute
)

// NewServices reads the maps for the first time, and deletes what was counted for
// ids that are gone: call it before new ones are given out, which may be the same.
//
// What was counted before does not count. Not all that an earlier agent has shown
// is in the maps, and a counter that falls by a little is to Prometheus one that
// has come from zero to where it is.
func NewServices(cfg ServicesConfig) (*Services, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Ended == nil {
		cfg.Ended = func() iter.Seq2[uint32, Bytes] { return func(func(uint32, Bytes) bool) {} }
	}
	s := &Services{cfg: cfg, index: newIndex(cfg.Limit)}
	if err := s.refresh(cfg.Now(), 0); err != nil {
		return nil, err
	}
	for _, svc := range s.index.services {
		for _, c := range svc.sums {
			svc.base.add(c.what, -c.n)
		}
		svc.reset()
	}

	return s, nil
}

// Run deletes stray counts now and then, until ctx ends. What goes wrong is told
// to failed, nil once nothing does.
func (s *Services) Run(ctx context.Context, failed func(error)) error {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			failed(s.Sweep())
		}
	}
}

// Sweep reads the maps, and deletes the counts of ids that have been gone for long.
func (s *Services) Sweep() error {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.refresh(s.cfg.Now(), strayGrace)
}

// refresh reads the maps, and deletes the counts of ids that have been gone for
// longer than grace.
func (s *Services) refresh(now time.Time, grace time.Duration) error {
	s.read = time.Time{} // a sum of half the counts is shown to nobody
	if moved := s.cfg.Moved(); !s.built || moved != s.moved {
		s.built = false
		if err := s.index.rebuild(s.cfg.Tables); err != nil {
			return err
		}
		s.moved, s.built = moved, true
	}
	s.addEnded()
	if err := s.sum(now, grace); err != nil {
		return err
	}
	// What is gone keeps what was counted for it, as far as others show it.
	for _, svc := range s.index.gone {
		if !svc.own {
			s.others.addAll(svc.sums)
		}
	}
	s.index.forget()
	s.read = now

	return nil
}

// addEnded adds what is new of flows that the agent has ended.
func (s *Services) addEnded() {
	ended := make(map[uint32]Bytes)
	for id, b := range s.cfg.Ended() {
		ended[id] = b
		was := s.ended[id]
		if o, ok := s.index.owners[id]; ok && b != was {
			o.base.add(maps.StatBytesSent, b.Sent-was.Sent)
			o.base.add(maps.StatBytesReceived, b.Received-was.Received)
		}
	}
	s.ended = ended
}

// sum reads all counts, and deletes those of ids that have been gone for longer
// than grace. A Service that lives keeps what they came to.
func (s *Services) sum(now time.Time, grace time.Duration) error {
	for _, svc := range s.index.services {
		svc.reset()
	}
	for _, svc := range s.index.gone {
		svc.reset()
	}
	s.count = 0
	strays := make(map[uint32]time.Time)
	var over []maps.Entry[maps.StatKey, uint64] // deleted afterwards: that would upset the iteration
	for e, err := range s.cfg.Stats.All() {
		if err != nil {
			return err
		}
		s.count++
		id := e.Key.FrontendId
		o, owned := s.index.owners[id]
		if owned {
			o.sums.add(e.Key.What, e.Value)
		}
		if owned && s.index.has(o) {
			continue
		}
		since, known := s.strays[id]
		if !known {
			since = now
		}
		if now.Sub(since) >= grace {
			over = append(over, e)
		} else {
			strays[id] = since
		}
	}
	s.strays = strays

	return s.fold(over)
}

// fold deletes counts.
func (s *Services) fold(over []maps.Entry[maps.StatKey, uint64]) error {
	for _, e := range over {
		if err := s.cfg.Stats.Delete(e.Key); err != nil {
			return err
		}
		s.count--
		if o, ok := s.index.owners[e.Key.FrontendId]; ok {
			o.base.add(e.Key.What, e.Value)
		}
	}

	return nil
}

func (svc *service) reset() { svc.sums = append(svc.sums[:0], svc.base...) }

// live returns how many connections the Service's backends have.
func (svc *service) live(loads maps.Loads) int {
	n := 0
	for _, id := range svc.backends {
		n += max(0, loads.Load(id).Live())
	}

	return n
}
