package metrics

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	abi "github.com/sluice-lb/sluice/maps"
)

// world is a cluster's maps, and what programs have counted.
type world struct {
	*abi.Fakes
	stats fakeStats
	moved uint64
	now   time.Time
}

type fakeStats struct {
	counts map[abi.StatKey]uint64
	ended  map[abi.StatKey]uint64
	pruned int
	reads  int
	fail   error
}

func (s *fakeStats) All() iter.Seq2[abi.Entry[abi.StatKey, uint64], error] {
	s.reads++

	return func(yield func(abi.Entry[abi.StatKey, uint64], error) bool) {
		for k, v := range maps.Clone(s.counts) {
			if !yield(abi.Entry[abi.StatKey, uint64]{Key: k, Value: v}, nil) {
				return
			}
		}
		if s.fail != nil {
			yield(abi.Entry[abi.StatKey, uint64]{}, s.fail)
		}
	}
}

func (s *fakeStats) Ended() map[abi.StatKey]uint64 {
	ended := s.ended
	s.ended = nil

	return ended
}

func (s *fakeStats) Prune() error {
	s.pruned++

	return s.fail
}

// end is what the writer does when an id is given back.
func (s *fakeStats) end(id uint32) {
	s.ended = make(map[abi.StatKey]uint64)
	for key, n := range s.counts {
		if key.ServicePortId == id {
			s.ended[key] = n
			delete(s.counts, key)
		}
	}
}

var errBroken = errors.New("broken")

func newWorld() *world {
	return &world{
		Fakes: abi.NewFakes(0),
		stats: fakeStats{counts: make(map[abi.StatKey]uint64)},
		now:   time.Unix(1_700_000_000, 0),
	}
}

// services returns a reader of the world.
func (w *world) services(t testing.TB, limit int) *Services {
	t.Helper()
	s, err := NewServices(ServicesConfig{
		Tables: w.tables(),
		Stats:  &w.stats,
		Limit:  limit,
		Moved:  func() uint64 { return w.moved },
		Now:    func() time.Time { return w.now },
	})
	if err != nil {
		t.Fatal(err)
	}

	return s
}

func (w *world) tables() abi.Tables {
	return abi.Tables{ServicePorts: w.ServicePorts, Backends: w.Backends, Loads: w.Loads}
}

// add gives a Service's port an id, and backends.
func (w *world) add(id uint32, namespace, name, port string, backends ...uint32) {
	w.ServicePorts.Entries[id] = abi.ServicePortOf(namespace, name, port, 6, 4)
	for _, backend := range backends {
		w.putBackend(backend, id)
	}
	w.moved++
}

func (w *world) putBackend(id, servicePortID uint32) {
	b := abi.BackendOf(id, servicePortID, netip.MustParseAddrPort("10.0.0.1:80"), 0)
	if err := w.Backends.Put(abi.Index(id), b); err != nil {
		panic(err)
	}
}

// load gives a backend so much to do.
func (w *world) load(backend uint32, load abi.BackendLoad) {
	if err := w.Loads.Put(abi.Index(backend), load); err != nil {
		panic(err)
	}
}

// remove takes an id away, with its backends. It is not given back yet.
func (w *world) remove(id uint32) {
	delete(w.ServicePorts.Entries, id)
	for i, b := range w.Backends.All() {
		if b.ServicePortId == id {
			if err := w.Backends.Put(i, abi.Backend{}); err != nil {
				panic(err)
			}
		}
	}
	w.moved++
}

// count counts n more for an id.
func (w *world) count(id uint32, what uint32, n uint64) {
	w.stats.counts[abi.StatKey{ServicePortId: id, What: what}] += n
}

// later lets what was read become old.
func (w *world) later() { w.now = w.now.Add(freshness) }

const sent = uint32(abi.ReasonTranslated)

// crowd fills the world with n Services of two ids, each with ten backends.
func (w *world) crowd(n int) {
	for i := range n {
		for j := range 2 {
			id := uint32(2*i + j + 1)
			w.ServicePorts.Entries[id] = abi.ServicePortOf("namespace", fmt.Sprintf("service-%d", i), "http", 6, 4)
			for b := range uint32(5) {
				backend := id*5 + b
				w.putBackend(backend, id)
			}
			w.count(id, sent, 7)
			w.count(id, uint32(abi.ReasonRejectNoBackend), 1)
			w.count(id, abi.StatBytesSent, 100)
			w.count(id, abi.StatBytesReceived, 1000)
		}
	}
	w.moved++
}

// gather returns what a scrape shows, by name and labels.
func gather(t testing.TB, from prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := ""
			for _, l := range m.GetLabel() {
				labels += fmt.Sprintf(" %s=%s", l.GetName(), l.GetValue())
			}
			value := m.GetCounter().GetValue() + m.GetGauge().GetValue()
			if h := m.GetHistogram(); h != nil {
				value = float64(h.GetSampleCount())
			}
			values[f.GetName()+labels] = value
		}
	}

	return values
}

// names returns the names of families.
func names(families []*dto.MetricFamily) []string {
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}

	return names
}

// standingClock returns a clock that stands still.
func standingClock() func() time.Time { return func() time.Time { return start } }
