package metrics

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

const docsLead = `# Sluice's own metrics

<!-- Generated from pkg/metrics: go test ./pkg/metrics -run TestDocs -update -->

What the agent serves at ` + "`/metrics`" + ` of its metrics address (` + "`--metrics-bind-address`" + `, 127.0.0.1:10249 by default), beside the metrics that kube-proxy has: for those, see [kube-proxy.md](kube-proxy.md). ` + "`go_*`, `process_*` and `rest_client_*`" + ` are there, too.

The names may still change. With 10,000 Services, 100,000 backends and 80,000 counts, a scrape takes less than a tenth of a second of one CPU's time, of which most is for reading the counts.
`

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

	return []group{
		{title: "Services", about: servicesAbout, metrics: []*metric{
			serviceConnections, serviceFailures, serviceHidden, serviceSent, serviceReceived, serviceActive,
			serviceHandshakes, serviceSYNs, serviceUnanswered, serviceRetransmits, serviceSeries, serviceSeriesLimit,
		}},
		{title: "Backends", about: backendsAbout, metrics: backends},
		{
			title: "The agent",
			about: "A scrape asks the goroutine that programs Services for a few numbers. While it is busy for more than a second, " +
				"a scrape shows its last answer. Impaired Services are determined every 5 seconds.",
			metrics: []*metric{buildInfo, synced, knownServices, problems, nodeProblems, impaired, logLost, openFiles, openFilesLimit, silence, gone},
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
			metrics: []*metric{decisions, effective, hookAttached, otherInstances, devices, deviceProblems},
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

const servicesAbout = `Programs count the outcomes of new flows for each service port and family. A scrape reads these counts, and joins them with the names of Services; counts that were read within the last 5 seconds are not read again.

At most ` + "`--service-metrics`" + ` Services have series of their own: first come, first served, and as long as the Service exists. A Service that found none left is counted among the others, also after it is gone; all others together have the namespace ` + "`\"\"`" + ` and the service ` + "`(others)`" + `, with refusals that could not be counted for a Service, because the map for them is full. 0 switches these series off, and the counting.

TCP handshakes and retransmissions are those of sockets that Sluice translates, not of flows at devices, and of Services that had any; a Service's are counted from Linux 5.11 on, and unless ` + "`--handshake-metrics=false`" + ` is given. Histograms are native ones: Prometheus reads their buckets from 2.40 on with ` + "`--enable-feature=native-histograms`" + `, from 3.8 on with ` + "`scrape_native_histograms: true`" + `, and only ` + "`_sum`" + ` and ` + "`_count`" + ` otherwise. The buckets of durations have four for each factor of two, from 15 µs to 128 s: a quantile is right within 19 %.

A Service's counters continue when its ports come and go. They begin at zero when the agent is started, though programs count meanwhile: the maps do not have everything that an earlier agent has shown, and Prometheus takes a counter that has fallen a little for one that has been reset and has grown to its value since. Counters also begin at zero for a Service that is deleted and created again after a scrape.`

const backendsAbout = `With ` + "`--backend-metrics`" + `, so many backends have series of their own: first come, first served, and as long as the backend exists. ` + "`port`" + ` is the name of the Service's port, and ` + "`backend`" + ` an address and port. These counters go on when the agent is started again. Handshakes are counted as for Services.`

// docs/metrics.md lists every metric.
func TestDocs(t *testing.T) {
	var text strings.Builder
	text.WriteString(docsLead)
	for _, g := range groups() {
		fmt.Fprintf(&text, "\n## %s\n\n%s\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n", g.title, g.about)
		for _, m := range g.metrics {
			kind := strings.ToLower(m.kind.String())
			var labels []string
			for _, l := range m.labels {
				labels = append(labels, "`"+l+"`")
			}
			fmt.Fprintf(&text, "| `%s` | %s | %s | %s |\n", m.name, kind, strings.Join(labels, ", "), m.help)
		}
		if g.title == "Hooks and devices" {
			fmt.Fprintf(&text, "\nReasons: %s.\n", reasonList())
		}
	}
	golden.Match(t, "../../docs/metrics.md", text.String())
}

func reasonList() string {
	var list []string
	for _, r := range maps.Reasons() {
		list = append(list, fmt.Sprintf("`%s` (%s)", r.Label(), r))
	}
	slices.Sort(list)

	return strings.Join(list, ", ")
}

// A scrape of an agent to which everything has happened has all that the docs
// list, with those labels, and no more.
func TestDocsAreComplete(t *testing.T) {
	want := make(map[string]string)
	for _, g := range groups() {
		for _, m := range g.metrics {
			want[m.name] = strings.Join(slices.Sorted(slices.Values(m.labels)), " ")
		}
	}
	compare(t, "docs/metrics.md", want, shownBy(t, "sluice_"))
}

// Every metric of kube-proxy's that test/compat/metrics.yaml lists as supported or mapped is
// shown, with those labels, and nothing else is.
func TestRowsOfKubeProxy(t *testing.T) {
	want := make(map[string]string)
	for _, row := range mustReadRows(t) {
		if strings.HasPrefix(row.Name, "kubeproxy_") && row.State != "meaningless" {
			labels := strings.FieldsFunc(row.Labels, func(r rune) bool { return r == ',' || r == ' ' })
			slices.Sort(labels)
			want[row.Name] = strings.Join(labels, " ")
		}
	}
	compare(t, "test/compat/metrics.yaml", want, shownBy(t, "kubeproxy_"))
}

// kubeProxyMetrics are all that kube-proxy 1.37 registers, in whatever mode,
// without "kubeproxy_".
const kubeProxyMetrics = `
	conntrack_reconciler_deleted_entries_total conntrack_reconciler_sync_duration_seconds
	iptables_ct_state_invalid_dropped_packets_total iptables_localhost_nodeports_accepted_packets_total
	network_programming_duration_seconds nftables_localhost_nodeport_listener_creation_failures_total
	nftables_localhost_nodeport_listeners nftables_localhost_nodeport_rejected_packets_total proxy_healthz_total proxy_livez_total
	sync_full_proxy_rules_duration_seconds sync_partial_proxy_rules_duration_seconds
	sync_proxy_rules_duration_seconds sync_proxy_rules_endpoint_changes_pending
	sync_proxy_rules_endpoint_changes_total sync_proxy_rules_iptables_last
	sync_proxy_rules_iptables_partial_restore_failures_total sync_proxy_rules_iptables_restore_failures_total
	sync_proxy_rules_iptables_total sync_proxy_rules_last_queued_timestamp_seconds
	sync_proxy_rules_last_timestamp_seconds sync_proxy_rules_nftables_cleanup_failures_total
	sync_proxy_rules_nftables_sync_failures_total sync_proxy_rules_no_local_endpoints_total
	sync_proxy_rules_service_changes_pending sync_proxy_rules_service_changes_total`

// Each has a row, and so has each of ours.
func TestEveryMetricHasARow(t *testing.T) {
	var want []string
	for _, name := range strings.Fields(kubeProxyMetrics) {
		want = append(want, "kubeproxy_"+name)
	}
	for _, g := range groups() {
		for _, m := range g.metrics {
			want = append(want, m.name)
		}
	}
	rows := mustReadRows(t)
	for _, name := range want {
		if !slices.ContainsFunc(rows, func(r row) bool { return r.Name == name }) {
			t.Errorf("test/compat/metrics.yaml has no row for %s", name)
		}
	}
}

// row is one of test/compat/metrics.yaml.
type row struct{ Name, Labels, State string }

func mustReadRows(t *testing.T) []row {
	t.Helper()
	text, err := os.ReadFile("../../test/compat/metrics.yaml")
	lab.Must(t, err)
	var rows []row
	lab.Must(t, yaml.Unmarshal(text, &rows))

	return rows
}

// compare compares labels by name.
func compare(t *testing.T, where string, want, got map[string]string) {
	t.Helper()
	for name, labels := range want {
		if l, ok := got[name]; !ok {
			t.Errorf("%s: %s is not shown", where, name)
		} else if l != labels {
			t.Errorf("%s: %s: labels %q, shown with %q", where, name, labels, l)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s: %s is not in it", where, name)
		}
	}
}

// shownBy returns the labels of what the exposition shows, by name.
func shownBy(t *testing.T, prefix string) map[string]string {
	t.Helper()
	shown := make(map[string]string)
	series := regexp.MustCompile(`(?m)^([a-z_]+)(?:\{([^}]*)\})? `)
	label := regexp.MustCompile(`([a-z_]+)="`)
	for _, match := range series.FindAllStringSubmatch(string(exposition(t)), -1) {
		name, isBucket := strings.CutSuffix(match[1], "_bucket")
		if strings.HasSuffix(name, "_sum") || strings.HasSuffix(name, "_count") || !strings.HasPrefix(name, prefix) {
			continue
		}
		var labels []string
		for _, l := range label.FindAllStringSubmatch(match[2], -1) {
			if !isBucket || l[1] != "le" {
				labels = append(labels, l[1])
			}
		}
		slices.Sort(labels)
		shown[name] = strings.Join(labels, " ")
	}

	return shown
}
