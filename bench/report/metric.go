package report

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

// metricOf returns a metric by its name. One that is not in the table has just
// that.
func metricOf(name string) Metric {
	for _, metric := range Metrics {
		if metric.Name == name {
			return metric
		}
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
	text := formatRatio(ratio.Median) + " × " + rival + formatRange(ratio)
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
