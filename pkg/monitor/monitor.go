// Package monitor shows what programs decide at the moment: which backend a new flow got, what was
// refused and why, and which backends are suspects. It reads what programs report in maps, and needs no agent.
package monitor

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/pods"
)

// Config configures [Run].
type Config struct {
	Maps   *maps.Pinned
	Filter Filter
	// Since is how far back refusals are printed first, of those that programs have kept, and what
	// is known of suspects. Zero: none.
	Since time.Duration
	// NoFollow ends Run after these.
	NoFollow bool
	// Pods knows the pods of this node.
	Pods *pods.Cache
	// Print is called with each event that the filter selects, in order. Its error ends Run.
	Print func(Event) error
}

// pollInterval is how long [Run] waits for an event before it looks whether it should end, and how often
// it looks for suspects.
const pollInterval = 200 * time.Millisecond

// Run prints events until ctx ends. The error wraps [maps.ErrFull] if too many listen already.
func Run(ctx context.Context, cfg Config) (err error) {
	names := names{
		tables: cfg.Maps.Tables, pod: cfg.Pods.Pod, device: deviceName,
		booted: time.Now().Add(-time.Duration(maps.Now())),
	}
	show := func(events ...Event) error {
		for _, event := range events {
			if cfg.Filter.selects(event) {
				if err := cfg.Print(event); err != nil {
					return err
				}
			}
		}

		return nil
	}
	// It listens before it reads what was kept, so that it misses nothing in between.
	var live *maps.Listener
	if !cfg.NoFollow {
		if live, err = cfg.Maps.Listen(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, live.Close()) }()
	}
	begin := maps.Now()
	recent, err := cfg.Maps.RecentRefusals()
	if err != nil {
		return err
	}
	suspects := healing{names: names, known: make(map[uint32]maps.BackendHealth)}
	before, err := suspects.look(begin)
	if err != nil {
		return err
	}
	for _, e := range recent {
		if e.Time <= begin {
			event, err := names.event(e)
			if err != nil {
				return err
			}
			before = append(before, event)
		}
	}
	since := names.at(begin).Add(-cfg.Since)
	before = slices.DeleteFunc(before, func(e Event) bool { return !e.Time.After(since) })
	slices.SortStableFunc(before, Event.compare)
	if err := show(before...); err != nil {
		return err
	}

	lost, looked := uint64(0), begin
	for live != nil && ctx.Err() == nil {
		e, ok, err := live.Read(time.Now().Add(pollInterval))
		if errors.Is(err, maps.ErrLapsed) {
			if live, err = again(cfg.Maps, live); err != nil {
				return err
			}
			lost = 0
			err = cfg.Print(Event{Time: time.Now(), Outcome: Lost})
		}
		if err != nil {
			return err
		}
		if ok && e.Time > begin {
			event, err := names.event(e)
			if err == nil {
				err = show(event)
			}
			if err != nil {
				return err
			}
		}
		if now := maps.Now(); now-looked >= uint64(pollInterval) {
			looked = now
			events, err := suspects.look(now)
			if err == nil {
				err = show(events...)
			}
			if err != nil {
				return err
			}
		}
		if n := live.Lost(); n != lost && !ok {
			if err := cfg.Print(Event{Time: time.Now(), Outcome: Lost, Lost: n - lost}); err != nil {
				return err
			}
			lost = n
		}
	}

	return nil
}

// again replaces a listener that has lapsed.
func again(m *maps.Pinned, lapsed *maps.Listener) (*maps.Listener, error) {
	fresh, err := m.Listen()
	if err != nil {
		return lapsed, err
	}

	return fresh, lapsed.Close()
}
