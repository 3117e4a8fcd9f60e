package reconcile

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// addrs is the map of all addresses that concern programs, with the filters before it. Programs look
// there first: a frontend at an address that is not marked as a Service's does not exist for them,
// and neither does a flow to it. So the mark is written before the first frontend of an address.
// Flows outlive frontends: when the last frontend of an address is gone, the address drains. It
// keeps the mark until a scan of all flows that started after that finds none to it. It counts to the
// Service that has left it. An address that the node loses drains, too, because it may come back: a device that
// goes down loses those of IPv6, and a packet that programs do not know would be answered by a reset.
type addrs struct {
	derived[maps.Addr, maps.AddrUse]
	filter    *maps.AddrFilter
	ports     *maps.PortFilter // node ports, which are open at addresses of the node
	now       func() time.Time
	node      map[maps.Addr]maps.AddrUse // the node's own
	left      map[maps.Addr]struct{}     // of backends that Services have left, and sockets have dialled
	frontends map[maps.Addr]int          // number in the map or in a grace period
	draining  map[maps.Addr]*drain
	queue     []*drain               // in the order in which scans look at them; one that has ended is not in draining any more
	drains    map[lb.ServiceName]int // how many addresses drain that a Service has left
	scan      scan                   // the last one
	// adopted reports whether programs may still run that began under an earlier agent, and whose
	// flows no scan has to find.
	adopted bool
}

// drain is an address that has lost its last frontend, or that the node has lost.
type drain struct {
	addr  maps.Addr
	since time.Time
	by    lb.ServiceName // had the frontend
	lost  bool           // by the node
}

// scan is what a scan of all flows has found.
type scan struct {
	inUse map[maps.Addr]struct{} // the original destinations of flows
	begin time.Time
}

func newAddrs(m mirror[maps.Addr, maps.AddrUse], filter *maps.AddrFilter, ports *maps.PortFilter, now func() time.Time) *addrs {
	a := &addrs{
		filter: filter, ports: ports, now: now, node: make(map[maps.Addr]maps.AddrUse), left: make(map[maps.Addr]struct{}),
		frontends: make(map[maps.Addr]int), draining: make(map[maps.Addr]*drain), drains: make(map[lb.ServiceName]int),
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
			a.drain(k, nameless)
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
		if _, has := node[k]; !has && a.frontends[k] == 0 && a.draining[k] == nil {
			a.drain(k, nameless)
			a.draining[k].lost = true
		}
		a.compare(k)
	}
	for k := range node {
		if d := a.draining[k]; d != nil && d.lost {
			a.endDrain(k)
		}
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
// frontend is written next: then addFrontend is called or, if that fails, keep.
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
	if err != nil {
		a.compare(k)
	}

	return err
}

// keep records that the frontend of a Service could not be written whose address was marked: the address drains,
// so that the Service that has it, and no room for the frontend, does not take turns for ever with one that lacks
// the address.
func (a *addrs) keep(key maps.FrontendKey, by lb.ServiceName) {
	if k := key.Addr; !ofEveryAddr(key) && a.frontends[k] == 0 && a.draining[k] == nil {
		a.drain(k, by)
		a.compare(k)
	}
}

// addFrontend records that a frontend is in the map.
func (a *addrs) addFrontend(key maps.FrontendKey) {
	if ofEveryAddr(key) {
		a.ports.Add(maps.Port(key.Port))

		return
	}
	a.frontends[key.Addr]++
	a.endDrain(key.Addr)
	a.compare(key.Addr)
}

// removeFrontend records that no program can read a frontend any more that a Service had in the map.
func (a *addrs) removeFrontend(key maps.FrontendKey, of lb.ServiceName) {
	if k := key.Addr; !ofEveryAddr(key) {
		if a.frontends[k]--; a.frontends[k] == 0 {
			delete(a.frontends, k)
			a.drain(k, of)
		}
		a.compare(k)
	}
}

// drain records that a Service has left an address.
func (a *addrs) drain(k maps.Addr, by lb.ServiceName) {
	a.draining[k] = &drain{addr: k, since: a.now(), by: by}
	if len(a.queue) >= 2*len(a.draining)+maxPruned {
		a.queue = slices.DeleteFunc(a.queue, func(d *drain) bool { return a.draining[d.addr] != d })
	}
	a.queue = append(a.queue, a.draining[k])
	a.drains[by]++
}

// endDrain records that an address does not drain any more.
func (a *addrs) endDrain(k maps.Addr) {
	d := a.draining[k]
	if d == nil {
		return
	}
	delete(a.draining, k)
	if a.drains[d.by]--; a.drains[d.by] == 0 {
		delete(a.drains, d.by)
	}
}

// errLeft is why a Service gets no further external address.
var errLeft = fmt.Errorf("addresses that the Service has left are kept until no flow uses them, and there are too many of these: %w", maps.ErrFull)

// admitExternal returns why a frontend at an external address cannot have an entry for that, or nil. The error wraps
// [maps.ErrFull].
func (a *addrs) admitExternal(k maps.Addr, by lb.ServiceName) error {
	if _, there := a.have[k]; there {
		return nil
	}
	if most := a.Capacity() / limitShare; most > 0 && a.drains[by] >= most {
		return a.note(errLeft)
	}

	return a.admit(ofClusterIPs)
}

// endAdoption records that no program runs any more that began under an earlier agent: scans of flows
// that start from now on count.
func (a *addrs) endAdoption() {
	a.adopted = false
	for _, d := range a.draining {
		d.since = a.now()
	}
}

// prune has the draining of addresses end to which a scan of flows that started at begin found no flow.
func (a *addrs) prune(originalDsts map[maps.Addr]struct{}, begin time.Time) {
	if !a.adopted {
		a.scan = scan{originalDsts, begin}
	}
}

// isPruning reports whether the last scan may end the draining of further addresses.
func (a *addrs) isPruning() bool { return len(a.queue) > 0 && a.queue[0].since.Before(a.scan.begin) }

// due returns when apply has something to do, and false if it has nothing.
func (a *addrs) due() (time.Time, bool) {
	if a.isPruning() && len(a.stale) < maxPruned {
		return time.Time{}, true
	}

	return a.derived.due()
}

// maxPruned is how many addresses may be about to be removed at a time: fewer than one Apply writes, so that an
// address of the node does not wait for them.
const maxPruned = 250

// apply ends the draining of some addresses, and writes what is stale.
func (a *addrs) apply(now time.Time) error {
	for a.isPruning() && len(a.stale) < maxPruned && !a.spent() {
		a.spend(costLook)
		d := a.queue[0]
		a.queue[0], a.queue = nil, a.queue[1:]
		if a.draining[d.addr] != d {
			continue
		}
		if _, needed := a.scan.inUse[d.addr]; needed {
			d.since = a.scan.begin // a later scan counts
			a.queue = append(a.queue, d)

			continue
		}
		a.endDrain(d.addr)
		a.compare(d.addr)
	}
	if !a.isPruning() {
		a.scan = scan{}
	}

	return a.derived.apply(now)
}

func compareAddrs(a, b maps.Addr) int { return bytes.Compare(a.Bytes[:], b.Bytes[:]) }
