package report

import (
	"fmt"
	"slices"
	"strings"
)

// bound is what a target is measured against.
type bound int

const (
	ofRef    bound = iota // as many times the value of ref
	ofDirect              // as many times the value of direct, at the same side
	noise                 // as ref, or no worse than the rounds of ref itself
	absolute              // a value
)

// target is one of those that issue 5 sets.
type target struct {
	title              string
	name, path, metric string
	against            bound
	limit              float64 // at most, or at least where more is better; none for noise
	// before is what kube-proxy v1.36.3 had in the issue, with iptables and
	// nftables, 10,000 Services and 2 endpoints each.
	before string
}

// issueTargets are the targets of issue 5.
var issueTargets = []target{
	{"connect p50, first ClusterIP", Connect, ServiceFirst, P50, ofRef, 1.05, ""},
	{"connect p50, last ClusterIP", Connect, ServiceLast, P50, ofRef, 1.05, "8.8 / 1.44"},
	{"connections/s, first ClusterIP", Connect, ServiceFirst, Rate, ofRef, 0.97, ""},
	{"connections/s, last ClusterIP", Connect, ServiceLast, Rate, ofRef, 0.97, "0.40 / 0.90"},
	{"CPU for each connection, first ClusterIP", Connect, ServiceFirst, CPU, ofRef, 1.03, ""},
	{"CPU for each connection, last ClusterIP", Connect, ServiceLast, CPU, ofRef, 1.03, "2.70 / 1.16"},
	{"UDP, new socket each, first ClusterIP", UDPNew, ServiceFirst, Rate, ofRef, 0.95, ""},
	{"UDP, new socket each, last ClusterIP", UDPNew, ServiceLast, Rate, ofRef, 0.95, "0.23 / 0.92"},
	{"requests/s on open connections, ClusterIP", Exchange, ServiceFirst, Rate, noise, 0, ""},
	{"bulk throughput, ClusterIP", Bulk, ServiceRemote, Throughput, noise, 0, ""},
	{"no Service: connect p50, pod to pod", Connect, Direct, P50, noise, 0, "14.6 / 1.42"},
	{"no Service: connections/s, pod to pod", Connect, Direct, Rate, noise, 0, ""},
	{"no Service: connections/s, from outside to a pod", Connect, OutsideNear, Rate, noise, 0, ""},
	{"no Service: connections/s, forwarded", Connect, Forwarded, Rate, noise, 0, ""},
	{"no Service: small datagrams/s, forwarded", Datagrams, Forwarded, Packets, noise, 0, ""},
	{"connections/s, NodePort to a remote backend", Connect, NodePortFar, Rate, ofDirect, 0.85, "0.22 / 0.72"},
	{"endpoint change p50, quiet, from the API write", ChangeQuiet, "", WriteP50, absolute, 2, "918 / 5,360"},
	{"endpoint change p99, quiet, from the API write", ChangeQuiet, "", WriteP99, absolute, 5, ""},
	{"endpoint change p50, quiet, from the API event", ChangeQuiet, "", EventP50, absolute, 2, ""},
	{"endpoint change p99, quiet, from the API event", ChangeQuiet, "", EventP99, absolute, 5, ""},
	{"endpoint change p50, churn, from the API write", ChangeChurn, "", WriteP50, absolute, 2, ""},
	{"endpoint change p99, churn, from the API write", ChangeChurn, "", WriteP99, absolute, 5, ""},
	{"endpoint change p50, churn, from the API event", ChangeChurn, "", EventP50, absolute, 2, ""},
	{"endpoint change p99, churn, from the API event", ChangeChurn, "", EventP99, absolute, 5, ""},
	{"cold start", Start, "", StartTime, absolute, 1, "64.7 (legacy 2.3) / 17.2"},
	{"memory of the agent", Memory, "", RSS, absolute, 80, "174 / 186"},
	{"CPU for 1,000 endpoint updates", Updates, "", CPUThousand, absolute, 0.1, "6.4 / 12.0"},
}

// targets returns the table of the issue's targets: what Sluice has, and what
// kube-proxy has in this run with the most Services.
func (v *view) targets() table {
	t := table{title: "Targets of issue 5", header: []string{"target", "bound", "kube-proxy in the issue"}}
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
	t.header = append(t.header, "verdict")
	for _, target := range issueTargets {
		t.rows = append(t.rows, v.targetRow(target, services, rivals))
	}
	t.notes = []string{"In the issue: iptables / nftables, 10,000 Services with 2 endpoints each. In noise: the quartiles of the ratios to ref include 1, " +
		"or their median is no further from 1 than a round of ref is from the median of ref."}

	return t
}

func (v *view) targetRow(goal target, services []int, rivals []string) row {
	cells := []cell{{goal.title}, {goal.bound()}, {goal.before}}
	var missed, missing []string
	for _, count := range services {
		spread := v.measure(goal, count, Sluice)
		cells = append(cells, cell{goal.format(spread)})
		switch {
		case spread.Rounds == 0:
			missing = append(missing, groupThousands(float64(count)))
		case !v.meets(goal, spread, count):
			missed = append(missed, groupThousands(float64(count)))
		}
	}
	for _, side := range rivals {
		cells = append(cells, cell{goal.format(v.measure(goal, services[len(services)-1], side))})
	}
	verdict := "met"
	switch {
	case len(missing) == len(services):
		verdict = "not measured"
	case len(missed) > 0:
		verdict = "MISSED at " + strings.Join(missed, " and ")
	case len(missing) > 0:
		verdict = "met, not measured at " + strings.Join(missing, " and ")
	}

	return row{cells: append(cells, cell{verdict})}
}

// measure returns what a side has of what a target is about.
func (v *view) measure(goal target, services int, side string) Spread {
	k := key{services, goal.name, goal.path, side, goal.metric}
	switch goal.against {
	case ofDirect:
		return v.values.toDirect(k)
	case absolute:
		return v.values.spread(k)
	default:
		return v.values.toRef(k)
	}
}

// meets says whether what was measured meets the target. There must be a value.
func (v *view) meets(goal target, spread Spread, services int) bool {
	limit := goal.limit
	higher := metricOf(goal.metric).Higher
	if goal.against == noise {
		ref := v.values.spread(key{services, goal.name, controlOf(goal.path), Ref, goal.metric})
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
func (t target) bound() string {
	sign := "≤ "
	metric := metricOf(t.metric)
	if metric.Higher {
		sign = "≥ "
	}
	switch t.against {
	case ofRef:
		return sign + formatRatio(t.limit) + " × ref"
	case ofDirect:
		return sign + formatRatio(t.limit) + " × direct"
	case noise:
		return "= ref, in noise"
	default:
		return fmt.Sprintf("%s%g %s", sign, t.limit, metric.Unit)
	}
}

// format writes what was measured.
func (t target) format(spread Spread) string {
	switch {
	case spread.Rounds == 0:
		return "-"
	case t.against == absolute:
		return formatSpread(spread)
	default:
		return formatRatio(spread.Median) + formatRange(spread)
	}
}
