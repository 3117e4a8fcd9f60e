package reconcile

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Planned is what one Service wants, ready to be set.
type Planned struct{ plan plan }

// PlanOf prepares a resolution for [Reconciler.SetPlanned]. Any goroutine may call it: for a
// Service of ten thousands of frontends or endpoints it takes too long for the one that owns
// the Reconciler.
func PlanOf(res lb.Resolution) Planned { return Planned{planOf(&res)} }

// SetPlanned does what Set does with the resolution that was planned. It takes over what
// PlanOf returned: each is for one call.
func (r *Reconciler) SetPlanned(name lb.ServiceName, created time.Time, planned Planned) {
	svc := r.service(name)
	svc.wanted = true
	r.replan(svc, created, func() plan { return planned.plan })
}

// Programmed reports whether the maps say what a Service wants, as its Status does, or it is
// not Set. It takes no time, however large the Service is.
func (r *Reconciler) Programmed(name lb.ServiceName) bool {
	svc := r.services[name]

	return svc == nil || !svc.wanted || !svc.dirty
}
