package lb

import (
	"iter"
	"slices"
)

// Change is a set of objects that a cluster may get, in place of those of the same names.
type Change struct {
	Services []Service
	Slices   []EndpointSlice
	Node     *Node // this node, of which the zone counts; nil: it stays as it is
	// Deleted is set if the cluster has these Services and slices no more, instead.
	Deleted bool
}

// Outcome is a Service as it is, and as it would be after a [Change]. One of them has no Service if there was none before, or
// would be none after.
type Outcome struct {
	Name          ServiceName
	Before, After Snapshot
}

// Node returns the node. It is the State's own: read only.
func (s *State) Node() *Node { return s.node }

// Concerned yields the Services that a change concerns, as they are. Those of a changed node are all: the caller takes them of
// [State.Snapshots]. The State may change between two of them.
func (s *State) Concerned(change *Change) iter.Seq[Snapshot] {
	return func(yield func(Snapshot) bool) {
		seen := make(map[ServiceName]bool)
		goesOn := func(name ServiceName) bool {
			known := s.services[name]
			if known == nil || seen[name] {
				return true
			}
			seen[name] = true // its slices count, too, where the Service is new

			return yield(Snapshot{known.service, known.slices, s.node})
		}
		for i := range change.Services {
			if !goesOn(change.Services[i].Name) {
				return
			}
		}
		for i := range change.Slices {
			slice := &change.Slices[i]
			if known := s.Slice(slice.Name); known != nil && !goesOn(known.Service) { // it may be of another Service until now
				return
			}
			if !goesOn(slice.Service) {
				return
			}
		}
	}
}

// Outcomes returns what a change makes of the Services that it concerns, sorted by name. They are known as they are, at a
// node.
func (c *Change) Outcomes(node *Node, known []Snapshot) []Outcome {
	before, after := NewState(*node), NewState(*node)
	for _, state := range []*State{before, after} {
		for _, snapshot := range known {
			for _, slice := range snapshot.slices {
				state.SetSlice(*slice)
			}
			if snapshot.Service != nil {
				state.SetService(*snapshot.Service)
			}
		}
	}
	c.apply(after)
	names := append(before.Touched(), after.Touched()...)
	slices.SortFunc(names, ServiceName.compare)
	var outcomes []Outcome
	for _, name := range slices.Compact(names) {
		was, existed := before.Snapshot(name)
		is, exists := after.Snapshot(name)
		if existed || exists {
			outcomes = append(outcomes, Outcome{name, was, is})
		}
	}

	return outcomes
}

// apply makes the change.
func (c *Change) apply(s *State) {
	for i := range c.Services {
		if c.Deleted {
			s.DeleteService(c.Services[i].Name)
		} else {
			s.SetService(c.Services[i])
		}
	}
	for i := range c.Slices {
		if c.Deleted {
			s.DeleteSlice(c.Slices[i].Name)
		} else {
			s.SetSlice(c.Slices[i])
		}
	}
	if c.Node != nil && !c.Deleted {
		node := *s.node
		node.Zone = c.Node.Zone
		s.SetNode(node)
	}
}
