package report

import "strings"

// Summary says what a case came to so far, for somebody who watches the run: a
// line for each path, of the metric that goes first, with what it is beside
// [Ref].
func (r *Run) Summary(services int, name string) []string {
	v := r.view()
	scope := key{services: services, name: name}
	metrics := v.metrics(scope)
	if len(metrics) == 0 {
		return nil
	}
	metric := metricOf(metrics[0])
	var lines []string
	for _, path := range v.paths(scope) {
		words := []string{name}
		if path != "" {
			words = append(words, path)
		}
		line := strings.Join(append(words, metric.Title), " ") + ":"
		for _, side := range v.sides(scope) {
			k := key{services, name, path, side, metric.Name}
			spread := v.values.spread(k)
			if spread.Rounds == 0 {
				continue
			}
			line += "  " + side + " " + formatSpread(spread)
			if ratio := v.values.toRef(k); ratio.Rounds > 0 {
				line += " (" + formatRatio(ratio.Median) + " × ref)"
			}
		}
		lines = append(lines, line)
	}

	return lines
}
