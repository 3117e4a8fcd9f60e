// Package report turns measurements into a text, tables in Markdown, JSON and plots.
// It measures nothing itself.
//
// Values that are compared were measured in the same round, one after the other on
// the same machine. A ratio is the median of the rounds' ratios, not the ratio
// of two medians, and its spread is shown as quartiles.
//
// A [Run] collects a [Sample] for each value and a [Gap] for each one that is missing.
// names.go lists the cases, paths, metrics and sides; statistics.go has medians, quartiles
// and ratios; text.go, json.go and plot.go write; goals.go compares with the goals of
// docs/performance.md.
package report

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Run is all that is known of one run of the benchmark.
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
	Versions map[string]string `json:"versions"` // of programs and of sides, by name
	Command  string            `json:"command"`  // line
	Started  time.Time         `json:"started"`
	Elapsed  time.Duration     `json:"elapsed"` // all of the run, in nanoseconds

	Sides     []string      `json:"sides"`     // to be measured, in the order of the first round
	Services  []int         `json:"services"`  // numbers of Services to be measured
	Endpoints int           `json:"endpoints"` // of each Service
	Rounds    int           `json:"rounds"`    // of traffic
	Starts    int           `json:"starts"`    // rounds of the control plane
	WarmUp    time.Duration `json:"warmUp"`    // of each measurement of traffic, in nanoseconds
	Duration  time.Duration `json:"duration"`  // likewise, without the warm-up
	Clients   int           `json:"clients"`   // at once, where there are many
	Rate      int           `json:"rate"`      // connections a second, where their rate is fixed
	Churn     int           `json:"churn"`     // changes a second, where there is churn
	Changes   int           `json:"changes"`   // whose latency is measured in each round
	// Notes are further sentences for the reader.
	Notes []string `json:"notes,omitempty"`
}

// Sample is one value that was measured once.
type Sample struct {
	Services int     `json:"services"`       // in the cluster
	Case     string  `json:"case"`           // one of [Cases]
	Path     string  `json:"path,omitempty"` // one of [Paths], none for the control plane
	Side     string  `json:"side"`           // one of [Sides]
	Metric   string  `json:"metric"`         // one of [Metrics]
	Round    int     `json:"round"`          // from 0; values of one round are compared with each other
	Value    float64 `json:"value"`          // in the metric's unit
}

// String describes the sample as a line of progress.
func (s Sample) String() string {
	m := metricOf(s.Metric)

	return fmt.Sprintf("%s: %s %s %s", join(" ", s.Side, s.Case, s.Path), m.Title, formatValue(s.Value), m.Unit)
}

// key is what a sample measures: all of it but the round and the value.
type key struct {
	services                 int
	name, path, side, metric string
}

func (s Sample) key() key { return key{s.Services, s.Case, s.Path, s.Side, s.Metric} }

// Gap is why there are no samples.
type Gap struct {
	Services int    `json:"services"`
	Case     string `json:"case"`
	Path     string `json:"path,omitempty"` // none: all paths
	Side     string `json:"side,omitempty"` // none: all sides
	Round    int    `json:"round"`
	Why      string `json:"why"`
}

// covers reports whether the gap explains that there is no value for a key.
func (g Gap) covers(k key) bool {
	return g.Services == k.services && g.Case == k.name &&
		(g.Path == "" || g.Path == k.path) && (g.Side == "" || g.Side == k.side)
}

// Add records samples. A value that is not a number, which JSON could not hold, is
// recorded as missing.
func (r *Run) Add(samples ...Sample) {
	for _, s := range samples {
		if math.IsNaN(s.Value) || math.IsInf(s.Value, 0) {
			r.Gaps = append(r.Gaps, Gap{s.Services, s.Case, s.Path, s.Side, s.Round, metricOf(s.Metric).Title + " is not a number"})
		} else {
			r.Samples = append(r.Samples, s)
		}
	}
}

// Machine is what a run was made on.
type Machine struct {
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"` // model
	Cores      int    `json:"cores"`
	Memory     int64  `json:"memory"`               // bytes
	Hypervisor bool   `json:"hypervisor,omitempty"` // it is a virtual machine
	Go         string `json:"go"`                   // version
}

// ReadMachine describes this machine.
func ReadMachine() (Machine, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return Machine{}, fmt.Errorf("name of the kernel: %w", err)
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return Machine{}, err
	}
	memory, err := fs.Meminfo()
	if err != nil {
		return Machine{}, fmt.Errorf("size of the memory: %w", err)
	}
	processors, err := fs.CPUInfo()
	if err != nil {
		return Machine{}, fmt.Errorf("model of the processor: %w", err)
	}
	if memory.MemTotalBytes == nil || len(processors) == 0 {
		return Machine{}, errors.New("/proc does not tell the size of the memory, or no processor")
	}

	return Machine{
		Kernel:     unix.ByteSliceToString(name.Release[:]),
		CPU:        processors[0].ModelName,
		Cores:      runtime.NumCPU(),
		Memory:     int64(*memory.MemTotalBytes),
		Hypervisor: slices.Contains(processors[0].Flags, "hypervisor"),
		Go:         runtime.Version(),
	}, nil
}

// join joins the words that are not empty.
func join(separator string, words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(word string) bool { return word == "" }), separator)
}
