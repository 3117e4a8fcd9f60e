// Package metrics tells Prometheus what the agent does, and what the datapath
// has counted: under kube-proxy's names ([Sync]) where they have a meaning here,
// and under our own of each Service ([Services]) and of the node ([NodeCollector]).
//
// docs/metrics.md lists ours, docs/kube-proxy.md says what became of kube-proxy's.
package metrics

import (
	"cmp"
	"errors"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// NewRegistry returns a registry of these collectors and of what a Sync measures.
// It returns an error if two of them tell of the same.
func NewRegistry(sync *Sync, others ...prometheus.Collector) (*prometheus.Registry, error) {
	registry := prometheus.NewRegistry()
	for _, c := range slices.Concat(sync.collectors(), others) {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}

	return registry, nil
}

// Gatherers are several as one. No two may have a family of the same name, which
// nobody checks: [prometheus.Gatherers] would look at each series for that.
type Gatherers []prometheus.Gatherer

// Gather implements [prometheus.Gatherer]. Next to an error, it returns what those
// had who made none.
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
