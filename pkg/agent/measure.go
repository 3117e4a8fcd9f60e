package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// measure measures the writes of do as one round. Before the first synchronization it only
// calls do.
func (a *agent) measure(r metrics.Round, do func()) {
	r.Begin, a.unwritten = time.Now(), false
	do()
	if !a.synced {
		return
	}
	r.Failed, r.Programmed = a.unwritten || a.busy(), a.isProgrammed
	a.queue.metrics.Done(r)
}

// isProgrammed reports whether a Service is in the maps as it is known, or does not exist.
func (a *agent) isProgrammed(name lb.ServiceName) bool {
	_, undecided := a.model.undecided[name]

	return !undecided && !a.heavy.has(name) && a.writer.Programmed(name)
}

// endedSince returns how many stale flows were ended of each family.
func endedSince(before, after flow.Ended) map[lb.Family]int {
	ended := make(map[lb.Family]int)
	if n := after.IPv4 - before.IPv4; n > 0 {
		ended[lb.IPv4] = int(n)
	}
	if n := after.IPv6 - before.IPv6; n > 0 {
		ended[lb.IPv6] = int(n)
	}

	return ended
}
