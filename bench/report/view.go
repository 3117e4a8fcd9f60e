package report

import "slices"

// view is a run, sorted so that tables and plots can be made of it.
type view struct {
	run    *Run
	values values
}

func (r *Run) view() *view {
	return &view{run: r, values: valuesOf(r.Samples)}
}

// services returns all numbers of Services, the smallest first.
func (v *view) services() []int {
	all := slices.Clone(v.run.Environment.Services)
	for k := range v.values {
		all = append(all, k.services)
	}
	for _, gap := range v.run.Gaps {
		all = append(all, gap.Services)
	}
	slices.Sort(all)

	return slices.Compact(all)
}

// cases returns which cases there are with a number of Services.
func (v *view) cases(services int) []string {
	var all []string
	for k := range v.values {
		if k.services == services {
			all = append(all, k.name)
		}
	}
	for _, gap := range v.run.Gaps {
		if gap.Services == services {
			all = append(all, gap.Case)
		}
	}

	return inOrder(all, namesOf(Cases, func(c Case) string { return c.Name }))
}

// metrics returns which metrics a case has.
func (v *view) metrics(scope key) []string {
	return inOrder(v.collect(scope, func(k key) string { return k.metric }),
		namesOf(Metrics, func(m Metric) string { return m.Name }))
}

// paths returns which paths a case has.
func (v *view) paths(scope key) []string {
	return inOrder(v.collect(scope, func(k key) string { return k.path }),
		namesOf(Paths, func(p Path) string { return p.Name }))
}

// sides returns the sides that a case has, and those that it should have.
func (v *view) sides(scope key) []string {
	all := v.collect(scope, func(k key) string { return k.side })
	if slices.Contains(v.paths(scope), "") { // of the control plane
		return inOrder(append(all, slices.DeleteFunc(slices.Clone(v.run.Environment.Sides),
			func(side string) bool { return side == Ref })...), Sides)
	}

	return inOrder(append(all, v.run.Environment.Sides...), Sides)
}

// collect returns something of each key of a case.
func (v *view) collect(scope key, of func(key) string) []string {
	var all []string
	for k := range v.values {
		if k.services == scope.services && k.name == scope.name {
			all = append(all, of(k))
		}
	}

	return all
}

// inOrder returns each name once, those of a list in its order and then the
// others by name.
func inOrder(names, list []string) []string {
	slices.Sort(names)
	names = slices.Compact(names)
	slices.SortStableFunc(names, compareBy(list))

	return names
}

func namesOf[T any](all []T, name func(T) string) []string {
	names := make([]string, len(all))
	for i, one := range all {
		names[i] = name(one)
	}

	return names
}

// allSides returns the sides that there are, or should be, anywhere.
func (v *view) allSides() []string {
	all := slices.Clone(v.run.Environment.Sides)
	for k := range v.values {
		all = append(all, k.side)
	}

	return inOrder(all, Sides)
}

// rounds returns how many values there should be.
func (v *view) rounds(k key) int {
	if k.path == "" {
		return v.run.Environment.Starts
	}

	return v.run.Environment.Rounds
}
