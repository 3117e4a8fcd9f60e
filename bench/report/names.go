package report

import (
	"fmt"
	"math"
	"slices"

	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

// Case is something that is done and measured.
type Case struct {
	Name  string `json:"name"`
	Title string `json:"title"` // a sentence, without its full stop
	// Each is the unit of work that [Rate] and [CPU] count.
	Each string `json:"each,omitempty"`
}

// Names of cases.
const (
	Connect         = "connect"
	Arrivals        = "arrivals"
	SustainedClient = "sustained-client"
	SustainedServer = "sustained-server"
	SustainedReset  = "sustained-reset"
	FirstTCP        = "first-packet-tcp"
	FirstUDP        = "first-packet-udp"
	Exchange        = "exchange"
	Bulk            = "bulk"
	Datagrams       = "datagrams"
	UDPConnected    = "udp-connected"
	UDPUnconnected  = "udp-unconnected"
	UDPNew          = "udp-new"
	ChangeQuiet     = "change-quiet"
	ChangeChurn     = "change-churn"
	Updates         = "updates"
	Start           = "start"
	Memory          = "memory"
	Profile         = "profile"
)

// Cases are all cases, in the order of the tables.
var Cases = []Case{
	{Connect, "TCP: connect, one request, one response, close; all clients at once, each as fast as it can; latency of connect()", "connection"},
	{Arrivals, "TCP: connections at a fixed rate; latency of connect(), from the moment at which it was due", "connection"},
	{SustainedClient, "TCP: as connect, but for long, and from 128 addresses; the client closes", "connection"},
	{SustainedServer, "TCP: as connect, but for long, and from 128 addresses; the server closes", "connection"},
	{SustainedReset, "TCP: as connect, but for long, and from 128 addresses; the client resets", "connection"},
	{FirstTCP, "First packet, TCP: one connection at a time, with a pause between two; latency of connect()", "connection"},
	{FirstUDP, "First packet, UDP: one new socket at a time, with a pause between two; latency of the whole exchange", "exchange"},
	{Exchange, "TCP: requests and responses on open connections, one for each client", "exchange"},
	{Bulk, "TCP: bulk throughput of one open connection", ""},
	{Datagrams, "UDP: datagrams of 64 bytes, as many as get through", ""},
	{UDPConnected, "UDP: requests and responses on connected sockets", "exchange"},
	{UDPUnconnected, "UDP: requests and responses on unconnected sockets", "exchange"},
	{UDPNew, "UDP: a new socket for each request and response, as for DNS; latency of the whole exchange", "exchange"},
	{ChangeQuiet, "An endpoint is replaced while nothing else changes: until a client gets the new one", "change"},
	{ChangeChurn, "An endpoint is replaced while many others are: until a client gets the new one", "change"},
	{Updates, "1,000 endpoints are replaced", ""},
	{Start, "Cold start: the first start on a node", ""},
	{Memory, "Memory after a cold start", ""},
	{Profile, "Sluice's programs under the load of \"connect\": runs for each connection, and how long a run is (ns), by the kernel's statistics, which cost each run some 30 ns", ""},
}

func caseOf(name string) Case {
	if i := slices.IndexFunc(Cases, func(c Case) bool { return c.Name == name }); i >= 0 {
		return Cases[i]
	}

	return Case{Name: name, Title: name}
}

// Path is a way from a client to a backend.
type Path struct {
	Name  string `json:"name"`
	Title string `json:"title"` // what it is called in tables
	// Control is the path to the same backends without a Service. It is measured at
	// every side, and at [Ref] it is the only one. Empty: the path is a control.
	Control string `json:"control,omitempty"`
}

// Names of paths. The client is the pod on the node under test, unless it is
// named outside.
const (
	ServiceFirst  = "service-first"  // ClusterIP of the first of N Services
	ServiceLast   = "service-last"   // ClusterIP of the last one
	Direct        = "direct"         // endpoints of a Service in turn, by their own addresses
	ServiceRemote = "service-remote" // ClusterIP of a Service whose only endpoint is on the other node
	DirectRemote  = "direct-remote"  // that endpoint, by its own address

	NodePortNear = "nodeport-near" // from outside, NodePort of the node under test: endpoint on that node
	OutsideNear  = "outside-near"  // from outside, that endpoint by its own address
	NodePortFar  = "nodeport-far"  // from outside, NodePort of the node under test: endpoint on the other node
	OutsideFar   = "outside-far"   // from outside, that endpoint by its own address: one hop less
	Forwarded    = "forwarded"     // from outside, that endpoint by its own address, through the node under test
)

// Paths are all paths, in the order of the tables: controls go first.
var Paths = []Path{
	{Direct, "direct: pod → endpoints", ""},
	{ServiceFirst, "pod → first ClusterIP", Direct},
	{ServiceLast, "pod → last ClusterIP", Direct},
	{DirectRemote, "direct: pod → remote endpoint", ""},
	{ServiceRemote, "pod → ClusterIP, remote", DirectRemote},
	{OutsideNear, "direct: outside → pod here", ""},
	{NodePortNear, "outside → NodePort, local", OutsideNear},
	{OutsideFar, "direct: outside → pod there", ""},
	{Forwarded, "direct: outside → node → pod there", ""},
	{NodePortFar, "outside → NodePort, remote", OutsideFar},
}

func pathOf(name string) Path {
	if i := slices.IndexFunc(Paths, func(p Path) bool { return p.Name == name }); i >= 0 {
		return Paths[i]
	}

	return Path{Name: name, Title: name}
}

// controlOf returns the path that a path is compared with: its control, or itself.
func controlOf(name string) string {
	if control := pathOf(name).Control; control != "" {
		return control
	}

	return name
}

// Metric is a kind of value.
type Metric struct {
	Name  string `json:"name"`
	Title string `json:"title"` // what it is called in tables
	Unit  string `json:"unit"`
	// Higher is true if more is better.
	Higher bool `json:"higherIsBetter"`
	// Better and Worse describe a side with a better, or a worse, value.
	Better string `json:"-"`
	Worse  string `json:"-"`
	// Only is the one side that has this metric; none: all have it.
	Only string `json:"-"`
}

// Names of metrics.
const (
	Rate       = "rate"       // of what the case does
	P50        = "p50"        // latency
	P99        = "p99"        // latency
	Longest    = "longest"    // latency, of all that succeeded
	Slow       = "slow"       // how many took more than 100 ms, of those that succeeded
	Failed     = "failed"     // how many did
	Silence    = "silence"    // how long nothing succeeded, in slots of 100 ms
	CPU        = "cpu"        // busy time of all processors for each thing that the case does
	SoftIRQ    = "softirq"    // part of the busy time that was in soft interrupts
	Throughput = "throughput" // of payload
	CPUPerGbit = "cpu-gbit"   // busy time of all processors
	Packets    = "packets"    // that were received

	WriteP50     = "write-p50"     // from the moment of the API request until a client gets the new endpoint
	WriteP99     = "write-p99"     // likewise
	EventP50     = "event-p50"     // from the moment at which the API server sends the event
	EventP99     = "event-p99"     // likewise
	CPUPerChange = "cpu-change"    // of the proxy and its children
	MapWrites    = "map-writes"    // for each change
	CPUThousand  = "cpu-1000"      // of the proxy and its children, for 1,000 updates
	WatchCPU     = "watch-cpu"     // of a client-go watch that does nothing, for the same updates
	StartTime    = "start-time"    // from the start of the process until all is programmed
	StartCPU     = "start-cpu"     // of the proxy and its children until then
	RSS          = "rss"           // of the proxy, after a while
	PeakRSS      = "peak-rss"      // of the proxy
	KernelMemory = "kernel-memory" // of tables in the kernel
)

// Metrics are all metrics, in the order of the tables.
var Metrics = []Metric{
	{Rate, "rate", "1/s", true, "faster", "slower", ""},
	{Throughput, "throughput", "Gbit/s", true, "faster", "slower", ""},
	{Packets, "packets received", "1/s", true, "faster", "slower", ""},
	{P50, "p50", "µs", false, "faster", "slower", ""},
	{P99, "p99", "µs", false, "faster", "slower", ""},
	{Longest, "longest", "ms", false, "shorter", "longer", ""},
	{Slow, "longer than 100 ms", "", false, "fewer", "more", ""},
	{Failed, "failed", "", false, "fewer", "more", ""},
	{Silence, "nothing succeeded for", "ms", false, "less", "more", ""},
	{CPU, "CPU for each", "µs", false, "cheaper", "dearer", ""},
	{CPUPerGbit, "CPU for each Gbit", "s", false, "cheaper", "dearer", ""},
	{SoftIRQ, "softirq part of the CPU", "%", false, "less", "more", ""},
	{WriteP50, "p50 from the API write", "ms", false, "faster", "slower", ""},
	{WriteP99, "p99 from the API write", "ms", false, "faster", "slower", ""},
	{EventP50, "p50 from the API event", "ms", false, "faster", "slower", ""},
	{EventP99, "p99 from the API event", "ms", false, "faster", "slower", ""},
	{CPUPerChange, "CPU for each change", "ms", false, "cheaper", "dearer", ""},
	{MapWrites, "map writes for each change", "", false, "fewer", "more", Sluice},
	{CPUThousand, "CPU for 1,000 updates", "s", false, "cheaper", "dearer", ""},
	{WatchCPU, "CPU of a bare watch of them", "s", false, "cheaper", "dearer", ""},
	{StartTime, "until all is programmed", "s", false, "faster", "slower", ""},
	{StartCPU, "CPU until then", "s", false, "cheaper", "dearer", ""},
	{RSS, "resident", "MiB", false, "smaller", "larger", ""},
	{PeakRSS, "resident at its peak", "MiB", false, "smaller", "larger", ""},
	{KernelMemory, "tables in the kernel", "MiB", false, "smaller", "larger", ""},
}

func metricOf(name string) Metric {
	if i := slices.IndexFunc(Metrics, func(m Metric) bool { return m.Name == name }); i >= 0 {
		return Metrics[i]
	}

	return Metric{Name: name, Title: name, Better: "less", Worse: "more"}
}

// describe returns the title of a metric in a case, with its unit and which way is better.
func (m Metric) describe(c Case) string {
	unit := m.Unit
	switch {
	case c.Each == "":
	case m.Name == Rate:
		unit = c.Each + "s/s"
	case m.Name == CPU:
		unit += "/" + c.Each
	}
	text := m.Title
	if unit != "" {
		text += ", " + unit
	}
	if m.Higher {
		return text + " (more is better)"
	}

	return text + " (less is better)"
}

// compare describes Sluice beside another side; ratio is Sluice's value divided by that
// side's. It begins with + if Sluice is better, - if it is worse, and = if the quartiles
// of the rounds include 1.
func (m Metric) compare(ratio Spread, rival string) string {
	text := ratio.formatRatio(" × " + rival)
	switch {
	case ratio.Rounds == 0:
		return ""
	case ratio.Low <= 1 && 1 <= ratio.High:
		return "= level: " + text
	case m.Higher == (ratio.Median > 1):
		return "+ " + m.Better + ": " + text
	default:
		return "- " + m.Worse + ": " + text
	}
}

// Names of sides.
const (
	Ref            = "ref"      // a node on which there never was a proxy
	Sluice         = "sluice"   // this project
	Baseline       = "baseline" // another build of it
	IPTables       = "iptables"
	IPTablesLegacy = "iptables-legacy"
	NFTables       = "nftables"
	IPVS           = "ipvs"
)

// Sides are all sides, in the order of the tables. All but the first three are
// modes of kube-proxy.
var Sides = []string{Ref, Sluice, Baseline, IPTables, IPTablesLegacy, NFTables, IPVS}

// isRival reports whether Sluice is compared with a side.
func isRival(side string) bool {
	return side != Ref && side != Sluice
}

// InTurn returns the sides of a round, backwards in every other one, so that the order gives
// none of them an advantage.
func InTurn[T any](sides []T, round int) []T {
	sides = slices.Clone(sides)
	if round%2 == 1 {
		slices.Reverse(sides)
	}

	return sides
}

// inOrder returns each name once: those of a list in its order, then the others.
func inOrder(names, list []string) []string {
	place := func(name string) int {
		if i := slices.Index(list, name); i >= 0 {
			return i
		}

		return len(list)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	slices.SortStableFunc(names, func(a, b string) int { return place(a) - place(b) })

	return names
}

// english writes numbers with commas between thousands.
var english = message.NewPrinter(language.English)

// formatValue writes three or four significant digits: 41,240, 123, 12.3, 1.23, 0.123.
func formatValue(value float64) string {
	size := math.Abs(value)
	switch {
	case size >= 9999.5:
		unit := math.Pow10(int(math.Log10(size)) - 3)

		return groupThousands(math.Round(value/unit) * unit)
	case size >= 99.95:
		return groupThousands(value)
	case size >= 9.995:
		return fmt.Sprintf("%.1f", value)
	case size >= 0.9995 || size == 0:
		return fmt.Sprintf("%.2f", value)
	default:
		return fmt.Sprintf("%.3g", value)
	}
}

// groupThousands writes a whole number.
func groupThousands(value float64) string { return english.Sprintf("%.0f", value) }

// formatRatio writes two decimals, or three digits: 0.97, 1.04, 12.3, 154.
func formatRatio(ratio float64) string {
	switch {
	case ratio >= 99.95:
		return groupThousands(ratio)
	case ratio >= 9.995:
		return fmt.Sprintf("%.1f", ratio)
	case ratio > 0 && ratio < 0.0995:
		return fmt.Sprintf("%.2g", ratio)
	default:
		return fmt.Sprintf("%.2f", ratio)
	}
}
