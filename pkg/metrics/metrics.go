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
	nodeProblems = newMetric("node_problems", gaugeKind,
		"What of this node is not as it is configured: a name, an address or a device does not exist, or cannot be used. The status of the agent lists it.")
	impaired = newMetric("services_impaired", gaugeKind,
		"Services that are not in the maps as they should be: a write has failed and is tried again (failed), or another Service has an address of theirs (taken).", "why")
	logLost = newMetric("log_lines_lost_total", counterKind,
		"Lines of the agent's log that are lost, because they were not read in time or could not be written. The agent does not wait for that.")
	openFiles = newMetric("open_files", gaugeKind,
		"Files that the agent has open. Maps, programs and sockets are files, too: without one left, new Services, devices and requests fail.")
	openFilesLimit = newMetric("open_files_limit", gaugeKind,
		"How many files the agent may have open.")
	silence = newMetric("watch_last_event_seconds", gaugeKind,
		"Seconds since the watch of a resource last had an event, a bookmark, or the answer to a ping of its connection to the API server.", "resource")
	gone = newMetric("objects_gone_total", counterKind,
		"Objects that the API server did not list any more, where at least half of a kind went in one list.", "kind")
	mapEntries = newMetric("map_entries", gaugeKind,
		"Entries of a map. Those that only programs write are counted once in a minute at most, and those of affinity only as long as the longest affinity of a Service.", "map")
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
	otherInstances = newMetric("other_instances", gaugeKind,
		"Other instances of Sluice whose programs act on this node as well, as they were a minute ago at most.")
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
		"UDP sockets that the agent has ended because their backend was gone, and no device could lead their datagrams to another one.")
)

// nodeMetrics are the metrics of a [NodeCollector].
var nodeMetrics = []*metric{
	buildInfo, synced, knownServices, problems, nodeProblems, impaired, logLost, openFiles, openFilesLimit, silence, mapEntries, mapCapacity, mapWrites,
	decisions, effective, hookAttached, otherInstances, devices, deviceProblems,
	evictions, alarm, alarms, flowsEnded, flowsRepaired, loadsRepaired, masqueradeRetries, stackPorts,
	suspects, suspicions, passedOver,
}
