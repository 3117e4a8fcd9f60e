package report

import "fmt"

// Sample is one value that was measured once. A value that could not be
// measured is no Sample but a [Gap].
type Sample struct {
	Services int     `json:"services"`       // how many there were in the cluster
	Case     string  `json:"case"`           // what was done: one of [Cases]
	Path     string  `json:"path,omitempty"` // which way: one of [Paths], none for the control plane
	Side     string  `json:"side"`           // what was measured: one of [Sides]
	Metric   string  `json:"metric"`         // one of [Metrics]
	Round    int     `json:"round"`          // from 0; values of one round are compared with each other
	Value    float64 `json:"value"`          // in the metric's unit
}

// String describes what was measured, as a line of progress.
func (s Sample) String() string {
	metric := metricOf(s.Metric)

	return fmt.Sprintf("%s %s: %s %s %s", s.Side, s.key().where(), metric.Title, formatValue(s.Value), metric.Unit)
}

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

// key is all of a sample but when it was measured and what came of it.
type key struct {
	services                 int
	name, path, side, metric string
}

func (s Sample) key() key {
	return key{s.Services, s.Case, s.Path, s.Side, s.Metric}
}

// where names the case and the path.
func (k key) where() string {
	if k.path == "" {
		return k.name
	}

	return k.name + " " + k.path
}
