package agent

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/node"
)

// statsCache has what scrapes show that is not read anew each time.
type statsCache struct {
	mu    sync.Mutex
	model metrics.Node            // the last answer of the goroutine that owns the model
	fills map[string]metrics.Fill // of maps that only programs write
	read  time.Time
}

const (
	// scrapeTimeout is how long a scrape waits for the goroutine that owns the model.
	scrapeTimeout = time.Second
	// fillsAge is how old the fills of large maps may be.
	fillsAge = time.Minute
)

// nodeStats returns the metrics of the agent and its node. Scrapes call it.
func (a *agent) nodeStats() (metrics.Node, error) {
	a.stats.mu.Lock()
	defer a.stats.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	if stats, err := inLoop(ctx, a, a.modelStats); err == nil {
		a.stats.model = stats
	}
	n := a.stats.model // its maps are shared, and not changed below
	n.Effective = a.hooks.checked() == nil
	n.Devices, n.DeviceProblems = a.devices.count()
	a.flows.addStats(&n)
	if err := a.addFills(&n); err != nil {
		return n, err
	}
	var err error
	if n.Decisions, err = a.datapath.Maps().ReasonCounts(); err != nil {
		return n, err
	}
	n.Hooks, err = hookStates(a.datapath)

	return n, err
}

// modelStats returns the metrics of the model and the writer. The caller has the turn.
func (a *agent) modelStats() metrics.Node {
	counters := a.writer.Counters()
	n := metrics.Node{
		Synced:   a.synced,
		Services: a.model.state.Len(),
		Failed:   len(a.impaired.failed),
		Taken:    len(a.impaired.taken),
		Writes:   make(map[string]metrics.Writes, len(counters.Writes)),
		Fills:    make(map[string]metrics.Fill, len(counters.Fill)),
	}
	for _, problems := range a.model.problems {
		n.Problems += len(problems)
	}
	for name, writes := range counters.Writes {
		n.Writes[name] = metrics.Writes(writes)
	}
	for name, fill := range counters.Fill {
		n.Fills[name] = metrics.Fill{Entries: fill.Used, Capacity: fill.Capacity}
	}

	return n
}

func hookStates(dp *datapath.Datapath) (map[string]bool, error) {
	hooks, err := dp.Hooks()
	attached := make(map[string]bool, len(hooks))
	for _, hook := range hooks {
		attached[hook.Name] = hook.Problem == ""
	}

	return attached, err
}

// addFills adds the fills of maps that programs write.
func (a *agent) addFills(n *metrics.Node) error {
	l, m := &a.stats, a.datapath.Maps()
	if now := time.Now(); now.Sub(l.read) >= fillsAge {
		affinity, err := fillOf(m.Affinity)
		if err != nil {
			return err
		}
		pins, err := fillOf(m.UDPPins)
		if err != nil {
			return err
		}
		l.fills, l.read = map[string]metrics.Fill{maps.NameAffinity: affinity, maps.NameUDPPins: pins}, now
	}
	fills := make(map[string]metrics.Fill)
	for _, known := range []map[string]metrics.Fill{n.Fills, l.fills} {
		for name, fill := range known {
			fills[name] = fill
		}
	}
	flows := a.flows.known()
	fills[maps.NameFlows] = metrics.Fill{Entries: flows.Flows.Entries, Capacity: flows.Flows.Capacity}
	fills[maps.NameHalfOpen] = metrics.Fill{Entries: flows.HalfOpen.Entries, Capacity: flows.HalfOpen.Capacity}
	if a.counts != nil {
		fills[maps.NameRefusals] = metrics.Fill{Entries: a.counts.Refusals(), Capacity: m.Stats.Capacity()}
	}
	n.Fills = fills

	return nil
}

func fillOf[K comparable, V any](m *maps.Map[K, V]) (metrics.Fill, error) {
	fill := metrics.Fill{Capacity: m.Capacity()}
	for _, err := range m.All() {
		if err != nil {
			return fill, err
		}
		fill.Entries++
	}

	return fill, nil
}

// count returns how many devices there are of each class, and how many have a problem.
func (m *deviceMonitor) count() (classes map[string]int, problems int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	classes = map[string]int{"pods": 0, "uplink": 0, "none": 0}
	for _, d := range m.decisions {
		class := "none"
		if d.Class != node.ClassNone {
			class = d.Class.String()
		}
		classes[class]++
	}

	return classes, len(m.failed) + len(m.unreached)
}

// addStats adds the metrics of flows.
func (m *flowMonitor) addStats(n *metrics.Node) {
	s := m.known()
	n.FlowTables = map[string]metrics.FlowTable{
		maps.NameFlows:    {Evicted: s.Flows.Evicted, Alarm: s.Emergency != "", Alarms: s.Emergencies},
		maps.NameHalfOpen: {Evicted: s.HalfOpen.Evicted, Alarm: s.Flood != "", Alarms: s.Floods},
	}
	n.FlowsIdle, n.FlowsStale = s.Expired, s.Stale
	n.FlowsRepaired, n.LoadsRepaired = s.Repaired, s.LoadsRepaired
	n.MasqueradeRetries, n.StackPorts = s.MasqueradeRetries, s.StackPorts
}
