package reconcile

import (
	"bytes"

	"github.com/sluice-lb/sluice/maps"
)

// addrs keeps the map that says what each address is to us, and the filter before it.
// Programs look there before anywhere else: a frontend at an address that is not marked as a
// Service's does not exist for them, and neither does a flow to one. So the mark comes before
// the first frontend of an address. Flows outlive their frontends: when the last one of an
// address has gone, the address lingers. It keeps the mark until a look at all flows, begun
// after that moment, has found none that dialled it.
type addrs struct {
	derived[maps.Addr, maps.AddrUse]
	filter    *maps.AddrFilter
	ports     *maps.PortFilter // of the node's addresses: node ports
	clock     clock
	node      map[maps.Addr]maps.AddrUse // the node's own
	frontends map[maps.Addr]int          // how many in the map have it, or are in their grace period
	lingering map[maps.Addr]instant      // since when
	// settled is from when on a look at all flows counts: programs that ran at the time of an
	// earlier agent have ended.
	settled instant
}

func newAddrs(m mirror[maps.Addr, maps.AddrUse], filter *maps.AddrFilter, ports *maps.PortFilter, c clock) *addrs {
	a := &addrs{
		filter: filter, ports: ports, clock: c, node: make(map[maps.Addr]maps.AddrUse),
		frontends: make(map[maps.Addr]int), lingering: make(map[maps.Addr]instant),
	}
	a.derived = newDerived(m, func(k maps.Addr) (maps.AddrUse, bool) {
		use := a.node[k]
		if _, lingers := a.lingering[k]; lingers || a.frontends[k] > 0 {
			use.Flags |= maps.AddrService
		}

		return use, use != maps.AddrUse{}
	})
	a.order = compareAddrs
	a.enters, a.leaves = filter.Add, filter.Remove

	return a
}

// adopt takes over what the map holds, after all frontends have been. What marks no
// Service's address stays the node's until setNode says otherwise. A mark without a
// frontend lingers: any flow may need it.
func (a *addrs) adopt() error {
	if err := a.derived.adopt(); err != nil {
		return err
	}
	for k, v := range a.have {
		marked := v.Flags&maps.AddrService != 0
		if v.Flags &^= maps.AddrService; v != (maps.AddrUse{}) {
			a.node[k] = v
		}
		if marked && a.frontends[k] == 0 {
			a.lingering[k] = a.clock.now()
			a.settled = never
		}
		a.compare(k)
	}
	for k := range a.frontends {
		a.compare(k)
	}
	a.filter.Trim()

	return nil
}

// setNode says which addresses are the node's.
func (a *addrs) setNode(node map[maps.Addr]maps.AddrUse) {
	before := a.node
	a.node = node
	for k := range before {
		a.compare(k)
	}
	for k := range node {
		a.compare(k)
	}
}

// ofEveryAddr reports whether key is that of a node port: it has no address of its own.
func ofEveryAddr(key maps.FrontendKey) bool { return key.Addr.IP().IsUnspecified() }

// mark makes the address of a frontend a Service's, or its port a node port, before it is
// written.
func (a *addrs) mark(key maps.FrontendKey) error {
	if ofEveryAddr(key) {
		a.ports.Add(maps.Port(key.Port))

		return nil
	}
	k := key.Addr
	if a.have[k].Flags&maps.AddrService != 0 {
		return nil
	}
	use := a.node[k]
	use.Flags |= maps.AddrService
	err := a.set(k, use)
	if err == nil && a.frontends[k] == 0 {
		a.lingering[k] = a.clock.now() // until the frontend is written
	}
	a.compare(k)

	return err
}

// lead notes that a frontend is in the map.
func (a *addrs) lead(key maps.FrontendKey) {
	if ofEveryAddr(key) {
		a.ports.Add(maps.Port(key.Port))

		return
	}
	a.frontends[key.Addr]++
	delete(a.lingering, key.Addr)
	a.compare(key.Addr)
}

// unlead notes that no program knows a frontend any more that was in the map.
func (a *addrs) unlead(key maps.FrontendKey) {
	if k := key.Addr; !ofEveryAddr(key) {
		if a.frontends[k]--; a.frontends[k] == 0 {
			delete(a.frontends, k)
			a.lingering[k] = a.clock.now()
		}
		a.compare(k)
	}
}

// maxPruned is how many addresses one look ends the lingering of: some milliseconds' work.
const maxPruned = 8000

// prune ends the lingering of addresses of which a look at all flows, begun at begin, has
// found none. What is too much is left to the next look.
func (a *addrs) prune(dialled map[maps.Addr]struct{}, begin instant) {
	pruned := 0
	for k, since := range a.lingering {
		if _, needed := dialled[k]; needed || max(since, a.settled) >= begin {
			continue
		}
		if pruned++; pruned > maxPruned {
			return
		}
		delete(a.lingering, k)
		a.compare(k)
	}
}

func compareAddrs(a, b maps.Addr) int { return bytes.Compare(a.Bytes[:], b.Bytes[:]) }
