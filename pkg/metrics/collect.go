package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// othersName is the label of all Services that have no series of their own.
const othersName = "(others)"

var _ prometheus.Gatherer = (*Services)(nil)

// Gather implements [prometheus.Gatherer]. Services is not a [prometheus.Collector],
// because a registry sorts and checks each series, which takes half a second for
// 10,000 Services. The caller owns the result.
func (s *Services) Gather() ([]*dto.MetricFamily, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.cfg.Now(); now.Sub(s.read) >= freshness {
		if err := s.refresh(now); err != nil {
			return nil, err
		}
	}
	listed := make([]labelled, 0, s.index.own+1)
	others := labelled{name: lb.ServiceName{Name: othersName}, counts: slices.Clone(s.others)}
	shared := len(s.index.services) > s.index.own || len(others.counts) > 0
	if shared {
		listed = append(listed, others) // its empty namespace is the first one
	}
	for _, svc := range s.index.sorted {
		live := svc.live(s.cfg.Tables.Loads)
		if svc.own {
			listed = append(listed, labelled{name: svc.name, counts: svc.sums, live: live})
		} else {
			listed[0].counts.addAll(svc.sums)
			listed[0].live += live
		}
	}

	return append(families(listed),
		single(serviceSeries, float64(s.index.own)), single(serviceSeriesLimit, float64(s.cfg.Limit))), nil
}

// labelled has the values of one pair of labels.
type labelled struct {
	name   lb.ServiceName
	counts counts
	live   int
}

// families returns the series of all that is listed, sorted by name. It allocates series
// and labels in arrays, because there may be tens of thousands.
func families(listed []labelled) []*dto.MetricFamily {
	labels := labelsOf(listed)
	all := []*dto.MetricFamily{
		serviceConnections.family(labels, func(i int) float64 { return float64(listed[i].counts.connections()) }),
		serviceSent.family(labels, func(i int) float64 { return float64(listed[i].counts.get(maps.StatBytesSent)) }),
		serviceReceived.family(labels, func(i int) float64 { return float64(listed[i].counts.get(maps.StatBytesReceived)) }),
		serviceActive.family(labels, func(i int) float64 { return float64(listed[i].live) }),
	}

	reasons := make(map[maps.Reason]*dto.LabelPair)
	var failed, refused [][]*dto.LabelPair
	var counts, hidden []float64
	for i := range listed {
		if n := listed[i].counts.get(maps.StatHiddenRefusals); n > 0 {
			refused, hidden = append(refused, labels[i]), append(hidden, float64(n))
		}
		for reason, n := range listed[i].counts.failures() {
			if reasons[reason] == nil {
				reasons[reason] = &dto.LabelPair{Name: new("reason"), Value: new(reason.Label())}
			}
			failed = append(failed, []*dto.LabelPair{labels[i][0], reasons[reason], labels[i][1]})
			counts = append(counts, float64(n))
		}
	}
	all = append(all,
		serviceFailures.family(failed, func(i int) float64 { return counts[i] }),
		serviceHidden.family(refused, func(i int) float64 { return hidden[i] }))

	all = append(all, handshakeFamilies(listed, labels)...)

	return slices.DeleteFunc(all, func(f *dto.MetricFamily) bool { return len(f.Metric) == 0 })
}

// labelsOf returns the labels of each item, sorted by their names.
func labelsOf(listed []labelled) [][]*dto.LabelPair {
	namespace, service := "namespace", "service"
	pairs := make([]dto.LabelPair, 2*len(listed))
	labels := make([][]*dto.LabelPair, len(listed))
	for i := range listed {
		first, second := &pairs[2*i], &pairs[2*i+1]
		first.Name, first.Value = &namespace, &listed[i].name.Namespace
		second.Name, second.Value = &service, &listed[i].name.Name
		labels[i] = []*dto.LabelPair{first, second}
	}

	return labels
}

// family returns a metric family with a series for each set of labels.
func (m *metric) family(labels [][]*dto.LabelPair, value func(i int) float64) *dto.MetricFamily {
	n := len(labels)
	values, series, all := make([]float64, n), make([]dto.Metric, n), make([]*dto.Metric, n)
	var counters []dto.Counter
	var gauges []dto.Gauge
	if m.kind == counterKind {
		counters = make([]dto.Counter, n)
	} else {
		gauges = make([]dto.Gauge, n)
	}
	for i := range labels {
		values[i] = value(i)
		all[i] = &series[i]
		series[i].Label = labels[i]
		if counters != nil {
			counters[i].Value = &values[i]
			series[i].Counter = &counters[i]
		} else {
			gauges[i].Value = &values[i]
			series[i].Gauge = &gauges[i]
		}
	}

	return &dto.MetricFamily{Name: &m.name, Help: &m.help, Type: &m.kind, Metric: all}
}

// single returns the family of a metric without labels.
func single(m *metric, value float64) *dto.MetricFamily {
	return m.family([][]*dto.LabelPair{nil}, func(int) float64 { return value })
}

// Refusals returns how many entries of refusals there were when the maps were last read.
func (s *Services) Refusals() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.count
}
