package report

import "slices"

// chart is what one plot shows: a metric of each side, by the number of Services.
type chart struct {
	file    string // without its suffix
	title   string
	y       string   // title of the axis
	notes   []string // what the words of the legend mean, in short lines
	name    string   // of the case
	against bound    // ofRef, ofDirect or absolute
	curves  []curve
}

// curve is a line of each side. The first of a chart is drawn solid, the second
// dashed.
type curve struct {
	path, metric string
	suffix       string // what tells it from the other in the legend
}

var (
	lastAndFirst = []curve{{ServiceLast, "", ", last"}, {ServiceFirst, "", ", first"}}
	firstNote    = []string{"first, last: of all Services."}
	refNote      = []string{"ref: a node without a proxy,", "endpoints dialled directly."}
	besideRef    = []string{"1: as a node without a proxy,", "endpoints dialled directly."}
)

// charts are all plots.
var charts = []chart{
	{"connect-p50", "Latency of connect() to a ClusterIP", "median latency, µs", slices.Concat(firstNote, refNote),
		Connect, absolute, of(P50, lastAndFirst)},
	{"connect-rate", "TCP connections per second through a ClusterIP", "rate ÷ rate of ref", slices.Concat(firstNote, besideRef),
		Connect, ofRef, of(Rate, lastAndFirst)},
	{"connect-cpu", "CPU for each TCP connection through a ClusterIP", "busy time of all cores per connection, µs", slices.Concat(firstNote, refNote),
		Connect, absolute, of(CPU, lastAndFirst)},
	{"no-service", "What the proxy costs connections that are no Service's (pod to pod)", "rate ÷ rate of ref", besideRef,
		Connect, ofRef, []curve{{Direct, Rate, ""}}},
	{"udp-new", "UDP through a ClusterIP, a new socket for each request", "rate ÷ rate of ref", slices.Concat(firstNote, besideRef),
		UDPNew, ofRef, of(Rate, lastAndFirst)},
	{"nodeport-far", "TCP connections per second from outside, NodePort → pod on the other node", "rate ÷ rate of the pod dialled directly",
		[]string{"1: the same pod, dialled", "directly: one hop less."}, Connect, ofDirect, []curve{{NodePortFar, Rate, ""}}},
	{"change-quiet", "Endpoint replaced: until a client gets the new one; all else quiet", "time from the API write, ms", nil,
		ChangeQuiet, absolute, []curve{{"", WriteP50, ", p50"}, {"", WriteP99, ", p99"}}},
	{"change-churn", "Endpoint replaced: until a client gets the new one; many others change", "time from the API write, ms", nil,
		ChangeChurn, absolute, []curve{{"", WriteP50, ", p50"}, {"", WriteP99, ", p99"}}},
	{"updates-cpu", "CPU of the proxy and its children for 1,000 endpoint updates", "CPU time, s", nil,
		Updates, absolute, []curve{{"", CPUThousand, ""}}},
	{"start", "Cold start: from the start of the process until all Services are programmed", "time, s", nil,
		Start, absolute, []curve{{"", StartTime, ""}}},
	{"memory", "Memory of the proxy", "resident, MiB", []string{"peak: at most, so far."},
		Memory, absolute, []curve{{"", RSS, ""}, {"", PeakRSS, ", peak"}}},
	{"kernel-memory", "Memory of the proxy's tables in the kernel", "MiB", nil,
		Memory, absolute, []curve{{"", KernelMemory, ""}}},
}

// of returns curves of a metric.
func of(metric string, curves []curve) []curve {
	curves = slices.Clone(curves)
	for i := range curves {
		curves[i].metric = metric
	}

	return curves
}

// series is a line of a plot.
type series struct {
	side   string
	title  string
	dashed bool
	x      []float64 // numbers of Services
	y      []Spread  // a value for each, of at least one round
}

// series returns the lines of a chart that have values.
func (v *view) series(c chart) []series {
	var all []series
	for _, side := range v.allSides() {
		for i, curve := range c.curves {
			line := series{side: side, title: side + curve.suffix, dashed: i > 0}
			path := curve.path
			if side == Ref {
				// Nobody measures Services there.
				if path, line.title = controlOf(path), Ref; i > 0 || c.against != absolute {
					continue
				}
			}
			for _, services := range v.services() {
				spread := v.measure(goal{name: c.name, path: path, metric: curve.metric, against: c.against}, services, side)
				if spread.Rounds > 0 {
					line.x = append(line.x, float64(max(services, 1))) // its axis is logarithmic
					line.y = append(line.y, spread)
				}
			}
			if len(line.x) > 0 {
				all = append(all, line)
			}
		}
	}

	return all
}
