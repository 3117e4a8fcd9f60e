package metrics

import (
	"context"
	"errors"
	"iter"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
)

// Stats reads the counts of programs: [maps.Stats], or a fake in tests.
type Stats interface {
	// All yields the counts of the service ports that the maps have.
	All() iter.Seq2[maps.Entry[maps.StatKey, uint64], error]
	// Ended returns the last counts of ids that were released since the last call.
	Ended() map[maps.StatKey]uint64
	// Prune removes the counts of ids that an earlier agent has left.
	Prune() error
}

// ServicesConfig configures [Services].
type ServicesConfig struct {
	Tables maps.Tables // by which ids belong to Services
	Stats  Stats
	// Ended returns, by service port id, the bytes of flows that the agent has ended, as
	// far as programs had not counted them. They grow until the id is gone. Services keeps
	// the result. It may be nil.
	Ended func() map[uint32]flow.Bytes
	// Limit is how many Services have series of their own, at least 1. First
	// come, first served: a Service keeps its series while it exists. The others
	// share one series of each metric, with an empty namespace, while they exist.
	Limit int
	// Moved returns a number that changes whenever Tables change.
	Moved func() uint64
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
}

// Validate returns an error that names the field that cannot be used.
func (c ServicesConfig) Validate() error {
	switch {
	case c.Tables.ServicePorts == nil || c.Tables.Backends == nil || c.Tables.Loads.Array == nil:
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

// Services has the metrics of each Service, from the counts of programs. It reads their
// maps at a scrape, unless it has read them just before. Any goroutine may use it.
type Services struct {
	cfg ServicesConfig

	mu     sync.Mutex
	index  index
	moved  uint64 // when the index was built
	built  bool
	counts map[uint32]counts // of each id that is not released, as last read
	read   time.Time
	ended  map[uint32]flow.Bytes // that were added to the Services
	others counts                // of Services without series that are gone
	count  int                   // of entries of refusals, as last read
}

const (
	// freshness is how old the counts of a scrape may be.
	freshness = 5 * time.Second
	// sweepInterval is the time between reads of the counts where no one scrapes.
	sweepInterval = 10 * time.Minute
)

// NewServices reads the maps for the first time. It must be called before ids are assigned
// or released.
//
// Everything begins at zero, and earlier counts are left out. The maps do not have everything
// that an earlier agent has shown, and Prometheus takes a counter that has fallen a little for
// one that was reset and has grown to its value since.
func NewServices(cfg ServicesConfig) (*Services, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Ended == nil {
		cfg.Ended = func() map[uint32]flow.Bytes { return nil }
	}
	s := &Services{cfg: cfg, index: newIndex(cfg.Limit), counts: make(map[uint32]counts)}
	if err := cfg.Stats.Prune(); err != nil {
		return nil, err
	}
	if err := s.refresh(cfg.Now()); err != nil {
		return nil, err
	}
	for _, svc := range s.index.services {
		svc.sums.clear()
	}
	s.others = nil

	return s, nil
}

// Run reads the counts at intervals until ctx ends. It calls failed with each error, or
// nil.
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

// Sweep reads the maps, so that the counts of released ids need not be kept.
func (s *Services) Sweep() error {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.refresh(s.cfg.Now())
}

// refresh reads the maps.
func (s *Services) refresh(now time.Time) error {
	s.read = time.Time{} // after a failed read, some sums are older than others: the next scrape tries again
	if moved := s.cfg.Moved(); !s.built || moved != s.moved {
		s.built = false
		if err := s.index.rebuild(s.cfg.Tables); err != nil {
			return err
		}
		s.moved, s.built = moved, true
	}
	s.addEnded()
	if err := s.sum(); err != nil {
		return err
	}
	// The counts of Services that are gone remain among the others if they were there.
	for _, svc := range s.index.gone {
		if !svc.own {
			s.others.addAll(svc.sums)
		}
	}
	for id := range s.index.forget() {
		delete(s.counts, id)
	}
	s.read = now

	return nil
}

// addEnded adds the bytes of flows that the agent has ended since the last call.
func (s *Services) addEnded() {
	ended := s.cfg.Ended()
	for id, b := range ended {
		if o, ok := s.index.owners[id]; ok {
			was := s.ended[id]
			o.sums.add(maps.StatBytesSent, growth(was.Sent, b.Sent))
			o.sums.add(maps.StatBytesReceived, growth(was.Received, b.Received))
		}
	}
	s.ended = ended
}

// sum reads all counts, and adds to each Service by how much those of its ids have grown.
func (s *Services) sum() error {
	refusals := 0
	for e, err := range s.cfg.Stats.All() {
		if err != nil {
			return err
		}
		if what := e.Key.What; what < maps.StatBytesSent && !maps.Reason(what).Translated() {
			refusals++
		}
		s.grow(e.Key, e.Value)
	}
	s.count = refusals
	// An id may be gone from the maps and not be released yet: its counts are kept until
	// the last ones are known.
	ended := s.cfg.Stats.Ended()
	for key, n := range ended {
		s.grow(key, n)
	}
	for key := range ended {
		delete(s.counts, key.ServicePortId)
		if o, ok := s.index.owners[key.ServicePortId]; ok {
			s.index.owners[key.ServicePortId] = owner{o.service, true}
		}
	}

	return nil
}

// grow adds to the Service that has an id by how much a count of the id has grown. A count
// whose Service is not known yet is added when it is. What could not be counted for a Service is among the others.
func (s *Services) grow(key maps.StatKey, n uint64) {
	sums := &s.others // of AllServicePorts
	if key.ServicePortId != maps.AllServicePorts {
		o, ok := s.index.owners[key.ServicePortId]
		if !ok || o.past {
			return
		}
		sums = &o.sums
	}
	known := s.counts[key.ServicePortId]
	more := growth(known.get(key.What), n)
	known.add(key.What, more)
	s.counts[key.ServicePortId] = known
	sums.add(key.What, more)
}

// growth returns by how much a count has grown: never less than nothing, because what is shown
// of it must not fall.
func growth(was, now uint64) uint64 { return max(was, now) - was }

// live returns how many connections the Service's backends have.
func (svc *service) live(loads maps.Loads) int {
	n := 0
	for _, id := range svc.backends {
		n += max(0, loads.Load(id).Live())
	}

	return n
}
