package report

import "testing"

// A goal is reached by the median, and in noise if Sluice is no further from ref than
// ref from itself.
func TestVerdict(t *testing.T) {
	ref := []float64{100, 104, 97} // 4 % from its median
	for _, test := range []struct {
		name    string
		against bound
		metric  string
		values  []float64 // of Sluice, on the path's control too
		want    string
	}{
		{"at the bound", ofRef, Rate, []float64{97, 100.88, 94.09}, "reached"},
		{"below the bound", ofRef, Rate, []float64{96, 99, 93}, "short of it at 10"},
		{"above a bound that is at most", ofRef, P50, []float64{98, 102, 95.5}, "short of it at 10"},
		{"far below such a bound", ofRef, P50, []float64{50, 52, 48.5}, "reached"},
		{"better than ref", noise, Rate, []float64{120, 124, 117}, "reached"},
		{"as far from ref as a round of ref", noise, Rate, []float64{96.2, 100.1, 93.2}, "reached"},
		{"further from ref", noise, Rate, []float64{95, 99, 92}, "short of it at 10"},
		{"slower than ref", noise, P50, []float64{105, 109, 102}, "short of it at 10"},
		{"now better, now worse than ref", noise, P50, []float64{130, 99, 190}, "short of it at 10"},
		{"quartiles on both sides of ref", noise, P50, []float64{110, 83.2, 116.4}, "reached"},
		{"absolutely too much", absolute, P50, []float64{2, 3, 1}, "short of it at 10"},
		{"absolutely little enough", absolute, P50, []float64{0.9, 0.97, 0.5}, "reached"},
		{"not measured", absolute, P50, nil, "not measured"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var r Run
			r.addAll(Sample{Services: 10, Case: Connect, Path: Direct, Side: Ref, Metric: test.metric}, ref...)
			r.addAll(Sample{Services: 10, Case: Connect, Path: ServiceLast, Side: Sluice, Metric: test.metric}, test.values...)
			g := goal{"", Connect, ServiceLast, test.metric, test.against, 0.97, ""}
			row := r.view().goalRow(g, []int{10}, nil)
			if got := row[len(row)-1]; got != test.want {
				t.Errorf("verdict is %q, want %q", got, test.want)
			}
		})
	}
}

// A goal holds for every size of the cluster.
func TestVerdictOfSizes(t *testing.T) {
	g := goal{"", Start, "", StartTime, absolute, 1, ""}
	for _, test := range []struct {
		name   string
		values map[int]float64
		want   string
	}{
		{"everywhere", map[int]float64{10: 0.5, 1000: 0.6, 10_000: 1}, "reached"},
		{"missed twice", map[int]float64{10: 0.5, 1000: 1.6, 10_000: 2}, "short of it at 1,000 and 10,000"},
		{"measured once", map[int]float64{10: 0.5}, "reached, not measured at 1,000 and 10,000"},
		{"missed once and not measured elsewhere", map[int]float64{1000: 2}, "short of it at 1,000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var r Run
			for services, value := range test.values {
				r.addAll(Sample{Services: services, Case: Start, Side: Sluice, Metric: StartTime}, value)
			}
			row := r.view().goalRow(g, []int{10, 1000, 10_000}, nil)
			if got := row[len(row)-1]; got != test.want {
				t.Errorf("verdict is %q, want %q", got, test.want)
			}
		})
	}
}
