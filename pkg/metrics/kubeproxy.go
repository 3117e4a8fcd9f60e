package metrics

import (
	"iter"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Buckets, in seconds, are those of kube-proxy, so that existing dashboards and alerts
// keep working.
var (
	roundBuckets   = prometheus.ExponentialBuckets(0.001, 2, 15)
	latencyBuckets = slices.Concat(
		prometheus.LinearBuckets(0.25, 0.25, 2),
		prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12),
		prometheus.LinearBuckets(120, 30, 7),
	)
)

// byFamily is the label of metrics that IPv4 and IPv6 have separately.
var byFamily = []string{"ip_family"}

// make creates the metrics with kube-proxy's names, of which one ends in _total and is
// a gauge, and two of Sluice's own.
func (s *Sync) make() {
	s.rounds = observers(duration("sync_proxy_rules_duration_seconds",
		"How long it took to write what had changed to the maps, by round.", roundBuckets))
	s.full = observers(duration("sync_full_proxy_rules_duration_seconds",
		"How long it took to write everything, or to compare it with the maps.", roundBuckets))
	s.partial = observers(duration("sync_partial_proxy_rules_duration_seconds",
		"How long it took to write what had changed to the maps, where not everything had.", roundBuckets))
	s.programmed = eachFamily(gauges("sync_proxy_rules_last_timestamp_seconds",
		"When all changes that had been received were last in the maps, in Unix time.", byFamily...))
	s.queued = eachFamily(gauges("sync_proxy_rules_last_queued_timestamp_seconds",
		"When a change was last received that may have to be written, in Unix time.", byFamily...))
	s.slicesLeft = gauge("sync_proxy_rules_endpoint_changes_pending",
		"Changes of EndpointSlices that were received and not applied yet.")
	s.slices = counter("sync_proxy_rules_endpoint_changes_total",
		"How often an EndpointSlice was received, changed or not.")
	s.serviceLeft = gauge("sync_proxy_rules_service_changes_pending",
		"Changes of Services that were received and not applied yet.")
	s.services = counter("sync_proxy_rules_service_changes_total",
		"How often a Service was received, changed or not.")
	s.healthz = counters("proxy_healthz_total", "Answers at /healthz of the health port, by status code.", "code")
	s.livez = counters("proxy_livez_total", "Answers at /livez of the health port, by status code.", "code")
	s.latency = duration("network_programming_duration_seconds",
		"How long after the change of a pod or a Service, by the clock of the component that reported it, its endpoints were in the maps.", latencyBuckets)
	s.noLocal = gauges("sync_proxy_rules_no_local_endpoints_total",
		"Service ports with a traffic policy Local and endpoints, none of which is on this node.", "traffic_policy", "ip_family")
	s.lacksInternal = perFamilyOf(s.noLocal, func(family string) prometheus.Gauge { return s.noLocal.WithLabelValues("internal", family) })
	s.lacksExternal = perFamilyOf(s.noLocal, func(family string) prometheus.Gauge { return s.noLocal.WithLabelValues("external", family) })
	s.cleanUps = duration("conntrack_reconciler_sync_duration_seconds",
		"How long the search for UDP flows of backends or frontends that are gone took.", roundBuckets)
	s.cleaned = counters("conntrack_reconciler_deleted_entries_total",
		"UDP flows that were ended because their backend or frontend was gone.", byFamily...)
	s.mended = prometheus.NewCounterVec(prometheus.CounterOpts{Name: mapMended.name, Help: mapMended.help}, mapMended.labels)
	s.sockets = prometheus.NewCounter(prometheus.CounterOpts{Name: socketsEnded.name, Help: socketsEnded.help})
}

// collectors returns all metrics that make created.
func (s *Sync) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		s.rounds, s.full, s.partial, s.programmed, s.queued,
		s.slicesLeft, s.slices, s.serviceLeft, s.services,
		s.healthz, s.livez, s.latency, s.noLocal, s.cleanUps, s.cleaned,
		s.mended, s.sockets,
	}
}

// perFamily is a metric with a value for each IP family, which exists from its first use on.
// It looks up each value once, because it is used with each change.
type perFamily[T any] struct {
	prometheus.Collector
	ipv4, ipv6 func() T
}

func perFamilyOf[T any](c prometheus.Collector, value func(family string) T) perFamily[T] {
	return perFamily[T]{
		Collector: c,
		ipv4:      sync.OnceValue(func() T { return value(lb.IPv4.String()) }),
		ipv6:      sync.OnceValue(func() T { return value(lb.IPv6.String()) }),
	}
}

// of yields the values of families.
func (m perFamily[T]) of(families Families) iter.Seq[T] {
	return func(yield func(T) bool) {
		if families&IPv4 != 0 && !yield(m.ipv4()) {
			return
		}
		if families&IPv6 != 0 {
			yield(m.ipv6())
		}
	}
}

func observers(vec *prometheus.HistogramVec) perFamily[prometheus.Observer] {
	return perFamilyOf(vec, func(family string) prometheus.Observer { return vec.WithLabelValues(family) })
}

func eachFamily(vec *prometheus.GaugeVec) perFamily[prometheus.Gauge] {
	return perFamilyOf(vec, func(family string) prometheus.Gauge { return vec.WithLabelValues(family) })
}

const subsystem = "kubeproxy"

func duration(name, help string, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Subsystem: subsystem, Name: name, Help: help, Buckets: buckets,
	}, byFamily)
}

func gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Subsystem: subsystem, Name: name, Help: help}, labels)
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Subsystem: subsystem, Name: name, Help: help})
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Subsystem: subsystem, Name: name, Help: help}, labels)
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Subsystem: subsystem, Name: name, Help: help})
}
