package model

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// subject is Sluice, from what an API server sends to the maps.
type subject struct {
	options options
	tables  maps.Tables
	fakes   *maps.Fakes // what tables is, but in the kernel
	now     time.Time

	writer *reconcile.Reconciler
	agent  *agent.Offline
	feed   *kube.Feed
}

const slots = 1 << 13

// newSubject returns Sluice at empty maps; the caller delivers all objects to it
// and lets it run.
func newSubject(o options) (*subject, error) {
	fakes := maps.NewFakes(slots)
	s, err := newSubjectOn(o, fakes.Tables)
	s.fakes = fakes
	return s, err
}

// newSubjectOn is newSubject on these maps.
func newSubjectOn(o options, tables maps.Tables) (*subject, error) {
	s := &subject{options: o, tables: tables, now: time.Unix(1_000_000, 0)}
	return s, s.start()
}

// start is what an agent does that finds the maps as another left them.
func (s *subject) start() error {
	var err error
	s.writer, err = reconcile.New(reconcile.Config{Tables: s.tables, Now: func() time.Time { return s.now }, TableSize: 67})
	if err != nil {
		return err
	}
	cfg, err := s.options.config()
	if err != nil {
		return err
	}
	s.agent = agent.NewOffline(cfg, s.writer)
	s.feed = kube.NewFeed(nodeName, s.agent.Sink())
	return nil
}

func (o options) config() (agent.Config, error) {
	cfg := agent.Config{
		NodeName:          nodeName,
		MasqueradeAll:     o.masqueradeAll,
		IgnoreExternalIPs: o.ignoreExternalIPs,
		NodeIP:            parse(o.nodeIP),
		Log:               slog.New(slog.DiscardHandler),
	}
	cfg.Local.ClusterCIDRs = parsePrefixes(o.clusterCIDRs)
	switch {
	case o.detect == byNodeCIDR:
		cfg.Local.Mode = node.LocalNodeCIDR
	case len(cfg.Local.ClusterCIDRs) > 0:
		cfg.Local.Mode = node.LocalClusterCIDR
	}
	var errs [2]error
	cfg.NodePortAddresses, errs[0] = lb.ParseNodePortAddresses(o.nodePortAddresses)
	cfg.Algorithm, errs[1] = lb.ParseAlgorithm(o.algorithm)
	return cfg, errors.Join(errs[:]...)
}

// setAddrs sets the addresses of the node's devices.
func (s *subject) setAddrs(addrs []netip.Addr) {
	addresses := []node.Address{}
	for i, addr := range addrs {
		addresses = append(addresses, node.Address{Addr: addr, IfIndex: i + 1, IsLoopback: addr.IsLoopback()})
	}
	s.agent.SetState(node.State{Addresses: addresses})
}

var errInjected = errors.New("injected")

// fail has writes fail at random. Those of the kernel's maps do not: then it returns false.
func (s *subject) fail(seed uint64) bool {
	if s.fakes == nil {
		return false
	}
	rng := rand.New(rand.NewPCG(seed, 3))
	oneIn := 2 + rng.IntN(8)
	s.fakes.Observe(func(string, string) error {
		if rng.IntN(oneIn) == 0 {
			return errInjected
		}
		return nil
	}, nil)
	return true
}

// squeeze leaves no room for more in some maps, but for the kernel's.
func (s *subject) squeeze(seed uint64) bool {
	if s.fakes == nil {
		return false
	}
	rng := rand.New(rand.NewPCG(seed, 4))
	room := func(entries int) int { return max(1, entries+rng.IntN(3)) }
	s.fakes.FrontendIDs.Size = room(len(s.fakes.FrontendIDs.Entries))
	s.fakes.Backends.SetLimit(room(used(s.fakes.Backends)))
	s.fakes.Pools.SetLimit(room(used(s.fakes.Pools)))
	s.fakes.Slots.SetLimit(room(used(s.fakes.Slots)))
	s.fakes.SourceRanges.Size = room(len(s.fakes.SourceRanges.Entries))
	s.fakes.Addrs.Size = room(len(s.fakes.Addrs.Entries))
	s.fakes.ServicePorts.Size = room(len(s.fakes.ServicePorts.Entries))
	return true
}

// used is how many places of an array are below the end of those in use.
func used[V any](a *maps.Array[V]) int {
	end := 1 // place 0 is never used
	for i := range a.All() {
		end = int(i) + 1
	}
	return end
}

// recover ends what fail and squeeze began.
func (s *subject) recover() {
	s.fakes.Observe(nil, nil)
	s.fakes.FrontendIDs.Size = 0
	s.fakes.Backends.SetLimit(slots)
	s.fakes.Pools.SetLimit(slots)
	s.fakes.Slots.SetLimit(slots)
	s.fakes.SourceRanges.Size = 0
	s.fakes.Addrs.Size = 0
	s.fakes.ServicePorts.Size = 0
}

// turns is how often Apply may be due without a change of an object.
const turns = 1000

// waitIdle lets time pass until the writer has nothing left to do.
func (s *subject) waitIdle() error {
	for range turns {
		at, due := s.writer.Next()
		if !due && !s.writer.Retired() {
			return nil
		}
		if !due {
			s.passGrace()
			continue
		}
		if at.After(s.now) {
			s.now = at
		}
		if err := s.writer.Apply(); err != nil && !errors.Is(err, errInjected) && !errors.Is(err, maps.ErrFull) {
			return err
		}
	}
	return errors.New("the writer never comes to rest")
}

// passGrace lets all programs end that run.
func (s *subject) passGrace() {
	s.writer.BeginGrace()
	s.writer.EndGrace()
}

// pass lets a few retries come and go.
func (s *subject) pass() {
	for range 3 {
		s.passGrace()
		if at, due := s.writer.Next(); due {
			s.now = latest(s.now, at)
			_ = s.writer.Apply() // it fails on purpose
		}
	}
}

func latest(a, b time.Time) time.Time { return slices.MaxFunc([]time.Time{a, b}, time.Time.Compare) }

// forgetAddrs is a look at all flows that found none.
func (s *subject) forgetAddrs() {
	s.now = s.now.Add(time.Minute)
	s.writer.PruneAddrs(nil, s.now)
}
