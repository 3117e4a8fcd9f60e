package report

import (
	"fmt"
	"slices"
	"strings"
)

// caseTable is the table of one case with one number of Services.
type caseTable struct {
	view  *view
	scope key  // services and name
	of    Case // name
	sides []string
}

// table returns the table. Columns are sides, and rows are paths, for each
// metric.
func (c *caseTable) table() table {
	t := table{title: c.of.Title, header: []string{""}}
	t.header = append(t.header, c.sides...)
	t.header = append(t.header, "Sluice is")
	for _, name := range c.view.metrics(c.scope) {
		metric := metricOf(name)
		paths := c.view.paths(c.scope)
		if slices.Equal(paths, []string{""}) {
			t.rows = append(t.rows, c.row(metric, "", metric.describe(c.of)))

			continue
		}
		t.rows = append(t.rows, row{heading: metric.describe(c.of)})
		for _, path := range paths {
			t.rows = append(t.rows, c.row(metric, path, "  "+pathOf(path).Title))
		}
	}
	t.notes = c.notes()

	return t
}

// row returns what all sides have of a metric on a path.
func (c *caseTable) row(metric Metric, path, title string) row {
	k := c.scope
	k.metric, k.path = metric.Name, path
	cells := []cell{{title}}
	var comparison cell
	for _, side := range c.sides {
		k.side = side
		cells = append(cells, c.cell(k))
		if isRival(side) {
			k.side = Sluice
			if text := metric.compare(c.view.values.toSide(k, side), side); text != "" {
				comparison = append(comparison, text)
			}
		}
	}

	return row{cells: append(cells, comparison)}
}

// cell returns a value and what it comes to beside both controls.
func (c *caseTable) cell(k key) cell {
	if !mayHave(k) {
		return cell{""}
	}
	spread := c.view.values.spread(k)
	if spread.Rounds == 0 {
		return cell{"-"}
	}
	text := formatSpread(spread)
	if rounds := c.view.rounds(k); spread.Rounds != rounds {
		text += fmt.Sprintf(" [%d of %d]", spread.Rounds, rounds)
	}
	lines := cell{text}
	if ratio := c.view.values.toRef(k); ratio.Rounds > 0 {
		lines = append(lines, formatRatio(ratio.Median)+" × ref"+formatRange(ratio))
	}
	if ratio := c.view.values.toDirect(k); ratio.Rounds > 0 {
		lines = append(lines, formatRatio(ratio.Median)+" × direct"+formatRange(ratio))
	}

	return lines
}

// mayHave says whether a side can have a value: where there is no proxy there
// is no Service, and only Sluice has maps.
func mayHave(k key) bool {
	only := metricOf(k.metric).Only
	if k.side == Ref && pathOf(k.path).Control != "" {
		return false
	}

	return only == "" || only == k.side
}

// notes say why values are missing.
func (c *caseTable) notes() []string {
	var notes []string
	add := func(note string) {
		if !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	for _, gap := range c.view.run.Gaps {
		if gap.Services == c.scope.services && gap.Case == c.scope.name {
			who := slices.DeleteFunc([]string{gap.Side, gap.Path}, func(word string) bool { return word == "" })
			who = append(who, fmt.Sprintf("round %d", gap.Round+1))
			add("missing: " + strings.Join(who, ", ") + ": " + gap.Why)
		}
	}
	why := "not measured"
	if c.view.run.Interrupted {
		why = "not reached, the run was interrupted"
	}
	for _, k := range c.unexplained() {
		add("missing: " + strings.Join([]string{k.side, metricOf(k.metric).Title}, ", ") + ": " + why)
	}

	return notes
}

// unexplained returns what there is neither a value nor a gap of.
func (c *caseTable) unexplained() []key {
	var missing []key
	for _, metric := range c.view.metrics(c.scope) {
		for _, path := range c.view.paths(c.scope) {
			for _, side := range c.sides {
				k := key{c.scope.services, c.scope.name, path, side, metric}
				explains := func(gap Gap) bool { return gap.covers(k) }
				if mayHave(k) && c.view.values[k] == nil && !slices.ContainsFunc(c.view.run.Gaps, explains) {
					missing = append(missing, k)
				}
			}
		}
	}

	return missing
}
