package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bench/report"
)

// Report is a run.
type Report struct {
	Machine     report.Machine `json:"machine"`
	Command     string         `json:"command"`
	Started     time.Time      `json:"started"`
	Elapsed     time.Duration  `json:"elapsed"`
	Rate        int            `json:"rate"`
	Phases      string         `json:"phases"`
	Interrupted bool           `json:"interrupted,omitempty"`
	Errors      []string       `json:"errors,omitempty"`

	Costs   []Cost   `json:"costs,omitempty"`
	Results []Result `json:"results"`
	// Pooled are the results of all rounds together: connections, and the latest times.
	Pooled []Result `json:"pooled"`
}

// write writes the report to a folder, and its tables to text as well.
func (r *Report) write(folder string, text io.Writer) error {
	r.pool()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	packed, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("report as JSON: %w", err)
	}
	_, err = io.WriteString(text, r.markdown())

	return errors.Join(err,
		os.WriteFile(filepath.Join(folder, "report.json"), append(packed, '\n'), 0o644),
		os.WriteFile(filepath.Join(folder, "report.md"), []byte(r.markdown()), 0o644))
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
	for _, p := range paths {
		found := slices.DeleteFunc(slices.Clone(r.Pooled), func(r Result) bool { return r.Path != p.name })
		if len(found) == 0 {
			continue
		}
		fmt.Fprintf(&out, "\n%s\n\n", p.title)
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

	if len(r.Costs) > 0 {
		fmt.Fprintf(&out, "\nWhile all is well: one client that connects as fast as it can, %d windows of %v, all sides in turn; medians, in brackets the quartiles\n\n", r.Costs[0].P50.Rounds, costWork.Duration)
		out.WriteString("| side | p50 of connect | × off | CPU of a connection | × off |\n|---|---|---|---|---|\n")
		for _, c := range r.Costs {
			fmt.Fprintf(&out, "| %s | %.1f µs | %.3f (%.3f–%.3f) | %.1f µs | %.3f (%.3f–%.3f) |\n", c.Side,
				c.P50.Median, c.P50ToOff.Median, c.P50ToOff.Low, c.P50ToOff.High,
				c.CPU.Median, c.CPUToOff.Median, c.CPUToOff.Low, c.CPUToOff.High)
		}
	}

	return out.String()
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
