package decision

import (
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
)

// HeavySize is the size ([lb.Snapshot.Size]) from which on a Service is heavy. Below, a
// decision takes about two milliseconds.
const HeavySize = 4000

// Where Services of twice HeavySize are decided in one round, the others of it that are larger than this are
// heavy as well: many that are just not heavy take as long as one that is.
const crowdedSize = HeavySize / 16

// Heavy are the heavy Services that wait for their decision, which is made beside the goroutine that
// owns Heavy. There is one decision at a time, so that heavy Services wait for each other and leave a
// processor for everything else. Namespaces take turns; those of one are decided in the order in which
// they changed.
type Heavy struct {
	waiting queue.Turns[lb.ServiceName]
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

// Add queues a changed Service if it is heavy, and reports whether it is; size is that of the Services which are
// decided in this round already. For a nil Heavy none is. The Service is decided as it is when its turn comes.
func (h *Heavy) Add(s lb.Snapshot, size int) bool {
	name, heaviest := s.Service.Name, HeavySize
	if size >= 2*HeavySize {
		heaviest = crowdedSize
	}
	if h == nil || s.Size() < heaviest {
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
	case !h.waiting.Has(name.Namespace, name):
		h.waiting.Add(name.Namespace, name)
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
	h.waiting.Remove(name.Namespace, name)
}

// Has reports whether a Service waits for its decision.
func (h *Heavy) Has(name lb.ServiceName) bool {
	if h == nil {
		return false
	}

	return h.running != nil && h.running.name == name && !h.running.outdated || h.waiting.Has(name.Namespace, name)
}

// Busy reports whether a decision is in progress.
func (h *Heavy) Busy() bool { return h.running != nil }

// Begin begins the next decision: it returns the Service, and false if none waits or a decision is in
// progress.
func (h *Heavy) Begin() (lb.ServiceName, bool) {
	if h == nil || h.Busy() {
		return lb.ServiceName{}, false
	}
	name, ok := h.waiting.Next()
	if ok {
		h.running = &job{name: name}
	}

	return name, ok
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
