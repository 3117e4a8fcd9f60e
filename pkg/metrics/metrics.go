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
	for _, c := range slices.Concat(sync.collectors, others) {
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

// metric describes one of Sluice's own metrics, for docs/metrics.md and for scrapes.
type metric struct {
	name   string
	kind   dto.MetricType
	labels []string
	help   string
	desc   *prometheus.Desc
}

const (
	counterKind   = dto.MetricType_COUNTER
	gaugeKind     = dto.MetricType_GAUGE
	histogramKind = dto.MetricType_HISTOGRAM // a native one
)

func newMetric(name string, kind dto.MetricType, help string, labels ...string) *metric {
	name = "sluice_" + name

	return &metric{
		name: name, kind: kind, labels: labels, help: help,
		desc: prometheus.NewDesc(name, help, labels, nil),
	}
}

// send sends one series of a counter or a gauge.
func (m *metric) send(to chan<- prometheus.Metric, value float64, labels ...string) {
	kind := prometheus.GaugeValue
	if m.kind == counterKind {
		kind = prometheus.CounterValue
	}
	to <- prometheus.MustNewConstMetric(m.desc, kind, value, labels...)
}

// sendBool sends one series that is 1 or 0.
func (m *metric) sendBool(to chan<- prometheus.Metric, value bool, labels ...string) {
	if value {
		m.send(to, 1, labels...)
	} else {
		m.send(to, 0, labels...)
	}
}

// Metrics of each Service.
var (
	serviceLabels = []string{"namespace", "service"}

	serviceConnections = newMetric("service_connections_total", counterKind,
		"New flows of a Service's clients that got a backend.", serviceLabels...)
	serviceFailures = newMetric("service_failures_total", counterKind,
		"New flows of a Service's clients that got none, by reason.", "namespace", "service", "reason")
	serviceHidden = newMetric("service_hidden_refusals_total", counterKind,
		"TCP connections of a Service's clients that a backend refused, which the client was not told, so that another one was tried: with `--heal=resteer`, of Services that had any.", serviceLabels...)
	serviceSent = newMetric("service_sent_bytes_total", counterKind,
		"Bytes that a Service's clients have sent: in packets that devices translate, and by TCP sockets once they are closed. UDP sockets are not counted.", serviceLabels...)
	serviceReceived = newMetric("service_received_bytes_total", counterKind,
		"Bytes that a Service's clients have received, of the same.", serviceLabels...)
	serviceActive = newMetric("service_active_connections", gaugeKind,
		"Connections that clients which this node translates have with a Service's backends.", serviceLabels...)
	serviceHandshakes = newMetric("service_handshake_seconds", histogramKind,
		"TCP handshakes that a Service's clients began at sockets, by the time from connect() to the answer.", serviceLabels...)
	serviceSYNs = newMetric("service_syn_retransmits", histogramKind,
		"TCP handshakes that a Service's clients began at sockets, by how many SYNs they sent again. The sum grows when they are sent, the rest when the handshake ends.", serviceLabels...)
	serviceUnanswered = newMetric("service_handshake_failures_total", counterKind,
		"TCP handshakes that a Service's clients began at sockets and that were refused, timed out, or were given up.", serviceLabels...)
	serviceRetransmits = newMetric("service_retransmits_total", counterKind,
		"TCP segments that a Service's clients sent again after the handshake.", serviceLabels...)
	serviceSeries = newMetric("service_series", gaugeKind,
		"Services with series of their own.")
	serviceSeriesLimit = newMetric("service_series_limit", gaugeKind,
		"How many Services can have series of their own; the others share those of the empty namespace.")
)

// Metrics of the agent and its node.
var (
	buildInfo = newMetric("build_info", gaugeKind,
		"Always 1: the version of the agent and what it was built with.", "version", "go_version")
	synced = newMetric("synced", gaugeKind,
		"1 once all Services have been programmed for the first time.")
	knownServices = newMetric("services", gaugeKind,
		"Services that the agent knows.")
	problems = newMetric("problems", gaugeKind,
		"What had to be left out of Kubernetes objects, because it could not be read or made no sense.")
	impaired = newMetric("services_impaired", gaugeKind,
		"Services that are not in the maps as they should be: a write has failed and is tried again (failed), or another Service has an address of theirs (taken).", "why")
	mapEntries = newMetric("map_entries", gaugeKind,
		"Entries of a map. Those that only programs write are counted once in a minute at most.", "map")
	mapCapacity = newMetric("map_capacity", gaugeKind,
		"Entries that a map has room for.", "map")
	mapWrites = newMetric("map_writes_total", counterKind,
		"What the agent has written to a map since it started.", "map", "operation")
	mapMended = newMetric("map_mended_total", counterKind,
		"Entries of a map that were not as the agent had written them, and were put right.", "map")
	decisions = newMetric("decisions_total", counterKind,
		"What hooks have decided, of packets and of system calls, since the maps were created.", "reason")
	effective = newMetric("hooks_effective", gaugeKind,
		"1 if hooks are effective on this node: they refuse a connection to an address that only they know.")
	hookAttached = newMetric("hook_attached", gaugeKind,
		"1 if the program of a hook of the cgroup is attached.", "hook")
	devices = newMetric("devices", gaugeKind,
		"Devices of this node by class: those that lead to pods, uplinks, and others, which nothing is attached to.", "class")
	deviceProblems = newMetric("device_problems", gaugeKind,
		"Devices that are not attached to as they should be, or where packets pass that Sluice does not see.")
	evictions = newMetric("flow_evictions_total", counterKind,
		"Entries that were pushed out of a flow table to make room, since the agent started.", "map")
	alarm = newMetric("flow_alarm", gaugeKind,
		"1 while a flow table is at its limit: new connections may be refused (flows), or new flows fail (half_open).", "map")
	alarms = newMetric("flow_alarms_total", counterKind,
		"How often a flow table came to its limit, since the agent started.", "map")
	flowsEnded = newMetric("flows_ended_total", counterKind,
		"Flows that the agent has ended: idle ones, and stale ones of UDP, whose backend or frontend was gone.", "why")
	flowsRepaired = newMetric("flow_repairs_total", counterKind,
		"Entries of flows that were pushed out and put back, since the maps were created.")
	loadsRepaired = newMetric("load_repairs_total", counterKind,
		"By how many connections the loads of backends were put right, since the agent started.")
	masqueradeRetries = newMetric("masquerade_retries_total", counterKind,
		"How often a port for a masqueraded flow was taken, since the maps were created.")
	stackPorts = newMetric("stack_ports_total", counterKind,
		"Flows whose client port another flow had, since the maps were created.")
	suspects = newMetric("suspect_backends", gaugeKind,
		"Backends that do not answer clients of this node, and are passed over or probed.")
	suspicions = newMetric("suspicions_total", counterKind,
		"How often a backend stopped to answer clients of this node, since the agent started; what returns within a minute counts once.")
	passedOver = newMetric("passed_over_total", counterKind,
		"New flows that went to another backend, because theirs was a suspect, since the agent started.")
	socketsEnded = newMetric("udp_sockets_ended_total", counterKind,
		"UDP sockets that the agent has ended because their backend was gone.")
)

// group is one table of docs/metrics.md.
type group struct {
	title   string
	about   string
	metrics []*metric
}

// groups returns all metrics of Sluice's own.
func groups() []group {
	var backends []*metric
	for _, m := range backendMetrics {
		backends = append(backends, m.metric)
	}

	return append([]group{
		{title: "Services", about: servicesAbout, metrics: serviceMetrics()},
		{title: "Backends", about: backendsAbout, metrics: backends},
	}, nodeGroups()...)
}

func serviceMetrics() []*metric {
	return []*metric{
		serviceConnections, serviceFailures, serviceHidden, serviceSent, serviceReceived, serviceActive,
		serviceHandshakes, serviceSYNs, serviceUnanswered, serviceRetransmits, serviceSeries, serviceSeriesLimit,
	}
}

func nodeGroups() []group {
	return []group{
		{
			title: "The agent",
			about: "A scrape asks the goroutine that programs Services for a few numbers. While it is busy for more than a second, " +
				"a scrape shows its last answer. Impaired Services are determined every 5 seconds.",
			metrics: []*metric{buildInfo, synced, knownServices, problems, impaired},
		},
		{
			title: "Maps",
			about: "For maps that the agent writes, it counts entries and writes itself. Maps that only programs write are read once in a " +
				"minute at most; the counts of Services are counted whenever they are read.",
			metrics: []*metric{mapEntries, mapCapacity, mapWrites, mapMended},
		},
		{
			title: "Hooks and devices",
			about: "Hooks of the cgroup are looked up in the kernel, with a few system calls each. For devices, a scrape shows what the agent " +
				"found at its last check: every 30 seconds, and after each change.",
			metrics: []*metric{decisions, effective, hookAttached, devices, deviceProblems},
		},
		{
			title:   "Flows",
			about:   "From the last sweep over the flow tables of devices: every 10 seconds, less often if they are large.",
			metrics: []*metric{evictions, alarm, alarms, flowsEnded, flowsRepaired, loadsRepaired, masqueradeRetries, stackPorts, socketsEnded},
		},
		{
			title:   "Healing",
			about:   "What programs have noticed of [backends that do not answer](healing.md), as the agent saw it at its last look, once a second. Zero with `--heal=off`.",
			metrics: []*metric{suspects, suspicions, passedOver},
		},
	}
}

// nodeMetrics returns the metrics of a [NodeCollector].
func nodeMetrics() []*metric {
	var all []*metric
	for _, g := range nodeGroups() {
		all = append(all, g.metrics...)
	}

	// A Sync counts these two.
	return slices.DeleteFunc(all, func(m *metric) bool { return m == mapMended || m == socketsEnded })
}

const servicesAbout = `Programs count the outcomes of new flows for each service port and family. A scrape reads these counts, and joins them with the names of Services; counts that were read within the last 5 seconds are not read again.

At most ` + "`--service-metrics`" + ` Services have series of their own: first come, first served, and as long as the Service exists. A Service that found none left is counted among the others, also after it is gone; all others together have the namespace ` + "`\"\"`" + ` and the service ` + "`(others)`" + `. 0 switches these series off, and the counting.

TCP handshakes and retransmissions are those of sockets that Sluice translates, not of flows at devices, and of Services that had any; a Service's are counted from Linux 5.11 on, and unless ` + "`--handshake-metrics=false`" + ` is given. Histograms are native ones: Prometheus reads their buckets from 2.40 on with ` + "`--enable-feature=native-histograms`" + `, from 3.8 on with ` + "`scrape_native_histograms: true`" + `, and only ` + "`_sum`" + ` and ` + "`_count`" + ` otherwise. The buckets of durations have four for each factor of two, from 15 µs to 128 s: a quantile is right within 19 %.

A Service's counters continue when its ports come and go. They begin at zero when the agent is started, though programs count meanwhile: the maps do not have everything that an earlier agent has shown, and Prometheus takes a counter that has fallen a little for one that has been reset and has grown to its value since. Counters also begin at zero for a Service that is deleted and created again after a scrape.`

const backendsAbout = `With ` + "`--backend-metrics`" + `, so many backends have series of their own: first come, first served, and as long as the backend exists. ` + "`port`" + ` is the name of the Service's port, and ` + "`backend`" + ` an address and port. These counters go on when the agent is started again. Handshakes are counted as for Services.`
