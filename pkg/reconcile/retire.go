package reconcile

import "slices"

// withdraw deletes the frontends of svc that nobody claims, catch-alls first.
func (r *Reconciler) withdraw(svc *service) {
	svc.leaving = slices.DeleteFunc(svc.leaving, func(f *frontend) bool { return f == nil })
	slices.SortStableFunc(svc.leaving, func(a, b *frontend) int { return catchAllLast(b, a) })
	svc.leaving = slices.DeleteFunc(svc.leaving, func(f *frontend) bool {
		err := r.withdrawFrontend(f)
		if err != nil {
			svc.fail("frontend "+modelKey(f.key).String(), err)
		}

		return err == nil
	})
	for i, f := range svc.leaving {
		f.leaving = int32(i) + 1
	}
}

func (r *Reconciler) withdrawFrontend(f *frontend) error {
	if f.first == nil && f.present {
		if err := r.tables.frontends.remove(f.key); err != nil {
			return err
		}
		r.unlead(f, nil)
		delete(r.frontends, f.key)
	}
	f.leaving = 0

	return nil
}

// sweep retires what of svc no frontend has led to for the grace period: slots
// and backends, source ranges, names. It returns when something else will be
// due; what fails is due with the next retry of svc.
func (r *Reconciler) sweep(svc *service, now instant) instant {
	s := sweeper{r: r, now: now, wake: never}
	for _, p := range svc.ports {
		p.extents = slices.DeleteFunc(p.extents, s.sweepExtent)
		p.backends = deleteFunc(p.backends, func(b *backend) bool { return s.sweepBackend(p, b) })
		wantsRanges := p.wantsRanges()
		p.ranges = deleteFunc(p.ranges, func(g *sourceRange) bool { return s.sweepRange(p, g, wantsRanges) })
		p.left = deleteFunc(p.left, func(l *leftFrontend) bool { return s.sweepLeft(p, l) })
	}
	svc.ports = slices.DeleteFunc(svc.ports, s.sweepPort)

	return s.wake
}

// sweeper is one sweep. Each of its methods says whether the Reconciler can
// forget what it looked at.
type sweeper struct {
	r    *Reconciler
	now  instant
	wake instant // when something will be ripe
}

// ripe says whether something goes now: that nothing has needed for the grace
// period. Due is its own note of when that ends.
func (s *sweeper) ripe(needed bool, due *instant) bool {
	if needed {
		*due = 0

		return false
	}
	if *due == 0 {
		*due = s.now.add(s.r.grace)
	}
	if *due > s.now {
		s.wake = earlier(s.wake, *due)
	}

	return *due <= s.now
}

func (s *sweeper) sweepExtent(e *extent) bool {
	if e.base != 0 && s.ripe(e.live(), &e.due) {
		s.r.tables.slots.remove(e.base, e.length())
		e.base, e.due = 0, 0
	}

	return e.base == 0 && e.claims == 0
}

// sweepBackend deletes b, unless a frontend leads to it or it keeps its flows.
// It is remembered as long as a claim wants it that another one keeps from its
// address.
func (s *sweeper) sweepBackend(p *port, b *backend) bool {
	needed := b.alive || p.leadsTo(b.id, (*extent).live)
	if b.written && s.ripe(needed, &b.due) {
		s.deleteBackend(p, b)
	}
	if b.written || p.leadsTo(b.id, (*extent).any) {
		return false
	}
	s.r.backendIDs.free(b.id)

	return true
}

func (s *sweeper) deleteBackend(p *port, b *backend) {
	if err := s.r.tables.backends.remove(b.id); err != nil {
		p.svc.fail("backend "+b.addrPort().String(), err)

		return
	}
	b.written, b.due = false, 0
	if p.mayBeUDP() {
		gone := GoneBackend{FrontendID: p.id, BackendID: b.id, Addr: b.addrPort()}
		s.r.gone.Backends = append(s.r.gone.Backends, gone)
	}
}

// sweepRange deletes g, unless frontends of p need it. Where others take its
// place it goes at once: whom it let in must not come in any more. It is
// remembered like a backend.
func (s *sweeper) sweepRange(p *port, g *sourceRange, wantsRanges bool) bool {
	if g.written && (p.replacesRange(g, wantsRanges) || s.ripe(p.needsRange(g, wantsRanges), &g.due)) {
		if err := s.r.tables.sourceRanges.remove(g.key); err != nil {
			p.svc.fail("source range "+g.key.Prefix().String(), err)
		} else {
			g.written, g.due = false, 0
		}
	}

	return !g.written && !g.wanted
}

// sweepLeft reports a frontend as gone, unless it has come back.
func (s *sweeper) sweepLeft(p *port, l *leftFrontend) bool {
	if f := s.r.frontends[l.key]; f != nil && f.present && f.port == p {
		return true
	}
	if !s.ripe(false, &l.due) {
		return false
	}
	gone := GoneFrontend{FrontendID: p.id, Key: modelKey(l.key)}
	s.r.gone.Frontends = append(s.r.gone.Frontends, gone)

	return true
}

// sweepPort deletes the name of p when nothing else is left of it.
func (s *sweeper) sweepPort(p *port) bool {
	ripe := s.ripe(p.inUse(), &p.due)
	if !p.empty() || p.named && !ripe {
		return false
	}
	if p.named {
		if err := s.r.tables.servicePorts.remove(p.id); err != nil {
			p.svc.fail("port "+p.String(), err)

			return false
		}
	}
	delete(s.r.ports, p.id)
	s.r.frontendIDs.free(p.id)

	return true
}

// deleteFunc is [slices.DeleteFunc] for elements that del changes. It gives the
// memory back when nothing is left.
func deleteFunc[E any](s []E, del func(*E) bool) []E {
	kept := 0
	for i := range s {
		if !del(&s[i]) {
			s[kept] = s[i]
			kept++
		}
	}
	clear(s[kept:])
	if kept == 0 {
		return nil
	}

	return s[:kept]
}
