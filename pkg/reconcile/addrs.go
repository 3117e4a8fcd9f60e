package reconcile

import (
	"bytes"
	"errors"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// addrs keeps the map that says what each address is to us, and the filter before it.
// Programs look there before anywhere else: a frontend at an address that is not marked as a
// Service's does not exist for them, and neither does a flow to one. So the mark comes before
// the first frontend of an address. Flows outlive their frontends: when the last one of an
// address has gone, the address lingers. It keeps the mark until a look at all flows, begun
// after that moment, has found none that dialled it.
//
// An entry is only written when it changes: a program that looks while one is being replaced
// may find none.
type addrs struct {
	mirror[maps.Addr, maps.AddrUse]
	filter *maps.AddrFilter
	clock  clock
	uses   map[maps.Addr]*addrUse
	stale  map[maps.Addr]struct{} // of which the map says something else
	retry  backoff
}

// addrUse is what one address is to us.
type addrUse struct {
	node      maps.AddrUse // as the node's own; zero: it is not
	frontends int          // in the map that have it, or in their grace period
	// lingers is when a look at all flows may begin that can tell whether any needs the
	// mark still, never as long as that is not known; zero: the address does not linger.
	lingers instant
}

func newAddrs(m mirror[maps.Addr, maps.AddrUse], filter *maps.AddrFilter, c clock) addrs {
	return addrs{
		mirror: m, filter: filter, clock: c,
		uses: make(map[maps.Addr]*addrUse), stale: make(map[maps.Addr]struct{}),
	}
}

// want is what the map should say; zero: nothing.
func (u *addrUse) want() maps.AddrUse {
	want := u.node
	if u.frontends > 0 || u.lingers != 0 {
		want.Flags |= maps.AddrService
	}

	return want
}

func (a *addrs) use(k maps.Addr) *addrUse {
	u := a.uses[k]
	if u == nil {
		u = &addrUse{}
		a.uses[k] = u
	}

	return u
}

// compare notes whether the map says what it should of an address, after either has changed,
// and forgets one that is nothing to us any more.
func (a *addrs) compare(k maps.Addr, u *addrUse) {
	have, there := a.have[k]
	if want := u.want(); have != want || there != (want != maps.AddrUse{}) {
		a.stale[k] = struct{}{}
		a.retry.at = 0

		return
	}
	delete(a.stale, k)
	if *u == (addrUse{}) {
		delete(a.uses, k)
	}
}

// adopt takes over what the map holds, after all frontends have been. What marks no
// Service's address stays the node's until setNode says otherwise. A mark without a
// frontend lingers: any flow may need it.
func (a *addrs) adopt() error {
	if err := a.mirror.adopt(); err != nil {
		return err
	}
	for k, v := range a.have {
		a.filter.Add(k)
		u := a.use(k)
		u.node = v
		u.node.Flags &^= maps.AddrService
		if v.Flags&maps.AddrService != 0 && u.frontends == 0 {
			u.lingers = never
		}
	}
	for k, u := range a.uses {
		a.compare(k, u)
	}
	a.filter.Trim()

	return nil
}

// lingers reports whether addresses were adopted without a frontend.
func (a *addrs) lingers() bool {
	for _, u := range a.uses {
		if u.lingers == never {
			return true
		}
	}

	return false
}

// lingerAll begins the lingering of the addresses that were adopted without a frontend, when
// no program runs any more that ran then.
func (a *addrs) lingerAll() {
	for _, u := range a.uses {
		if u.lingers == never {
			u.lingers = a.clock.now()
		}
	}
}

// setNode says which addresses are the node's.
func (a *addrs) setNode(node map[maps.Addr]maps.AddrUse) {
	for k, u := range a.uses {
		if _, still := node[k]; !still && u.node != (maps.AddrUse{}) {
			u.node = maps.AddrUse{}
			a.compare(k, u)
		}
	}
	for k, v := range node {
		u := a.use(k)
		u.node = v
		a.compare(k, u)
	}
}

// ofEveryAddr reports whether key is that of a node port: it has no address of its own.
func ofEveryAddr(key maps.FrontendKey) bool { return key.Addr.IP().IsUnspecified() }

// mark makes the address of a frontend a Service's, before it is written.
func (a *addrs) mark(key maps.FrontendKey) error {
	if ofEveryAddr(key) || a.have[key.Addr].Flags&maps.AddrService != 0 {
		return nil
	}
	u := a.use(key.Addr)
	v := u.node
	v.Flags |= maps.AddrService
	if err := a.write(key.Addr, v); err != nil {
		a.compare(key.Addr, u)

		return err
	}
	if u.frontends == 0 {
		u.lingers = a.clock.now() // until the frontend is written
	}
	a.compare(key.Addr, u)

	return nil
}

// lead notes that a frontend is in the map.
func (a *addrs) lead(key maps.FrontendKey) {
	if !ofEveryAddr(key) {
		u := a.use(key.Addr)
		u.frontends++
		u.lingers = 0
		a.compare(key.Addr, u)
	}
}

// unlead notes that no program knows a frontend any more that was in the map.
func (a *addrs) unlead(key maps.FrontendKey) {
	if !ofEveryAddr(key) {
		u := a.use(key.Addr)
		if u.frontends--; u.frontends == 0 {
			u.lingers = a.clock.now()
		}
		a.compare(key.Addr, u)
	}
}

// prune ends the lingering of addresses of which a look at all flows, begun at begin, has
// found none.
func (a *addrs) prune(dialled map[maps.Addr]struct{}, begin instant) {
	for k, u := range a.uses {
		if u.lingers == 0 || u.lingers >= begin {
			continue
		}
		if _, needed := dialled[k]; !needed {
			u.lingers = 0
			a.compare(k, u)
		}
	}
}

// due returns when apply has something to do, or never.
func (a *addrs) due() instant {
	if len(a.stale) == 0 {
		return never
	}

	return a.retry.at
}

// apply makes the map say what it should of every address, or of as many as half of the
// operations left in this Apply are enough for: it writes what is new or different, then deletes what is to
// go, and if there was no room before, writes again.
func (a *addrs) apply(now instant) error {
	if a.due() > now || a.spent() {
		return nil
	}
	keys := make([]maps.Addr, 0, min(len(a.stale), (a.left+1)/2))
	for k := range a.stale {
		if len(keys) == cap(keys) {
			break
		}
		keys = append(keys, k)
	}
	slices.SortFunc(keys, compareAddrs)
	err := a.writeAll(keys)
	var failed []error
	for _, k := range keys {
		if u := a.uses[k]; u != nil && u.want() == (maps.AddrUse{}) {
			failed = append(failed, a.remove(k, u))
		}
	}
	if err != nil && a.full && a.freed {
		err = a.writeAll(keys)
	}
	err = errors.Join(append(failed, err)...)
	a.retry.after(err, now)

	return err
}

func (a *addrs) writeAll(keys []maps.Addr) error {
	var failed []error
	for _, k := range keys {
		if u := a.uses[k]; u != nil && u.want() != (maps.AddrUse{}) {
			failed = append(failed, a.write(k, u.want()))
			a.compare(k, u)
		}
	}

	return errors.Join(failed...)
}

// write sets the bit of an address in the filter before it is in the map.
func (a *addrs) write(k maps.Addr, v maps.AddrUse) error {
	_, there := a.have[k]
	if !there {
		a.filter.Add(k)
	}
	err := a.set(k, v)
	if err != nil && !there {
		a.filter.Remove(k)
	}

	return err
}

func (a *addrs) remove(k maps.Addr, u *addrUse) error {
	if err := a.unset(k); err != nil {
		return err
	}
	a.filter.Remove(k)
	a.compare(k, u)

	return nil
}

func compareAddrs(a, b maps.Addr) int { return bytes.Compare(a.Bytes[:], b.Bytes[:]) }
