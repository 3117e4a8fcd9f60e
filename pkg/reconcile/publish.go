package reconcile

import (
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// publish writes what svc wants and the maps do not say, from the bottom up:
// names, backends and source ranges, then slots and addresses, then the
// frontends that need them. What fails is noted, and the rest goes on.
func (r *Reconciler) publish(svc *service) {
	svc.weigh()
	for _, p := range svc.ports {
		switch {
		case p.wanted:
			r.publishPort(p)
		case p.fenced > 0: // whoever has its address now could not be written yet
			p.note("source range", r.publishRanges(p))
		}
	}
	for _, c := range svc.claims {
		if !c.wins() || !c.port.named {
			continue
		}
		// A catch-all would refuse the ports that could not be published.
		if c.frontend.catchAll() && !c.frontend.present && len(svc.failures) > 0 {
			continue
		}
		if err := r.publishFrontend(c); err != nil {
			svc.fail("frontend "+modelKey(c.frontend.key).String(), err)
		}
	}
	r.parts = nil
}

// weigh notes which ports and extents have a claim that has its address. The
// others are not written.
func (svc *service) weigh() {
	for _, p := range svc.ports {
		p.wanted = false
		for _, e := range p.extents {
			e.wanted = false
		}
	}
	for _, c := range svc.claims {
		if c.wins() {
			c.port.wanted = true
			if c.extent != nil {
				c.extent.wanted = true
			}
		}
	}
}

// publishPort writes what frontends of p need before they can be written.
func (r *Reconciler) publishPort(p *port) {
	if err := r.publishName(p); err != nil {
		p.svc.fail("port "+p.String(), err)

		return
	}
	backends := r.publishBackends(p)
	p.short = backends.count > 0
	p.note("backend", backends)
	p.note("source range", r.publishRanges(p))
}

func (r *Reconciler) publishName(p *port) error {
	if p.named {
		return nil
	}
	err := r.tables.servicePorts.insert(p.id, p.label())
	p.named = err == nil

	return err
}

// publishBackends writes the backends of p's wanted extents.
func (r *Reconciler) publishBackends(p *port) shortfall {
	var short shortfall
	for i := range p.backends {
		b := &p.backends[i]
		if b.written && b.have == b.flags || !p.leadsTo(b.id, (*extent).isWanted) {
			continue
		}
		if err := r.tables.backends.put(b.id, b.value(p), b.written); err != nil {
			short.add(b.addrPort(), err)

			continue
		}
		b.written, b.have = true, b.flags
	}

	return short
}

// publishRanges adds to p's source ranges. When that fails, frontends are
// written nevertheless: they are too narrow then, but never open.
func (r *Reconciler) publishRanges(p *port) shortfall {
	var short shortfall
	for i := range p.ranges {
		s := &p.ranges[i]
		if !s.wanted || s.written {
			continue
		}
		if err := r.tables.sourceRanges.insert(s.key, 1); err != nil {
			short.add(s.key.Prefix(), err)

			continue
		}
		s.written = true
	}

	return short
}

// publishFrontend makes c's frontend lead to c's backends, with one write.
func (r *Reconciler) publishFrontend(c *claim) error {
	f := c.frontend
	e, err := r.writtenExtent(c)
	if err != nil {
		return err
	}
	if e != nil && e.base == 0 {
		if e.base, err = r.tables.slots.put(e.ids, e.table); err != nil {
			return err
		}
	}
	v := c.value(e)
	if f.present && f.have == v && r.broken[f.key] == "" {
		return nil
	}
	if err := r.addrs.mark(f.key); err != nil {
		return err
	}
	if err := r.tables.frontends.put(f.key, v, f.present); err != nil {
		return err
	}
	r.lead(f, c.port, e, v)

	return nil
}

// errNoBackends is why a frontend stays as it is: none of the backends it
// should lead to could be written. Their own errors say why.
var errNoBackends = errors.New("none of its backends is in the map")

// writtenExtent returns the extent that c's frontend can lead to: c's own, or
// what of it could be written. When that is nothing the frontend keeps what it
// has, except if the map of backends is full: then what it has must make room.
func (r *Reconciler) writtenExtent(c *claim) (*extent, error) {
	if c.extent == nil || c.extent.base != 0 || !c.port.short {
		return c.extent, nil
	}
	part, known := r.parts[c.extent]
	if !known {
		part = r.writtenPart(c.port, c.extent)
		if r.parts == nil {
			r.parts = make(map[*extent]*extent)
		}
		r.parts[c.extent] = part
	}
	if part == nil && !r.tables.backends.full {
		return nil, errNoBackends
	}

	return part, nil
}

// writtenPart returns the extent of those backends of e that are in the map: e
// itself if all are, nil if none is.
func (r *Reconciler) writtenPart(p *port, e *extent) *extent {
	ids := r.scratch[:0]
	for i := range p.backends {
		if b := &p.backends[i]; b.written && e.holds(b.id) {
			ids = append(ids, b.id)
		}
	}
	slices.Sort(ids)
	r.scratch = ids
	if len(ids) == len(e.ids) {
		return e
	}

	return p.extent(ids, e.table != nil)
}

// lead notes that the map says v at f: f leads to e now, and no more to what
// it led to.
func (r *Reconciler) lead(f *frontend, p *port, e *extent, v maps.Frontend) {
	r.stay(f)
	r.unlead(f, p)
	f.present, f.have, f.port, f.extent = true, v, p, e
	p.frontends++
	r.addrs.lead(f.key, 1)
	if v.Flags&maps.FrontendSourceRanges != 0 {
		p.fenced++
	}
	if e != nil {
		e.frontends++
	}
}

// unlead notes that f does not lead any more to what it led to. If that was
// another Service's than to's, it is due.
func (r *Reconciler) unlead(f *frontend, to *port) {
	delete(r.broken, f.key)
	if !f.present {
		return
	}
	f.present = false
	if f.extent != nil {
		f.extent.frontends--
	}
	was := f.port
	was.frontends--
	r.addrs.lead(f.key, -1)
	if f.have.Flags&maps.FrontendSourceRanges != 0 {
		was.fenced--
	}
	if to != was && was.mayBeUDP() {
		was.left = append(was.left, leftFrontend{key: f.key})
	}
	if to != nil && to.svc != was.svc {
		r.queue.add(was.svc, 0)
	}
}

// shortfall is what of a port could not be written: the first of it, and how
// many in all.
type shortfall struct {
	first fmt.Stringer
	err   error
	count int
}

func (s *shortfall) add(what fmt.Stringer, err error) {
	if s.count == 0 {
		s.first, s.err = what, err
	}
	s.count++
}

func (p *port) note(kind string, short shortfall) {
	switch short.count {
	case 0:
	case 1:
		p.svc.fail(fmt.Sprintf("%s %s", kind, short.first), short.err)
	default:
		p.svc.fail(fmt.Sprintf("%s %s and %d more", kind, short.first, short.count-1), short.err)
	}
}
