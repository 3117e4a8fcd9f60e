package metrics

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Round is one round of writing what was read.
type Round struct {
	Begin time.Time
	// Full: everything was written, or compared with what is there.
	Full bool
	// Retry: the round is about what failed before.
	Retry bool
	// Failed: some write of this round did, or is still to come.
	Failed bool
	// Programmed says whether what was read of a Service is in force, or there is
	// no such Service.
	Programmed func(lb.ServiceName) bool
}

// Done says that a round is over. One that had nothing to do is none: its
// duration is not observed. A round is observed under the families of the changes
// that made a difference since the round before, a full one under both.
func (s *Sync) Done(r Round) {
	s.mu.Lock()
	defer s.mu.Unlock()
	families := s.due
	if r.Full {
		families = Both
	}
	if r.Retry {
		families |= s.retry
	}
	s.observe(r, families)
	s.settle(r.Programmed)

	done := s.heard | families
	s.slicesLeft.Sub(float64(s.read.slices))
	s.serviceLeft.Sub(float64(s.read.services))
	s.read, s.due = counts{}, None
	if r.Failed {
		s.retry |= families

		return
	}
	if r.Full || r.Retry {
		s.retry = None
	}
	s.heard = None
	s.stamp(s.programmed, done)
	s.tellLocal(done)
}

func (s *Sync) observe(r Round, families Families) {
	seconds := s.now().Sub(r.Begin).Seconds()
	kind := s.partial
	if r.Full {
		kind = s.full
	}
	for value := range s.rounds.of(families) {
		value.Observe(seconds)
	}
	for value := range kind.of(families) {
		value.Observe(seconds)
	}
}

// settle observes what is in force now. What is not stays for a later round.
func (s *Sync) settle(programmed func(lb.ServiceName) bool) {
	for key, times := range s.triggered {
		if !programmed(key.service) {
			continue
		}
		latency := s.latency.WithLabelValues(key.family.String())
		for _, at := range times {
			latency.Observe(s.now().Sub(at).Seconds())
		}
		delete(s.triggered, key)
	}
}

// noLocal counts service ports with a traffic policy Local and endpoints, though
// none on this node: by what the policy is about, and by family.
type noLocal struct{ internal, external [2]int32 }

func (n *noLocal) add(m noLocal, sign int32) {
	for i := range 2 {
		n.internal[i] += sign * m.internal[i]
		n.external[i] += sign * m.external[i]
	}
}

// Resolved says what follows from a Service. The zero Resolution is for one that
// is gone.
func (s *Sync) Resolved(name lb.ServiceName, res lb.Resolution) {
	count := lackingLocal(res.Frontends)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lacking.add(s.local[name], -1)
	s.lacking.add(count, 1)
	delete(s.local, name)
	if count != (noLocal{}) {
		s.local[name] = count
	}
}

// lackingLocal counts the ports whose clients are dropped, for want of an
// endpoint here. ClusterIPs follow the internal policy, all else the external
// one; a port counts once for each, however many addresses it has.
func lackingLocal(frontends []lb.Frontend) noLocal {
	type place struct {
		port     lb.PortName
		internal bool
		family   int
	}
	var seen map[place]struct{}
	var n noLocal
	for i := range frontends {
		f := &frontends[i]
		if !f.DropIfEmpty || f.Key.Port == 0 {
			continue
		}
		at := place{port: f.Port, internal: f.Kind == lb.KindClusterIP}
		if f.Key.Addr.Is6() {
			at.family = 1
		}
		if _, ok := seen[at]; ok {
			continue
		}
		if seen == nil {
			seen = make(map[place]struct{})
		}
		seen[at] = struct{}{}
		if at.internal {
			n.internal[at.family]++
		} else {
			n.external[at.family]++
		}
	}

	return n
}

func (s *Sync) tellLocal(families Families) {
	for i, family := range []Families{IPv4, IPv6} {
		for value := range s.lacksInternal.of(families & family) {
			value.Set(float64(s.lacking.internal[i]))
		}
		for value := range s.lacksExternal.of(families & family) {
			value.Set(float64(s.lacking.external[i]))
		}
	}
}
