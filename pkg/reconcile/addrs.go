package reconcile

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// addrs is the map of all addresses that concern programs, with the filters before it. Programs look
// there first: a frontend at an address that is not marked as a Service's does not exist for them,
// and neither does a flow to it. So the mark is written before the first frontend of an address.
// Flows outlive frontends: when the last frontend of an address is gone, the address drains. It
// keeps the mark until a scan of all flows that started after that finds none to it.
type addrs struct {
	derived[maps.Addr, maps.AddrUse]
	filter    *maps.AddrFilter
	ports     *maps.PortFilter // node ports, which are open at addresses of the node
	now       func() time.Time
	node      map[maps.Addr]maps.AddrUse // the node's own
	left      map[maps.Addr]struct{}     // of backends that Services have left, and sockets have dialled
	frontends map[maps.Addr]int          // number in the map or in a grace period
	draining  map[maps.Addr]time.Time    // since when
	// adopted reports whether programs may still run that began under an earlier agent, and whose
	// flows no scan has to find.
	adopted bool
}

func newAddrs(m mirror[maps.Addr, maps.AddrUse], filter *maps.AddrFilter, ports *maps.PortFilter, now func() time.Time) *addrs {
	a := &addrs{
		filter: filter, ports: ports, now: now, node: make(map[maps.Addr]maps.AddrUse), left: make(map[maps.Addr]struct{}),
		frontends: make(map[maps.Addr]int), draining: make(map[maps.Addr]time.Time),
	}
	a.derived = newDerived(m, func(k maps.Addr) (maps.AddrUse, bool) {
		use := a.withoutFrontends(k)
		if _, drains := a.draining[k]; drains || a.frontends[k] > 0 {
			use.Flags |= maps.AddrService
		}

		return use, use != maps.AddrUse{}
	})
	a.order = compareAddrs
	a.onAdd, a.onRemove = filter.Add, filter.Remove

	return a
}

// withoutFrontends returns how an address is used apart from its frontends.
func (a *addrs) withoutFrontends(k maps.Addr) maps.AddrUse {
	use := a.node[k]
	if _, left := a.left[k]; left {
		use.Flags |= maps.AddrLeft
	}

	return use
}

// setLeft sets the addresses of backends that Services have left, and sockets have dialled.
func (a *addrs) setLeft(left map[maps.Addr]struct{}) {
	before := a.left
	a.left = left
	for k := range before {
		a.compare(k)
	}
	for k := range left {
		a.compare(k)
	}
}

// adopt copies the map, after all frontends were adopted. Addresses of the node stay until setNode
// is called, those of backends that Services have left until setLeft is. A marked address without a frontend drains, because flows may need it.
func (a *addrs) adopt() error {
	if err := a.derived.adopt(); err != nil {
		return err
	}
	for k, v := range a.have {
		marked := v.Flags&maps.AddrService != 0
		if v.Flags&maps.AddrLeft != 0 {
			a.left[k] = struct{}{}
		}
		if v.Flags &^= maps.AddrService | maps.AddrLeft; v != (maps.AddrUse{}) {
			a.filter.AddNode(k)
			a.node[k] = v
		}
		if marked && a.frontends[k] == 0 {
			a.draining[k] = a.now()
			a.adopted = true
		}
		a.compare(k)
	}
	for k := range a.frontends {
		a.compare(k)
	}
	a.filter.Trim()

	return nil
}

// setNode sets the addresses of the node. One that goes keeps its bit in the filter.
func (a *addrs) setNode(node map[maps.Addr]maps.AddrUse) {
	before := a.node
	a.node = node
	for k := range node {
		if _, known := before[k]; !known {
			a.filter.AddNode(k)
		}
	}
	for k := range before {
		a.compare(k)
	}
	for k := range node {
		a.compare(k)
	}
}

// ofEveryAddr reports whether key is a node port: it applies to every address of the node.
func ofEveryAddr(key maps.FrontendKey) bool { return key.Addr.IP().IsUnspecified() }

// nodePortOf returns the key of the node port that answers where a frontend does, if its address is the node's.
func nodePortOf(key maps.FrontendKey) maps.FrontendKey {
	unspecified := netip.IPv6Unspecified()
	if key.Addr.IP().Is4() {
		unspecified = netip.IPv4Unspecified()
	}
	key.Addr = maps.AddrOf(unspecified)

	return key
}

// catchAllOf returns the key of the catch-all that a ClusterIP has.
func catchAllOf(key maps.FrontendKey) maps.FrontendKey {
	key.Port, key.Proto = 0, 0

	return key
}

// mark marks the address of a frontend as a Service's, or adds its node port to the filter. The
// frontend is written next.
func (a *addrs) mark(key maps.FrontendKey) error {
	if ofEveryAddr(key) {
		a.ports.Add(maps.Port(key.Port))

		return nil
	}
	k := key.Addr
	if a.have[k].Flags&maps.AddrService != 0 {
		return nil
	}
	use := a.withoutFrontends(k)
	use.Flags |= maps.AddrService
	err := a.set(k, use)
	if err == nil && a.frontends[k] == 0 {
		a.draining[k] = a.now() // until addFrontend
	}
	a.compare(k)

	return err
}

// addFrontend records that a frontend is in the map.
func (a *addrs) addFrontend(key maps.FrontendKey) {
	if ofEveryAddr(key) {
		a.ports.Add(maps.Port(key.Port))

		return
	}
	a.frontends[key.Addr]++
	delete(a.draining, key.Addr)
	a.compare(key.Addr)
}

// removeFrontend records that no program can read a frontend any more that was in the map.
func (a *addrs) removeFrontend(key maps.FrontendKey) {
	if k := key.Addr; !ofEveryAddr(key) {
		if a.frontends[k]--; a.frontends[k] == 0 {
			delete(a.frontends, k)
			a.draining[k] = a.now()
		}
		a.compare(k)
	}
}

// endAdoption records that no program runs any more that began under an earlier agent: scans of flows
// that start from now on count.
func (a *addrs) endAdoption() {
	a.adopted = false
	for k := range a.draining {
		a.draining[k] = a.now()
	}
}

// maxPruned is how many addresses one call of prune removes: some milliseconds of work.
const maxPruned = 8000

// prune ends the draining of addresses to which a scan of flows that started at begin found no flow.
// Addresses beyond maxPruned are left to the next call.
func (a *addrs) prune(originalDsts map[maps.Addr]struct{}, begin time.Time) {
	if a.adopted {
		return
	}
	pruned := 0
	for k, since := range a.draining {
		if _, needed := originalDsts[k]; needed || !since.Before(begin) {
			continue
		}
		if pruned++; pruned > maxPruned {
			return
		}
		delete(a.draining, k)
		a.compare(k)
	}
}

func compareAddrs(a, b maps.Addr) int { return bytes.Compare(a.Bytes[:], b.Bytes[:]) }
