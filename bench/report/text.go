package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// reading is how to read the tables, a sentence each.
var reading = []string{
	"A value is the median of all rounds; ± is half of what lies between the quartiles. [2 of 3]: only 2 of 3 rounds have it. -: missing, why is said below the table.",
	"× ref: beside a node on which there never was a proxy, in the same round. × direct: beside the same endpoints by their own addresses, on the same node. In brackets: quartiles of the rounds' ratios.",
	"Sluice is: + better, - worse than kube-proxy in that mode, of whose value it has as many times, in the same round and on the same way; = level: the quartiles of the rounds' ratios include 1.",
}

// WriteText writes everything but the single samples, for people.
func (r *Run) WriteText(w io.Writer) error {
	out := bufio.NewWriter(w)
	for _, line := range r.describe() {
		write(out, line, "\n")
	}
	write(out, "\n", strings.Join(reading, "\n"), "\n\n")
	v := r.view()
	v.goals().writeText(out)
	for _, services := range v.services() {
		title := countServices(services)
		write(out, title, "\n", strings.Repeat("═", len(title)), "\n\n")
		for _, t := range v.tables(services) {
			t.writeText(out)
		}
	}

	return out.Flush()
}

// WriteMarkdown writes the same, as sections of a document. Given numbers of
// Services, it leaves out the tables of all others.
func (r *Run) WriteMarkdown(w io.Writer, only ...int) error {
	out := bufio.NewWriter(w)
	for _, line := range append(r.describe(), reading...) {
		write(out, "- ", escapeMarkdown(line), "\n")
	}
	write(out, "\n")
	v := r.view()
	v.goals().writeMarkdown(out, "##")
	for _, services := range v.services() {
		if len(only) > 0 && !slices.Contains(only, services) {
			continue
		}
		write(out, "## ", countServices(services), "\n\n")
		for _, t := range v.tables(services) {
			t.writeMarkdown(out, "###")
		}
	}

	return out.Flush()
}

// tables returns a table for each case.
func (v *view) tables(services int) []table {
	var tables []table
	for _, name := range v.cases(services) {
		scope := key{services: services, name: name}
		c := caseTable{view: v, scope: scope, of: caseOf(name), sides: v.sides(scope)}
		tables = append(tables, c.table())
	}
	if tables == nil {
		return []table{{title: "Nothing was measured."}}
	}

	return tables
}

func countServices(services int) string {
	if services == 1 {
		return "1 Service"
	}

	return groupThousands(float64(services)) + " Services"
}

// describe says where and how the run was made, and what went wrong.
func (r *Run) describe() []string {
	e := r.Environment
	machine := fmt.Sprintf("%s, %d cores, %.1f GiB, Linux %s", e.Machine.CPU, e.Machine.Cores, float64(e.Machine.Memory)/(1<<30), e.Machine.Kernel)
	if e.Machine.Hypervisor {
		machine += ", a virtual machine"
	}
	var versions []string
	for program, version := range e.Versions {
		versions = append(versions, program+": "+version)
	}
	slices.Sort(versions)
	lines := []string{
		"Machine: " + machine,
		"Versions: " + strings.Join(append(versions, "built with "+e.Machine.Go), "; "),
		fmt.Sprintf("Run: %s, %s in %s", e.Command, e.Started.UTC().Format("2006-01-02 15:04 MST"), e.Elapsed.Round(time.Second)),
		fmt.Sprintf("Traffic: %d rounds of %s in turn, %v of each after %v of warm-up; %d clients; arrivals at %s/s",
			e.Rounds, strings.Join(e.Sides, ", "), e.Duration, e.WarmUp, e.Clients, groupThousands(float64(e.Rate))),
		fmt.Sprintf("Control plane: %d rounds; %d changes of each kind are timed; churn of %d changes/s; every Service has %d endpoints",
			e.Starts, e.Changes, e.Churn, e.Endpoints),
	}
	lines = append(lines, e.Notes...)
	if e.Rounds == 1 || e.Starts == 1 {
		lines = append(lines, "What was measured in one round only does not tell how much of it is chance.")
	}
	if r.Interrupted {
		lines = append(lines, "INTERRUPTED: what was not reached is missing.")
	}
	for _, err := range r.Errors {
		lines = append(lines, "ERROR: "+strings.ReplaceAll(strings.TrimSpace(err), "\n", " / "))
	}

	return lines
}
