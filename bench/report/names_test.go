package report

import (
	"slices"
	"testing"
)

// Whatever a chart or a goal is about is in the tables, and every control
// is a path without one.
func TestNames(t *testing.T) {
	known := func(name, path, metric string) bool {
		return slices.Contains(namesOf(Cases, func(c Case) string { return c.Name }), name) &&
			slices.Contains(append(namesOf(Paths, func(p Path) string { return p.Name }), ""), path) &&
			slices.Contains(namesOf(Metrics, func(m Metric) string { return m.Name }), metric)
	}
	for _, c := range charts {
		for _, curve := range c.curves {
			if !known(c.name, curve.path, curve.metric) {
				t.Errorf("plot %s shows %q %q %q, which no case measures", c.file, c.name, curve.path, curve.metric)
			}
		}
	}
	for _, goal := range goals {
		if !known(goal.name, goal.path, goal.metric) {
			t.Errorf("goal %s is about %q %q %q, which no case measures", goal.title, goal.name, goal.path, goal.metric)
		}
	}
	for _, path := range Paths {
		if path.Control != "" && (pathOf(path.Control).Control != "" || pathOf(path.Control).Title == path.Control) {
			t.Errorf("the control of %s is %s, which is none", path.Name, path.Control)
		}
	}
}

func TestReadMachine(t *testing.T) {
	m, err := ReadMachine()
	if err != nil {
		t.Fatal(err)
	}
	if m.Kernel == "" || m.CPU == "" || m.Cores == 0 || m.Memory < 1<<20 || m.Go == "" {
		t.Errorf("machine is %+v", m)
	}
}
