package report

import "strings"

// Summary returns the results of a case so far, as lines of progress: a
// line for each path, of the metric that goes first, with its ratio to
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
