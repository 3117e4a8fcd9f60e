package main

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bench/report"
)

// Report is a run.
type Report struct {
	Machine     report.Machine
	Command     string
	Started     time.Time
	Elapsed     time.Duration
	Rate        int
	Phases      string
	Interrupted bool
	Errors      []string

	Results []Result
	// Pooled are the results of all rounds together: connections, and the latest times.
	Pooled []Result
}

// write pools the results, and writes the report to a file.
func (r *Report) write(file string) error {
	r.pool()

	return os.WriteFile(file, []byte(r.markdown()), 0o644)
}

// pool fills in the results of all rounds together.
func (r *Report) pool() {
	for _, result := range r.Results {
		i := slices.IndexFunc(r.Pooled, func(p Result) bool {
			return p.Path == result.Path && p.Episode == result.Episode && p.Side == result.Side
		})
		if i < 0 {
			r.Pooled = append(r.Pooled, result)

			continue
		}
		p := &r.Pooled[i]
		p.Healthy.add(result.Healthy)
		p.During.add(result.During)
		p.After.add(result.After)
		p.Into, p.Until = p.Into+result.Into, max(p.Until, result.Until)
		p.Probes, p.PassedOver, p.Wrong = p.Probes+result.Probes, p.PassedOver+result.PassedOver, p.Wrong+result.Wrong
		if p.Back == nil || result.Back == nil {
			p.Back = nil
		} else {
			p.Back = new(max(*p.Back, *result.Back))
		}
	}
}

// reading explains the columns.
var reading = fmt.Sprintf(`- failed: of the connections that began in the episode, those that got no connection (for UDP: no answer). lost: that got one, but no answer.
- p50, p99, p99.9, longest: time of connect, for UDP until the answer; of all that began in the episode, where those that failed took longer than any other.
- into: new connections that went to those that are hit, but for probes, and when the last of them did after the begin.
- passed over: how often one of those that are hit got none of %d new connections in a row; wrong: how often another one did.
- back: when, after the episode, the last of those that were hit got its share again.
- after: failed, and p99.9, of those that began after the episode.
`, many)

// markdown returns a table for each path.
func (r *Report) markdown() string {
	var out strings.Builder
	out.WriteString("# Backends that die: every figure of the run\n\nWhat it means is in [performance.md](../performance.md#backends-that-die).\n\n")
	fmt.Fprintf(&out, "%s, %d cores, Linux %s; `%s`, %s, %v; %d connections a second; %s.\n\n",
		r.Machine.CPU, r.Machine.Cores, r.Machine.Kernel, r.Command, r.Started.UTC().Format("2006-01-02 15:04 MST"), r.Elapsed.Round(time.Second), r.Rate, r.Phases)
	if r.Interrupted {
		out.WriteString("INTERRUPTED: what was not reached is missing.\n\n")
	}
	for _, err := range r.Errors {
		fmt.Fprintf(&out, "ERROR: %s\n\n", err)
	}
	out.WriteString(reading)
	for _, e := range episodes {
		fmt.Fprintf(&out, "- %s: %s.\n", e.name, e.title)
	}
	fmt.Fprintf(&out, "\n## Goals\n\n| | | at most (`eject`, `resteer`) | %s | short of it |\n|---|---|---|%s---|\n", strings.Join(sides, " | "), strings.Repeat("---|", len(sides)))
	for _, p := range paths {
		out.WriteString(strings.Join(r.goalRows(p), ""))
	}
	for _, p := range paths {
		found := slices.DeleteFunc(slices.Clone(r.Pooled), func(r Result) bool { return r.Path != p.name })
		if len(found) == 0 {
			continue
		}
		fmt.Fprintf(&out, "\n## %s\n\n%s\n\n", p.name, p.title)
		out.WriteString("| episode | side | failed | lost | p50 | p99 | p99.9 | longest | into, until | probes | passed over | wrong | back | after |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
		for _, f := range found {
			back := "-"
			if f.Back != nil {
				back = f.Back.String()
			}
			fmt.Fprintf(&out, "| %s | %s | %d of %d | %d | %v | %v | %v | %v | %d, %v | %d | %d | %d | %s | %d, %v |\n",
				f.Episode, f.Side, f.During.Failed, f.During.Dials, f.During.Lost, f.During.P50, f.During.P99, f.During.P999, f.During.Longest,
				f.Into, f.Until, f.Probes, f.PassedOver, f.Wrong, back, f.After.Failed, f.After.P999)
		}
	}

	return out.String()
}

// goal is a bound on what an episode may do to clients, for the sides that heal.
type goal struct {
	title          string
	eject, resteer float64 // at most
	value          func(Result) float64
	format         string // of a value and of a bound
}

var (
	noneFails  = goal{"failed or lost", 0, 0, func(r Result) float64 { return float64(r.During.Failed + r.During.Lost) }, "%.0f"}
	soonAgain  = goal{"p99.9 of connect", 1100, 300, func(r Result) float64 { return float64(r.During.P999) }, "%.0f ms"}
	soonLeft   = goal{"the last new connection to it, but for probes", 1, 1, func(r Result) float64 { return float64(r.Until) }, "%.2f s"}
	noMistake  = goal{"passed over", 0, 0, func(r Result) float64 { return float64(r.PassedOver + r.Wrong) }, "%.0f"}
	noneBeside = goal{"others passed over", 0, 0, func(r Result) float64 { return float64(r.Wrong) }, "%.0f"}
)

// goals are those of each episode.
var goals = map[string][]goal{
	"vanish":        {noneFails, soonAgain, soonLeft, noneBeside},
	"refuse":        {noneFails, soonAgain, soonLeft, noneBeside},
	"loss":          {noneFails, noMistake},
	"lossy-service": {noMistake},
	"slow-service":  {noneFails, noMistake},
	"flap-refuse":   {noneFails, noneBeside},
	"flap-vanish":   {noneFails, noneBeside},
}

// goalRows returns the rows of the table of goals for a path: the values of all sides, and which of those
// that heal are short of the goal.
func (r *Report) goalRows(p path) (rows []string) {
	for _, e := range episodes {
		for _, g := range goals[e.name] {
			cells, short, measured := make([]string, len(sides)), []string(nil), false
			for i, side := range sides {
				at := slices.IndexFunc(r.Pooled, func(r Result) bool { return r.Path == p.name && r.Episode == e.name && r.Side == side })
				if cells[i] = "-"; at < 0 {
					continue
				}
				measured = true
				value := g.value(r.Pooled[at])
				if cells[i] = fmt.Sprintf(g.format, value); math.IsInf(value, 1) {
					cells[i] = "failed"
				}
				if side == "sluice-eject" && value > g.eject || side == "sluice-resteer" && value > g.resteer {
					short = append(short, strings.TrimPrefix(side, "sluice-"))
				}
			}
			bound := fmt.Sprintf(g.format, g.eject)
			if g.resteer != g.eject {
				bound += fmt.Sprintf(", "+g.format, g.resteer)
			}
			if measured {
				rows = append(rows, fmt.Sprintf("| %s/%s | %s | %s | %s | %s |\n", p.name, e.name, g.title, bound, strings.Join(cells, " | "), strings.Join(short, ", ")))
			}
		}
	}

	return rows
}

// String is a line of progress.
func (r Result) String() string {
	back := "not back"
	if r.Back != nil {
		back = "back after " + r.Back.String()
	}

	return fmt.Sprintf("%s %s %s: %d of %d failed, %d lost; p50 %v, p99 %v, p99.9 %v, longest %v; %d into until %v, %d probes; %d passed over, %d wrong, %s; healthy: %d failed, p50 %v, p99.9 %v; after: %d failed, p99.9 %v; %v",
		r.Path, r.Episode, r.Side, r.During.Failed, r.During.Dials, r.During.Lost, r.During.P50, r.During.P99, r.During.P999, r.During.Longest,
		r.Into, r.Until, r.Probes, r.PassedOver, r.Wrong, back, r.Healthy.Failed, r.Healthy.P50, r.Healthy.P999, r.After.Failed, r.After.P999, r.During.Reasons)
}

func (s Seconds) String() string { return fmt.Sprintf("%.2f s", float64(s)) }

func (m Millis) String() string {
	switch {
	case math.IsInf(float64(m), 1):
		return "failed"
	case m < 10:
		return fmt.Sprintf("%.2f ms", float64(m))
	case m < 1000:
		return fmt.Sprintf("%.0f ms", float64(m))
	}

	return fmt.Sprintf("%.2f s", float64(m)/1000)
}
