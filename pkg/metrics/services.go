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
// Earlier counts are subtracted. The maps do not have everything that an earlier agent has
// shown, and Prometheus takes a counter that has fallen a little for one that was reset and
// has grown to its value since.
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
		for _, c := range svc.sums {
			svc.base.add(c.what, -c.n)
		}
		svc.reset()
	}

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
	s.read = time.Time{} // a failed read leaves incomplete sums, which no scrape may show
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
		was := s.ended[id]
		if o, ok := s.index.owners[id]; ok && b != was {
			o.base.add(maps.StatBytesSent, b.Sent-was.Sent)
			o.base.add(maps.StatBytesReceived, b.Received-was.Received)
		}
	}
	s.ended = ended
}

// sum reads all counts. A Service that exists keeps the counts of ids that it no longer has.
func (s *Services) sum() error {
	refusals := 0
	for e, err := range s.cfg.Stats.All() {
		if err != nil {
			return err
		}
		id, what := e.Key.ServicePortId, e.Key.What
		if what < maps.StatBytesSent && !maps.Reason(what).Translated() {
			refusals++
		}
		counts := s.counts[id]
		counts.set(what, e.Value)
		s.counts[id] = counts
	}
	s.count = refusals
	// An id may be gone from the maps and not be released yet: its counts are kept until
	// the last ones are known.
	last := make(map[uint32]counts)
	for key, n := range s.cfg.Stats.Ended() {
		counts := last[key.ServicePortId]
		counts.set(key.What, n)
		last[key.ServicePortId] = counts
	}
	for id, counts := range last {
		delete(s.counts, id)
		if o, ok := s.index.owners[id]; ok {
			o.base.addAll(counts)
			s.index.owners[id] = owner{o.service, true}
		}
	}

	for _, svc := range s.index.services {
		svc.reset()
	}
	for _, svc := range s.index.gone {
		svc.reset()
	}
	for id, counts := range s.counts {
		if o, ok := s.index.owners[id]; ok {
			o.sums.addAll(counts)
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
