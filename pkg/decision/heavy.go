package decision

import (
	"slices"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// HeavySize is the size ([lb.Snapshot.Size]) from which on a Service is heavy. Below, a
// decision takes about two milliseconds.
const HeavySize = 4000

// Heavy are the heavy Services that wait for their decision, which is made beside the goroutine that
// owns Heavy. There is one decision at a time, in the order in which the Services changed, so
// that heavy Services wait for each other and leave a processor for everything else.
type Heavy struct {
	waiting []lb.ServiceName
	running *job
}

// job is a decision in progress.
type job struct {
	name lb.ServiceName
	// again is set if the Service has changed since. This decision still counts, because
	// a Service that changes all the time would never be programmed otherwise.
	again bool
	// outdated is set if the Service is gone, or not heavy any more.
	outdated bool
}

// Add queues a changed Service if it is heavy, and reports whether it is. For a nil Heavy none is.
// The Service is decided as it is when its turn comes.
func (h *Heavy) Add(s lb.Snapshot) bool {
	name := s.Service.Name
	if h == nil || s.Size() < HeavySize {
		h.Forget(name)

		return false
	}
	h.add(name)

	return true
}

func (h *Heavy) add(name lb.ServiceName) {
	switch job := h.running; {
	case job != nil && job.name == name && !job.outdated:
		job.again = true
	case !slices.Contains(h.waiting, name):
		h.waiting = append(h.waiting, name)
	}
}

// Forget drops a Service from the queue, and the decision about it that is in progress.
func (h *Heavy) Forget(name lb.ServiceName) {
	if h == nil {
		return
	}
	if h.running != nil && h.running.name == name {
		h.running.outdated = true
	}
	h.waiting = slices.DeleteFunc(h.waiting, func(n lb.ServiceName) bool { return n == name })
}

// Has reports whether a Service waits for its decision.
func (h *Heavy) Has(name lb.ServiceName) bool {
	if h == nil {
		return false
	}

	return h.running != nil && h.running.name == name && !h.running.outdated || slices.Contains(h.waiting, name)
}

// Busy reports whether a decision is in progress.
func (h *Heavy) Busy() bool { return h.running != nil }

// Begin begins the next decision: it returns the Service, and false if none waits or a decision is in
// progress.
func (h *Heavy) Begin() (lb.ServiceName, bool) {
	if h == nil || h.Busy() || len(h.waiting) == 0 {
		return lb.ServiceName{}, false
	}
	h.running = &job{name: h.waiting[0]}
	h.waiting = h.waiting[1:]

	return h.running.name, true
}

// End ends the decision in progress, and reports whether it counts.
func (h *Heavy) End() bool {
	job := h.running
	h.running = nil
	if job.again && !job.outdated {
		h.add(job.name)
	}

	return !job.outdated
}
