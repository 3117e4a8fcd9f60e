package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Summary is a value and its ratios over all rounds, worked out from the samples for
// readers of the JSON.
type Summary struct {
	Services int    `json:"services"`
	Case     string `json:"case"`
	Path     string `json:"path,omitempty"`
	Side     string `json:"side"`
	Metric   string `json:"metric"`
	Unit     string `json:"unit"`
	Value    Spread `json:"value"`
	// Ratios of the same round, where there are some: to the node without a proxy,
	// to the endpoints' own addresses, and of Sluice to each mode of kube-proxy.
	ToRef    Spread            `json:"toRef,omitzero"`
	ToDirect Spread            `json:"toDirect,omitzero"`
	ToSides  map[string]Spread `json:"toSides,omitempty"`
}

// document is a run as JSON.
type document struct {
	*Run
	Cases     []Case    `json:"cases"`
	Paths     []Path    `json:"paths"`
	Metrics   []Metric  `json:"metrics"`
	Summaries []Summary `json:"summaries"`
}

// WriteJSON writes all samples, with the tables of names and a summary of each value.
func (r *Run) WriteJSON(w io.Writer) error {
	v := r.view()
	summaries := make([]Summary, 0, len(v.values))
	for k := range v.values {
		s := Summary{Services: k.services, Case: k.name, Path: k.path, Side: k.side, Metric: k.metric, Unit: metricOf(k.metric).Unit,
			Value: v.values.spread(k), ToRef: v.values.toRef(k), ToDirect: v.values.toDirect(k)}
		for _, side := range v.allSides() {
			if ratio := v.values.toSide(k, side); k.side == Sluice && isRival(side) && ratio.Rounds > 0 {
				if s.ToSides == nil {
					s.ToSides = make(map[string]Spread)
				}
				s.ToSides[side] = ratio
			}
		}
		summaries = append(summaries, s)
	}
	slices.SortFunc(summaries, func(a, b Summary) int {
		if a.Services != b.Services {
			return a.Services - b.Services
		}

		return slices.CompareFunc([]string{a.Case, a.Path, a.Side, a.Metric}, []string{b.Case, b.Path, b.Side, b.Metric}, strings.Compare)
	})
	out := json.NewEncoder(w)
	out.SetIndent("", " ")
	out.SetEscapeHTML(false)
	if err := out.Encode(document{r, Cases, Paths, Metrics, summaries}); err != nil {
		return fmt.Errorf("run as JSON: %w", err)
	}

	return nil
}
