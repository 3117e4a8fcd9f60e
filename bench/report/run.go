// Package report turns what was measured into something that can be read: a
// text, tables in Markdown, JSON and plots. It measures nothing itself.
//
// Values that are compared were measured in the same round, one after the other on
// the same machine. A ratio is the median of the rounds' ratios, not the ratio
// of two medians, and its spread is shown as quartiles.
package report

import (
	"math"
	"time"
)

// Run is all that is known of one run of the harness.
type Run struct {
	Environment Environment `json:"environment"`
	Samples     []Sample    `json:"samples"`
	Gaps        []Gap       `json:"gaps,omitempty"`
	// Interrupted is set if the run was ended before everything was measured.
	Interrupted bool `json:"interrupted,omitempty"`
	// Errors are those that did not end the run.
	Errors []string `json:"errors,omitempty"`
}

// Environment is where and how a run was made.
type Environment struct {
	Machine  Machine           `json:"machine"`
	Versions map[string]string `json:"versions"` // of programs and of what sides run, by name
	Command  string            `json:"command"`  // line
	Started  time.Time         `json:"started"`
	Elapsed  time.Duration     `json:"elapsed"` // all of the run, in nanoseconds

	Sides     []string      `json:"sides"`     // that were to be measured, in the order of the first round
	Services  []int         `json:"services"`  // sizes that were to be measured
	Endpoints int           `json:"endpoints"` // of each Service
	Rounds    int           `json:"rounds"`    // of traffic
	Starts    int           `json:"starts"`    // rounds of the control plane
	WarmUp    time.Duration `json:"warmUp"`    // of each measurement of traffic, in nanoseconds
	Duration  time.Duration `json:"duration"`  // likewise, without the warm-up
	Clients   int           `json:"clients"`   // at once, where there are many
	Rate      int           `json:"rate"`      // connections a second, where their rate is fixed
	Churn     int           `json:"churn"`     // changes a second, where there is churn
	Changes   int           `json:"changes"`   // whose latency is measured in each round
	// Notes are more that a reader should know, a sentence each.
	Notes []string `json:"notes,omitempty"`
}

// Add records samples. One that is no number is missing.
func (r *Run) Add(samples ...Sample) {
	for _, s := range samples {
		if math.IsNaN(s.Value) || math.IsInf(s.Value, 0) {
			r.Miss(Gap{s.Services, s.Case, s.Path, s.Side, s.Round, metricOf(s.Metric).Title + " is not a number"})

			continue
		}
		r.Samples = append(r.Samples, s)
	}
}

// Miss records why there are no samples.
func (r *Run) Miss(gap Gap) {
	r.Gaps = append(r.Gaps, gap)
}
