package status

import (
	"context"
	"errors"
	stdmaps "maps"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// NodeStats reads what a scrape shows of an agent and its node. It caches what takes long.
type NodeStats struct {
	// Model returns the metrics of the model and the writer. It asks the agent's loop.
	Model    func(context.Context) (metrics.Node, error)
	Hooks    *datapath.HookMonitor
	Devices  *datapath.DeviceMonitor
	Flows    func() flow.Status
	Healing  func() health.Healing
	Silence  func() map[string]time.Duration // of the watches
	Datapath *datapath.Datapath
	// Refusals returns how many entries the map of refusals has. Nil: Services are not counted.
	Refusals func() int

	mu     sync.Mutex
	model  metrics.Node              // the last answer of Model
	fills  map[string]reconcile.Fill // of maps that only programs write
	others int                       // other instances
	read   time.Time                 // when these two were read
}

const (
	// scrapeTimeout is how long a scrape waits for the agent's loop.
	scrapeTimeout = time.Second
	// fillsAge is how old the fills of large maps may be, and a search through all links of the kernel.
	fillsAge = time.Minute
)

// Node returns the metrics of the agent and its node now. While the agent's loop is busy, it
// returns the loop's last answer.
func (s *NodeStats) Node() (metrics.Node, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	if model, err := s.Model(ctx); err == nil {
		s.model = model
	}
	n := s.model // its maps are shared, and not changed below
	effective := s.Hooks.Effective()
	n.Effective = effective == nil || errors.Is(effective, datapath.ErrSlow)
	n.Devices, n.DeviceProblems = s.Devices.Count()
	n.Flows = s.Flows()
	n.Healing, n.Silence = s.Healing(), s.Silence()

	pinned := s.Datapath.Maps()
	if now := time.Now(); now.Sub(s.read) >= fillsAge {
		affinities, err := countAffinities(pinned)
		if err != nil {
			return n, err
		}
		pins, err := pinned.UDPPins.Count()
		if err != nil {
			return n, err
		}
		s.fills = map[string]reconcile.Fill{
			maps.NameAffinity: {Used: affinities, Capacity: pinned.Affinity.Capacity()},
			maps.NameUDPPins:  {Used: pins, Capacity: pinned.UDPPins.Capacity()},
		}
		if others, err := s.Datapath.Others(); err == nil { // who looks for them each minute logs an error
			s.others = len(others)
		}
		s.read = now
	}
	n.Others = s.others
	fills := map[string]reconcile.Fill{
		maps.NameFlows:    {Used: n.Flows.Flows.Entries, Capacity: n.Flows.Flows.Capacity},
		maps.NameHalfOpen: {Used: n.Flows.HalfOpen.Entries, Capacity: n.Flows.HalfOpen.Capacity},
	}
	stdmaps.Copy(fills, n.Fills)
	stdmaps.Copy(fills, s.fills)
	if s.Refusals != nil {
		fills[maps.NameRefusals] = reconcile.Fill{Used: s.Refusals(), Capacity: pinned.Stats.Capacity()}
	}
	n.Fills = fills

	files, err := datapath.ReadFiles()
	if err != nil {
		return n, err
	}
	n.OpenFiles, n.MaxFiles = files.Open, files.Limit
	if n.Decisions, err = pinned.ReasonCounts(); err != nil {
		return n, err
	}
	hooks, err := s.Datapath.Hooks()
	n.Hooks = make(map[string]bool, len(hooks))
	for _, hook := range hooks {
		n.Hooks[hook.Name] = hook.Problem == ""
	}

	return n, err
}

// countAffinities returns how many entries of the affinity map were used within the longest affinity of a Service. Older
// ones stay until their places are needed. If these alone fill the map, clients lose their backends early.
func countAffinities(pinned *maps.Pinned) (int, error) {
	longest := time.Duration(0)
	for _, pool := range pinned.Pools.All() {
		longest = max(longest, time.Duration(pool.AffinitySeconds)*time.Second)
	}
	n, now := 0, maps.Now()
	for e, err := range pinned.Affinity.All() {
		if err != nil {
			return 0, err
		}
		if e.Value.LastUsed+uint64(longest) > now {
			n++
		}
	}

	return n, nil
}
