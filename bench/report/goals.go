package report

import (
	"fmt"
	"slices"
	"strings"
)

// bound is what a goal is compared with.
type bound int

const (
	ofRef    bound = iota // as many times the value of ref
	ofDirect              // as many times the value of direct, at the same side
	noise                 // as ref, or no worse than the rounds of ref itself
	absolute              // a value
)

// goal is one that docs/performance.md states.
type goal struct {
	title              string
	name, path, metric string
	against            bound
	limit              float64 // at most, or at least where more is better; none for noise
	// limitedBy is what the value depends on. The report has it where the goal is not reached.
	limitedBy string
}

// What limits a value that is short of its goal.
const (
	programsAtConnect = "the program at connect() translates the address, and programs of devices see each packet of the handshake"
	programsAtSocket  = "the programs at connect() and at the end of the socket run once for each exchange"
	programsOfDevices = "programs of devices look at each packet before they let it pass"
	twoTranslations   = "each packet is translated on its way in and out of the node, which is one hop more than direct"
	sharedCores       = "client, server and both nodes share the cores, so that wake-ups and copies outweigh what a proxy adds"
	apiServer         = "etcd and the API server take most of the time before the event"
	slowestSample     = "the agent has to be woken up; p99 of few changes is the slowest one"
	verifier          = "the kernel verifies the programs, whatever the number of Services; the API server sends 2 N objects on the same cores"
	mirrors           = "the agent keeps the endpoints, and a copy of what it has written to the maps"
	wakeUps           = "each update wakes the agent up, reads and decodes the event with cold caches"
)

// goals are those of docs/performance.md, in its order.
var goals = []goal{
	{"connect p50, first ClusterIP", Connect, ServiceFirst, P50, ofRef, 1.05, programsAtConnect},
	{"connect p50, last ClusterIP", Connect, ServiceLast, P50, ofRef, 1.05, programsAtConnect},
	{"connections/s, first ClusterIP", Connect, ServiceFirst, Rate, ofRef, 0.97, programsAtConnect},
	{"connections/s, last ClusterIP", Connect, ServiceLast, Rate, ofRef, 0.97, programsAtConnect},
	{"CPU for each connection, first ClusterIP", Connect, ServiceFirst, CPU, ofRef, 1.03, programsAtConnect},
	{"CPU for each connection, last ClusterIP", Connect, ServiceLast, CPU, ofRef, 1.03, programsAtConnect},
	{"UDP, new socket each, first ClusterIP", UDPNew, ServiceFirst, Rate, ofRef, 0.95, programsAtSocket},
	{"UDP, new socket each, last ClusterIP", UDPNew, ServiceLast, Rate, ofRef, 0.95, programsAtSocket},
	{"requests/s on open connections, ClusterIP", Exchange, ServiceFirst, Rate, noise, 0, sharedCores},
	{"bulk throughput, ClusterIP", Bulk, ServiceRemote, Throughput, noise, 0, sharedCores},
	{"no Service: connect p50, pod to pod", Connect, Direct, P50, noise, 0, programsOfDevices},
	{"no Service: connections/s, pod to pod", Connect, Direct, Rate, noise, 0, programsOfDevices},
	{"no Service: connections/s, from outside to a pod", Connect, OutsideNear, Rate, noise, 0, programsOfDevices},
	{"no Service: connections/s, forwarded", Connect, Forwarded, Rate, noise, 0, programsOfDevices},
	{"no Service: small datagrams/s, forwarded", Datagrams, Forwarded, Packets, noise, 0, programsOfDevices},
	{"connections/s, NodePort to a remote backend", Connect, NodePortFar, Rate, ofDirect, 0.85, twoTranslations},
	{"endpoint change p50, quiet, from the API write", ChangeQuiet, "", WriteP50, absolute, 2, apiServer},
	{"endpoint change p99, quiet, from the API write", ChangeQuiet, "", WriteP99, absolute, 5, apiServer},
	{"endpoint change p50, quiet, from the API event", ChangeQuiet, "", EventP50, absolute, 2, slowestSample},
	{"endpoint change p99, quiet, from the API event", ChangeQuiet, "", EventP99, absolute, 5, slowestSample},
	{"endpoint change p50, churn, from the API write", ChangeChurn, "", WriteP50, absolute, 2, apiServer},
	{"endpoint change p99, churn, from the API write", ChangeChurn, "", WriteP99, absolute, 5, apiServer},
	{"endpoint change p50, churn, from the API event", ChangeChurn, "", EventP50, absolute, 2, slowestSample},
	{"endpoint change p99, churn, from the API event", ChangeChurn, "", EventP99, absolute, 5, slowestSample},
	{"cold start", Start, "", StartTime, absolute, 1, verifier},
	{"memory of the agent", Memory, "", RSS, absolute, 80, mirrors},
	{"CPU for 1,000 endpoint updates", Updates, "", CPUThousand, absolute, 0.1, wakeUps},
}

// goals returns the table of goals: the values of Sluice, and those of kube-proxy with
// the most Services.
func (v *view) goals() section {
	t := section{title: "Goals", header: []string{"goal", "bound"}}
	services := v.services()
	for _, count := range services {
		t.header = append(t.header, "sluice, N = "+groupThousands(float64(count)))
	}
	rivals := slices.DeleteFunc(v.allSides(), func(side string) bool { return !isRival(side) })
	if len(services) > 0 {
		for _, side := range rivals {
			t.header = append(t.header, side+", N = "+groupThousands(float64(services[len(services)-1])))
		}
	}
	t.header = append(t.header, "result")
	short, limits := make(map[string][]string), []string(nil) // goals by what limits them, and that in order
	for _, g := range goals {
		row := v.goalRow(g, services, rivals)
		t.rows = append(t.rows, row)
		if strings.HasPrefix(row[len(row)-1], "short") {
			if short[g.limitedBy] == nil {
				limits = append(limits, g.limitedBy)
			}
			short[g.limitedBy] = append(short[g.limitedBy], g.title)
		}
	}
	for _, limit := range limits {
		t.notes = append(t.notes, "short of: "+strings.Join(short[limit], "; ")+". What limits it: "+limit+".")
	}
	t.notes = append(t.notes, "= ref, in noise: the quartiles of the ratios to ref include 1, "+
		"or their median is no further from 1 than a round of ref is from the median of ref.")

	return t
}

func (v *view) goalRow(g goal, services []int, rivals []string) []string {
	cells := []string{g.title, g.bound()}
	var missed, missing []string
	for _, count := range services {
		spread := v.measure(g, count, Sluice)
		cells = append(cells, g.format(spread))
		switch {
		case spread.Rounds == 0:
			missing = append(missing, groupThousands(float64(count)))
		case !v.reaches(g, spread, count):
			missed = append(missed, groupThousands(float64(count)))
		}
	}
	for _, side := range rivals {
		cells = append(cells, g.format(v.measure(g, services[len(services)-1], side)))
	}
	result := "reached"
	switch {
	case len(missing) == len(services):
		result = "not measured"
	case len(missed) > 0:
		result = "short of it at " + strings.Join(missed, " and ")
	case len(missing) > 0:
		result = "reached, not measured at " + strings.Join(missing, " and ")
	}

	return append(cells, result)
}

// measure returns what a side has of the metric of a goal.
func (v *view) measure(g goal, services int, side string) Spread {
	k := key{services, g.name, g.path, side, g.metric}
	switch g.against {
	case ofDirect:
		return v.values.toDirect(k)
	case absolute:
		return v.values.spread(k)
	default:
		return v.values.toRef(k)
	}
}

// reaches reports whether what was measured reaches the goal. There must be a value.
func (v *view) reaches(g goal, spread Spread, services int) bool {
	limit := g.limit
	higher := metricOf(g.metric).Higher
	if g.against == noise {
		ref := v.values.spread(key{services, g.name, controlOf(g.path), Ref, g.metric})
		if spread.Rounds > 1 && spread.Low <= 1 && 1 <= spread.High {
			return true
		}
		limit = 1 + ref.noise()
		if higher {
			limit = 1 - ref.noise()
		}
	}
	if higher {
		return spread.Median >= limit
	}

	return spread.Median <= limit
}

// bound writes the bound.
func (g goal) bound() string {
	sign := "≤ "
	metric := metricOf(g.metric)
	if metric.Higher {
		sign = "≥ "
	}
	switch g.against {
	case ofRef:
		return sign + formatRatio(g.limit) + " × ref"
	case ofDirect:
		return sign + formatRatio(g.limit) + " × direct"
	case noise:
		return "= ref, in noise"
	default:
		return fmt.Sprintf("%s%g %s", sign, g.limit, metric.Unit)
	}
}

// format writes a measured value or ratio.
func (g goal) format(spread Spread) string {
	switch {
	case spread.Rounds == 0:
		return "-"
	case g.against == absolute:
		return spread.format()
	default:
		return spread.formatRatio("")
	}
}
