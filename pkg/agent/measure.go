package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// measure measures what do writes, as a round. Nothing is one before all is known.
func (a *agent) measure(r metrics.Round, do func()) {
	r.Begin, a.unwritten = time.Now(), false
	do()
	if !a.synced {
		return
	}
	r.Failed, r.Programmed = a.unwritten || a.busy(), a.isProgrammed
	a.mail.metrics.Done(r)
}

// isProgrammed says whether what is known of a Service is in the maps, or there is
// no such Service.
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
