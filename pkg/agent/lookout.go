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

// lookout gathers what a scrape tells of the agent and its node.
type lookout struct {
	mu    sync.Mutex
	told  metrics.Node            // by the goroutine that owns the model
	fills map[string]metrics.Fill // of maps that only programs write
	read  time.Time
}

const (
	// lookTime is how long a scrape waits for the goroutine that owns the model.
	lookTime = time.Second
	// fillsAge is how old the fills of large maps may be.
	fillsAge = time.Minute
)

// look returns what the agent and its node are like now. Scrapes call it.
func (a *agent) look() (metrics.Node, error) {
	a.lookout.mu.Lock()
	defer a.lookout.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), lookTime)
	defer cancel()
	if told, err := inLoop(ctx, a, a.modelNode); err == nil {
		a.lookout.told = told
	}
	n := a.lookout.told // without its maps: they stay as they are
	n.Effective = a.keeper.checked() == nil
	n.Devices, n.DeviceProblems = a.devices.count()
	a.flows.tell(&n)
	if err := a.tellFills(&n); err != nil {
		return n, err
	}
	var err error
	if n.Decisions, err = a.datapath.Maps().ReasonCounts(); err != nil {
		return n, err
	}
	n.Hooks, err = hookStates(a.datapath)

	return n, err
}

// modelNode is for the goroutine that owns the model.
func (a *agent) modelNode() metrics.Node {
	counters := a.writer.Counters()
	n := metrics.Node{
		Synced:   a.synced,
		Services: a.model.state.Len(),
		Failed:   len(a.stock.failed),
		Taken:    len(a.stock.taken),
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

// tellFills adds how full the maps are that programs write.
func (a *agent) tellFills(n *metrics.Node) error {
	l, m := &a.lookout, a.datapath.Maps()
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

// count returns how many devices there are of each class, and with how many
// something is wrong.
func (k *deviceKeeper) count() (classes map[string]int, problems int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	classes = map[string]int{"pods": 0, "uplink": 0, "none": 0}
	for _, d := range k.decisions {
		class := "none"
		if d.Class != node.ClassNone {
			class = d.Class.String()
		}
		classes[class]++
	}

	return classes, len(k.failed) + len(k.unreached)
}

// tell adds what is known of flows.
func (k *flowKeeper) tell(n *metrics.Node) {
	s := k.known()
	n.FlowTables = map[string]metrics.FlowTable{
		maps.NameFlows:    {Evicted: s.Flows.Evicted, Alarm: s.Emergency != "", Alarms: s.Emergencies},
		maps.NameHalfOpen: {Evicted: s.HalfOpen.Evicted, Alarm: s.Flood != "", Alarms: s.Floods},
	}
	n.FlowsIdle, n.FlowsStale = s.Expired, s.Stale
	n.FlowsRepaired, n.LoadsRepaired = s.Repaired, s.LoadsRepaired
	n.MasqueradeRetries, n.StackPorts = s.MasqueradeRetries, s.StackPorts
}
