package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
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
	s.rounds = s.duration("sync_proxy_rules_duration_seconds",
		"How long it took to write what had changed to the maps, by round.", roundBuckets)
	s.full = s.duration("sync_full_proxy_rules_duration_seconds",
		"How long it took to write everything, or to compare it with the maps.", roundBuckets)
	s.partial = s.duration("sync_partial_proxy_rules_duration_seconds",
		"How long it took to write what had changed to the maps, where not everything had.", roundBuckets)
	s.programmed = s.gauges("sync_proxy_rules_last_timestamp_seconds",
		"When all changes that had been received were last in the maps, in Unix time.", byFamily...)
	s.queued = s.gauges("sync_proxy_rules_last_queued_timestamp_seconds",
		"When a change was last received that may have to be written, in Unix time.", byFamily...)
	s.slicesLeft = s.gauges("sync_proxy_rules_endpoint_changes_pending",
		"Changes of EndpointSlices that were received and not applied yet.").WithLabelValues()
	s.slices = s.counters("sync_proxy_rules_endpoint_changes_total",
		"How often an EndpointSlice was received, changed or not.").WithLabelValues()
	s.serviceLeft = s.gauges("sync_proxy_rules_service_changes_pending",
		"Changes of Services that were received and not applied yet.").WithLabelValues()
	s.services = s.counters("sync_proxy_rules_service_changes_total",
		"How often a Service was received, changed or not.").WithLabelValues()
	s.healthz = s.counters("proxy_healthz_total", "Answers at /healthz of the health port, by status code.", "code")
	s.livez = s.counters("proxy_livez_total", "Answers at /livez of the health port, by status code.", "code")
	s.latency = s.duration("network_programming_duration_seconds",
		"How long after the change of a pod or a Service, by the clock of the component that reported it, its endpoints were in the maps.", latencyBuckets)
	s.noLocal = s.gauges("sync_proxy_rules_no_local_endpoints_total",
		"Service ports with a traffic policy Local and endpoints, none of which is on this node.", "traffic_policy", "ip_family")
	s.cleanUps = s.duration("conntrack_reconciler_sync_duration_seconds",
		"How long the search for UDP flows of backends or frontends that are gone took.", roundBuckets)
	s.cleaned = s.counters("conntrack_reconciler_deleted_entries_total",
		"UDP flows that were ended because their backend or frontend was gone.", byFamily...)
	s.gone = added(s, prometheus.NewCounterVec(prometheus.CounterOpts{Name: gone.name, Help: gone.help}, gone.labels))
	for _, kind := range []string{"Service", "EndpointSlice"} {
		s.gone.WithLabelValues(kind) // so that the first increase is one
	}
	s.mended = added(s, prometheus.NewCounterVec(prometheus.CounterOpts{Name: mapMended.name, Help: mapMended.help}, mapMended.labels))
	s.sockets = added(s, prometheus.NewCounter(prometheus.CounterOpts{Name: socketsEnded.name, Help: socketsEnded.help}))
}

const subsystem = "kubeproxy"

// added adds a metric to those that [NewRegistry] registers.
func added[C prometheus.Collector](s *Sync, c C) C {
	s.collectors = append(s.collectors, c)

	return c
}

func (s *Sync) duration(name, help string, buckets []float64) *prometheus.HistogramVec {
	return added(s, prometheus.NewHistogramVec(prometheus.HistogramOpts{Subsystem: subsystem, Name: name, Help: help, Buckets: buckets}, byFamily))
}

func (s *Sync) gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return added(s, prometheus.NewGaugeVec(prometheus.GaugeOpts{Subsystem: subsystem, Name: name, Help: help}, labels))
}

func (s *Sync) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return added(s, prometheus.NewCounterVec(prometheus.CounterOpts{Subsystem: subsystem, Name: name, Help: help}, labels))
}
