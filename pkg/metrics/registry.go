// Package metrics exports metrics of the agent and counts of the datapath to Prometheus:
// under kube-proxy's names ([Sync]) where these apply, and under Sluice's own for each
// Service ([Services]) and for the node ([NodeCollector]).
//
// docs/metrics.md lists Sluice's own, docs/kube-proxy.md compares them with kube-proxy's.
package metrics

import (
	"cmp"
	"errors"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// NewRegistry returns a registry of these collectors and of the metrics of a Sync.
// It returns an error if two of them have the same metric.
func NewRegistry(sync *Sync, others ...prometheus.Collector) (*prometheus.Registry, error) {
	registry := prometheus.NewRegistry()
	for _, c := range slices.Concat(sync.collectors(), others) {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}

	return registry, nil
}

// Gatherers combines several gatherers. No two may have a family of the same name. That
// is not checked: [prometheus.Gatherers] does, and looks at each series for it.
type Gatherers []prometheus.Gatherer

// Gather implements [prometheus.Gatherer]. Beside an error, it returns the families of
// the gatherers that succeeded.
func (g Gatherers) Gather() ([]*dto.MetricFamily, error) {
	var all []*dto.MetricFamily
	var errs []error
	for _, one := range g {
		families, err := one.Gather()
		all = append(all, families...)
		errs = append(errs, err)
	}
	slices.SortFunc(all, func(a, b *dto.MetricFamily) int { return cmp.Compare(a.GetName(), b.GetName()) })

	return all, errors.Join(errs...)
}
