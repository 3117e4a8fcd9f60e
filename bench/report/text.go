package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// reading explains the tables, a sentence each.
var reading = []string{
	"A value is the median of all rounds; ± is half of what lies between the quartiles. [2 of 3]: only 2 of 3 rounds have it. -: missing, the reason is below the table.",
	"× ref: beside a node on which there never was a proxy, in the same round. × direct: beside the same endpoints by their own addresses, on the same node. In brackets: quartiles of the rounds' ratios.",
	"Sluice is: + better, - worse than kube-proxy in that mode, of whose value it has as many times, in the same round and on the same way; = level: the quartiles of the rounds' ratios include 1.",
}

// WriteText writes everything but the single samples.
func (r *Run) WriteText(w io.Writer) error {
	v := r.view()
	out := strings.Join(r.describe(), "\n") + "\n\n" + strings.Join(reading, "\n") + "\n\n" + v.goals().text()
	for _, services := range v.services() {
		title := countServices(services)
		out += title + "\n" + strings.Repeat("═", len(title)) + "\n\n"
		for _, t := range v.tables(services) {
			out += t.text()
		}
	}
	_, err := io.WriteString(w, out)

	return err
}

// WriteMarkdown writes the same, as sections of a document.
func (r *Run) WriteMarkdown(w io.Writer) error {
	v := r.view()
	out := "- " + strings.Join(append(r.describe(), reading...), "\n- ") + "\n\n" + v.goals().markdown("##")
	for _, services := range v.services() {
		out += "## " + countServices(services) + "\n\n"
		for _, t := range v.tables(services) {
			out += t.markdown("###")
		}
	}
	_, err := io.WriteString(w, out)

	return err
}

func countServices(services int) string {
	if services == 1 {
		return "1 Service"
	}

	return groupThousands(float64(services)) + " Services"
}

// describe returns where and how the run was made, and what went wrong, a line each.
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
		lines = append(lines, "Values of a single round do not show how much of them is chance.")
	}
	if r.Interrupted {
		lines = append(lines, "INTERRUPTED: what was not reached is missing.")
	}
	for _, err := range r.Errors {
		lines = append(lines, "ERROR: "+strings.ReplaceAll(strings.TrimSpace(err), "\n", " / "))
	}

	return lines
}

// view is a run with its values sorted for tables and plots.
type view struct {
	run    *Run
	values values
}

func (r *Run) view() *view { return &view{run: r, values: valuesOf(r.Samples)} }

// services returns all numbers of Services, the smallest first.
func (v *view) services() []int {
	all := slices.Clone(v.run.Environment.Services)
	for k := range v.values {
		all = append(all, k.services)
	}
	for _, gap := range v.run.Gaps {
		all = append(all, gap.Services)
	}
	slices.Sort(all)

	return slices.Compact(all)
}

// allSides returns the sides that were, or should have been, measured.
func (v *view) allSides() []string {
	all := slices.Clone(v.run.Environment.Sides)
	for k := range v.values {
		all = append(all, k.side)
	}

	return inOrder(all, Sides)
}

// tables returns a table for each case with a number of Services.
func (v *view) tables(services int) []section {
	var names []string
	for k := range v.values {
		if k.services == services {
			names = append(names, k.name)
		}
	}
	for _, gap := range v.run.Gaps {
		if gap.Services == services {
			names = append(names, gap.Case)
		}
	}
	var all []section
	for _, name := range inOrder(names, namesOf(Cases, func(c Case) string { return c.Name })) {
		all = append(all, v.caseOf(services, name).section())
	}
	if all == nil {
		return []section{{title: "Nothing was measured."}}
	}

	return all
}

func namesOf[T any](all []T, name func(T) string) []string {
	names := make([]string, len(all))
	for i, one := range all {
		names[i] = name(one)
	}

	return names
}

// caseView is one case with one number of Services.
type caseView struct {
	*view
	services              int
	of                    Case
	metrics, paths, sides []string // that it has, in the order of the tables
}

func (v *view) caseOf(services int, name string) *caseView {
	c := &caseView{view: v, services: services, of: caseOf(name)}
	for k := range v.values {
		if k.services == services && k.name == name {
			c.metrics, c.paths, c.sides = append(c.metrics, k.metric), append(c.paths, k.path), append(c.sides, k.side)
		}
	}
	for _, side := range v.run.Environment.Sides {
		// The node without a proxy has no control plane to measure.
		if side != Ref || !slices.Contains(c.paths, "") {
			c.sides = append(c.sides, side)
		}
	}
	c.metrics = inOrder(c.metrics, namesOf(Metrics, func(m Metric) string { return m.Name }))
	c.paths = inOrder(c.paths, namesOf(Paths, func(p Path) string { return p.Name }))
	c.sides = inOrder(c.sides, Sides)

	return c
}

func (c *caseView) key(path, side, metric string) key {
	return key{c.services, c.of.Name, path, side, metric}
}

// section returns the table of the case: a column for each side, and a row for each
// path below each metric.
func (c *caseView) section() section {
	s := section{title: c.of.Title, header: slices.Concat([]string{""}, c.sides, []string{"Sluice is"})}
	for _, name := range c.metrics {
		metric := metricOf(name)
		if !slices.Equal(c.paths, []string{""}) {
			s.rows = append(s.rows, []string{metric.describe(c.of)})
		}
		for _, path := range c.paths {
			title := metric.describe(c.of)
			if path != "" {
				title = "  " + pathOf(path).Title
			}
			row, comparisons := []string{title}, []string(nil)
			for _, side := range c.sides {
				row = append(row, c.cell(c.key(path, side, name)))
				if ratio := c.values.toSide(c.key(path, Sluice, name), side); isRival(side) && ratio.Rounds > 0 {
					comparisons = append(comparisons, metric.compare(ratio, side))
				}
			}
			s.rows = append(s.rows, append(row, strings.Join(comparisons, "\n")))
		}
	}
	s.notes = c.missing()

	return s
}

// cell returns a value and its ratios to both controls.
func (c *caseView) cell(k key) string {
	spread := c.values.spread(k)
	switch {
	case !mayHave(k):
		return ""
	case spread.Rounds == 0:
		return "-"
	}
	cell, rounds := spread.format(), c.run.Environment.Rounds
	if k.path == "" {
		rounds = c.run.Environment.Starts
	}
	if spread.Rounds != rounds {
		cell += fmt.Sprintf(" [%d of %d]", spread.Rounds, rounds)
	}
	if ratio := c.values.toRef(k); ratio.Rounds > 0 {
		cell += "\n" + ratio.formatRatio(" × ref")
	}
	if ratio := c.values.toDirect(k); ratio.Rounds > 0 {
		cell += "\n" + ratio.formatRatio(" × direct")
	}

	return cell
}

// mayHave reports whether a side can have a value: without a proxy there is no
// Service, and only Sluice has maps.
func mayHave(k key) bool {
	if k.side == Ref && pathOf(k.path).Control != "" {
		return false
	}
	only := metricOf(k.metric).Only

	return only == "" || only == k.side
}

// missing returns why values are missing, a sentence each.
func (c *caseView) missing() []string {
	var notes []string
	add := func(what, why string) {
		if note := "missing: " + what + ": " + why; !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	for _, gap := range c.run.Gaps {
		if gap.Services == c.services && gap.Case == c.of.Name {
			add(join(", ", gap.Side, gap.Path, fmt.Sprintf("round %d", gap.Round+1)), gap.Why)
		}
	}
	why := "not measured"
	if c.run.Interrupted {
		why = "not reached, the run was interrupted"
	}
	for _, metric := range c.metrics {
		for _, path := range c.paths {
			for _, side := range c.sides {
				k := c.key(path, side, metric)
				if mayHave(k) && c.values[k] == nil && !slices.ContainsFunc(c.run.Gaps, func(gap Gap) bool { return gap.covers(k) }) {
					add(side+", "+metricOf(metric).Title, why)
				}
			}
		}
	}

	return notes
}

// Summary returns the results of a case so far, as lines of progress: a line for each
// path, of the first metric, with its ratio to [Ref].
func (r *Run) Summary(services int, name string) []string {
	c := r.view().caseOf(services, name)
	var lines []string
	for _, path := range c.paths {
		metric := metricOf(c.metrics[0])
		line := join(" ", name, path, metric.Title) + ":"
		for _, side := range c.sides {
			k := c.key(path, side, metric.Name)
			if spread := c.values.spread(k); spread.Rounds > 0 {
				line += "  " + side + " " + spread.format()
			}
			if ratio := c.values.toRef(k); ratio.Rounds > 0 {
				line += " (" + formatRatio(ratio.Median) + " × ref)"
			}
		}
		lines = append(lines, line)
	}

	return lines
}

// section is a table with its title above it and notes below it. A row of a single
// cell is the heading of those that follow. Lines of a cell end with \n.
type section struct {
	title  string
	header []string
	rows   [][]string
	notes  []string
}

// table returns a writer of the rows.
func (s section) table() table.Writer {
	t := table.NewWriter()
	style := table.StyleLight
	style.Options = table.Options{SeparateHeader: true}
	style.Format.Header = text.FormatDefault
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	rowOf := func(cells []string) (row table.Row) {
		for _, cell := range cells {
			row = append(row, cell)
		}

		return row
	}
	t.AppendHeader(rowOf(s.header))
	for _, row := range s.rows {
		t.AppendRow(rowOf(row))
	}

	return t
}

func (s section) text() string {
	out := s.title + "\n"
	if len(s.rows) > 0 {
		out += s.table().Render() + "\n"
	}
	for _, note := range s.notes {
		out += "  " + note + "\n"
	}

	return out + "\n"
}

func (s section) markdown(level string) string {
	out := level + " " + s.title + "\n\n"
	if len(s.rows) > 0 {
		out += s.table().RenderMarkdown() + "\n\n"
	}
	for _, note := range s.notes {
		out += "- " + note + "\n"
	}
	if len(s.notes) > 0 {
		out += "\n"
	}

	return out
}
