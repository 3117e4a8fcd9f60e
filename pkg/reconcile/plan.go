package reconcile

import (
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// plan makes svc want what res says. It writes nothing; what it gives ids to
// and nobody ends up wanting, sweep forgets.
func (r *Reconciler) plan(svc *service, res lb.Resolution) {
	r.release(svc)
	for _, p := range svc.ports {
		p.forget()
	}
	before := svc.claims
	svc.claims = make([]*claim, 0, len(res.Frontends))
	for i := range res.Frontends {
		r.planFrontend(svc, &res.Frontends[i])
	}
	slices.SortStableFunc(svc.claims, func(a, b *claim) int { return catchAllLast(a.frontend, b.frontend) })
	r.planEndpoints(svc, res.Endpoints)
	// The old claims go last, so that a frontend never looks unclaimed between.
	for _, c := range before {
		r.unlink(c)
	}
	r.touch(svc)
}

// forget makes p want nothing.
func (p *port) forget() {
	for i := range p.backends {
		p.backends[i].alive = false
	}
	for i := range p.ranges {
		p.ranges[i].wanted = false
	}
}

// catchAllLast orders frontends for publishing: a catch-all refuses what comes
// after it.
func catchAllLast(a, b *frontend) int {
	switch {
	case a.catchAll() == b.catchAll():
		return 0
	case b.catchAll():
		return -1
	default:
		return 1
	}
}

func (r *Reconciler) planFrontend(svc *service, want *lb.Frontend) {
	p := r.port(svc, want.Port.Port, want.Port.Protocol, familyOf(want.Key.Addr))
	c := &claim{
		port:            p,
		frontend:        r.frontend(keyOf(want.Key)),
		created:         svc.created,
		extent:          r.planBackends(p, want.Backends, want.Algorithm.Hashes()),
		affinitySeconds: seconds(want.Affinity),
		algorithm:       programmable(want.Algorithm),
		kind:            min(uint8(want.Kind), uint8(len(kindRank)-1)),
	}
	if want.DropIfEmpty && len(want.Backends) == 0 {
		c.flags |= maps.FrontendDropIfEmpty
	}
	if want.Masquerade {
		c.flags |= maps.FrontendMasquerade
	}
	if len(want.SourceRanges) > 0 {
		c.flags |= maps.FrontendSourceRanges
		if want.NodeInRanges {
			c.flags |= maps.FrontendNodeInRanges
		}
	}
	for _, prefix := range want.SourceRanges {
		p.sourceRange(maps.SourceRangeKeyOf(p.id, prefix.Masked())).wanted = true
	}
	r.link(c)
	svc.claims = append(svc.claims, c)
}

// planBackends returns the extent of p with these backends, and with a table if
// tabled; nil for none.
func (r *Reconciler) planBackends(p *port, want []lb.Backend, tabled bool) *extent {
	ids := r.scratch[:0]
	if p.backends == nil {
		p.backends = make([]backend, 0, len(want))
	}
	for i := range want {
		b := r.backend(p, want[i].Addr)
		b.flags = flagsOf(&want[i])
		ids = append(ids, b.id)
	}
	slices.Sort(ids)
	r.scratch = ids

	return p.extent(slices.Compact(ids), tabled)
}

// planEndpoints marks the backends that keep their flows.
func (r *Reconciler) planEndpoints(svc *service, endpoints []lb.EndpointState) {
	var p *port
	for i := range endpoints {
		e := &endpoints[i]
		if !e.Alive {
			continue
		}
		family := familyOf(e.Addr.Addr())
		if p == nil || p.name != e.Port.Port || p.protocol != e.Port.Protocol || p.family != family {
			if p = svc.find(e.Port.Port, e.Port.Protocol, family); p == nil {
				continue
			}
		}
		if b := p.findBackend(e.Addr); b != nil {
			b.alive = true
		}
	}
}

func flagsOf(b *lb.Backend) uint16 {
	var flags uint16
	if b.Local {
		flags |= maps.BackendLocal
	}
	if b.Terminating {
		flags |= maps.BackendTerminating
	}

	return flags
}

// seconds rounds up, so that no affinity is not what a short one becomes.
func seconds(d time.Duration) uint32 {
	return uint32((max(d, 0) + time.Second - 1) / time.Second)
}
