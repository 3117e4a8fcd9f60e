package reconcile

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// frontend is a key in the frontends map: who claims it, and what the map says.
type frontend struct {
	key     maps.FrontendKey
	present bool          // in the map
	leaving int32         // its index in the leaving list of port.svc, plus one; zero: not in it
	have    maps.Frontend // as the map has it
	port    *port         // that have.Id stands for
	extent  *extent       // that have leads to
	first   *claim        // in order of precedence
}

// claim is a service port that wants to answer at a frontend.
type claim struct {
	port     *port
	frontend *frontend
	extent   *extent   // nil: no backends
	next     *claim    // the next in precedence
	created  time.Time // of the Service that claims: another of its name may follow

	affinitySeconds uint32
	flags           uint16
	kind            uint8
	algorithm       uint8
}

// kindRank orders the kinds of frontends: whose claim to an address is better.
var kindRank = [...]uint8{
	maps.KindClusterIP:    1,
	maps.KindLoadBalancer: 2,
	maps.KindExternalIP:   3,
	maps.KindNodePort:     4,
}

// compare orders claims to one frontend, better ones first: by kind, then the
// older Service's, then by name. It never calls two different claims equal, so
// that who owns a frontend does not depend on who came first.
func (c *claim) compare(d *claim) int {
	a, b := c.port.svc, d.port.svc

	return cmp.Or(
		cmp.Compare(kindRank[c.kind], kindRank[d.kind]),
		c.created.Compare(d.created),
		compareNames(a.name, b.name),
		strings.Compare(c.port.name, d.port.name),
		cmp.Compare(c.port.protocol, d.port.protocol),
	)
}

// catchAll says whether c refuses what no port of its address takes.
func (f *frontend) catchAll() bool { return f.key.Port == 0 && f.key.Proto == 0 }

// wins says whether c has its address.
func (c *claim) wins() bool { return c.frontend.first == c && !c.frontend.held() }

// held says whether f still leads to a Service of which only the maps are
// known yet: its claim comes with Set, or Prune says that there is none.
func (f *frontend) held() bool {
	return f.port != nil && f.port.svc.adopted && f.port.svc.name != nameless
}

// value is what the map says where c leads to e.
func (c *claim) value(e *extent) maps.Frontend {
	v := maps.Frontend{
		Id:              c.port.id,
		AffinitySeconds: c.affinitySeconds,
		Flags:           c.flags,
		Kind:            c.kind,
		Algorithm:       c.algorithm,
	}
	if e != nil {
		v.SlotBase, v.SlotCount, v.TableSize = e.base, uint32(len(e.ids)), uint32(len(e.table))
	}

	return v
}

// link enters c among the claims to its frontend. Whoever wins or loses by it
// is due.
func (r *Reconciler) link(c *claim) {
	f := c.frontend
	was := f.first
	at := &f.first
	for *at != nil && (*at).compare(c) <= 0 {
		at = &(*at).next
	}
	c.next, *at = *at, c
	c.port.claims++
	r.addrs.claim(f.key, 1)
	if c.extent != nil {
		c.extent.claims++
	}
	r.contest(f, was)
}

// unlink takes c out of the claims to its frontend.
func (r *Reconciler) unlink(c *claim) {
	f := c.frontend
	was := f.first
	at := &f.first
	for *at != c {
		at = &(*at).next
	}
	*at = c.next
	c.port.claims--
	r.addrs.claim(f.key, -1)
	if c.extent != nil {
		c.extent.claims--
	}
	r.contest(f, was)
}

// contest makes the Services due that a change of f's first claim concerns.
// A frontend that nobody claims goes.
func (r *Reconciler) contest(f *frontend, was *claim) {
	if was != nil && was != f.first {
		r.touch(was.port.svc)
	}
	switch {
	case f.first != nil && f.first != was:
		r.touch(f.first.port.svc)
	case f.first == nil && f.present:
		r.leave(f)
		r.touch(f.port.svc)
	case f.first == nil:
		delete(r.frontends, f.key)
	}
}

// leave notes that nobody claims f, which is in the map.
func (r *Reconciler) leave(f *frontend) {
	if svc := f.port.svc; f.leaving == 0 {
		svc.leaving = append(svc.leaving, f)
		f.leaving = int32(len(svc.leaving))
	}
}

// stay takes f, which somebody claims again, off the list of its Service. Its
// place is empty until withdraw.
func (r *Reconciler) stay(f *frontend) {
	if f.leaving != 0 {
		f.port.svc.leaving[f.leaving-1] = nil
		f.leaving = 0
	}
}

// release ends the time in which svc keeps what an earlier agent gave it. Who
// waited for an address of it is due.
func (r *Reconciler) release(svc *service) {
	if !svc.adopted {
		return
	}
	svc.adopted = false
	for _, f := range svc.leaving {
		if f != nil && f.first != nil {
			r.touch(f.first.port.svc)
		}
	}
}

// frontend returns the frontend with this key, after making it if need be.
func (r *Reconciler) frontend(key maps.FrontendKey) *frontend {
	f := r.frontends[key]
	if f == nil {
		f = &frontend{key: key}
		r.frontends[key] = f
	}

	return f
}

// keyOf returns k as the map has it.
func keyOf(k lb.FrontendKey) maps.FrontendKey {
	return maps.FrontendKeyOf(k.Addr, k.Port, uint8(k.Protocol), uint8(k.Scope))
}

// modelKey returns k as package lb has it.
func modelKey(k maps.FrontendKey) lb.FrontendKey {
	at := k.AddrPort()

	return lb.FrontendKey{Addr: at.Addr(), Port: at.Port(), Protocol: lb.Protocol(k.Proto), Scope: lb.Scope(k.Scope)}
}

func familyOf(addr netip.Addr) lb.Family {
	if addr.Unmap().Is4() {
		return lb.IPv4
	}

	return lb.IPv6
}
