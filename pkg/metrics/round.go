package metrics

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Round is one round of programming changes.
type Round struct {
	Begin time.Time
	// Full is set if everything was written, or compared with the maps.
	Full bool
	// Retry is set if the round tries again what has failed before.
	Retry bool
	// Failed is set if a write of this round has failed, or is still due.
	Failed bool
	// Programmed reports whether a Service is in force as it was read, or does not
	// exist.
	Programmed func(lb.ServiceName) bool
}

// Done reports that a round is over. The duration of a round is observed under the
// families of the changes that made a difference since the round before, that of a full
// round under both, and that of a round which had nothing to do under none.
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
	seconds := s.now().Sub(r.Begin).Seconds()
	kind := s.partial
	if r.Full {
		kind = s.full
	}
	for family := range families.names {
		s.rounds.WithLabelValues(family).Observe(seconds)
		kind.WithLabelValues(family).Observe(seconds)
	}
	// The latency of changes that are not in force yet is observed in a later round.
	for key, times := range s.triggered {
		if !r.Programmed(key.service) {
			continue
		}
		latency := s.latency.WithLabelValues(key.family.String())
		for _, at := range times {
			latency.Observe(s.now().Sub(at).Seconds())
		}
		delete(s.triggered, key)
	}

	done := s.received | families
	s.slicesLeft.Sub(float64(s.read.slices))
	s.serviceLeft.Sub(float64(s.read.services))
	s.read, s.due = changes{}, None
	if r.Failed {
		s.retry |= families

		return
	}
	if r.Full || r.Retry {
		s.retry = None
	}
	s.received = None
	s.stamp(s.programmed, done)
	for p, policy := range []string{"internal", "external"} {
		for i, family := range []Families{IPv4, IPv6} {
			for name := range (done & family).names {
				s.noLocal.WithLabelValues(policy, name).Set(float64(s.lacking[p][i]))
			}
		}
	}
}

// noLocal counts service ports with a traffic policy Local that have endpoints, but none
// on this node: by policy (internal, external), and by family (IPv4, IPv6).
type noLocal [2][2]int32

func (n *noLocal) add(m noLocal, sign int32) {
	for policy := range m {
		for family, count := range m[policy] {
			n[policy][family] += sign * count
		}
	}
}

// Resolved reports the resolution of a Service. It is the zero Resolution if the Service
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

// lackingLocal counts the ports whose clients are dropped because no endpoint is on this
// node. ClusterIPs follow the internal policy, all other addresses the external one; a
// port counts once for each policy, however many addresses it has.
func lackingLocal(frontends []lb.Frontend) noLocal {
	type place struct {
		port           lb.PortName
		policy, family int
	}
	var counted map[place]bool
	var n noLocal
	for i := range frontends {
		f := &frontends[i]
		if !f.DropIfEmpty || f.Key.Port == 0 {
			continue
		}
		at := place{port: f.Port}
		if f.Kind != lb.KindClusterIP {
			at.policy = 1
		}
		if f.Key.Addr.Is6() {
			at.family = 1
		}
		if counted[at] {
			continue
		}
		if counted == nil {
			counted = make(map[place]bool)
		}
		counted[at] = true
		n[at.policy][at.family]++
	}

	return n
}
