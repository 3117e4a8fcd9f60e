package reconcile

import (
	"bytes"
	"errors"
	"iter"
	stdmaps "maps"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// addrs keeps the map that says what each address is to us. Programs look into
// it before any other: a frontend at an address that is not marked as a
// Service's does not exist for them, and neither does a flow to one. So the mark
// comes before the first frontend of an address. Flows outlive their frontends:
// when the last one of an address has gone, the address lingers. It keeps the
// mark until a look at all flows, begun after that moment, has found none that
// dialled it. Nothing else comes of the mark: there is no frontend to find.
//
// An entry is only written when it changes: a program that looks while one is
// being replaced may find none.
type addrs struct {
	table *table[maps.Addr, maps.AddrUse]
	clock clock
	grace time.Duration
	uses  map[maps.Addr]*addrUse
	stale map[maps.Addr]struct{} // of which the map says something else
	retry backoff
}

// addrUse is what one address is to us.
type addrUse struct {
	node      maps.AddrUse // as the node's own; zero: it is not
	claims    int          // to frontends that have it, whoever wins
	frontends int          // in the map that have it
	// lingers is when a look at all flows may begin that can tell whether any
	// needs the mark still; zero: the address does not linger.
	lingers instant

	have    maps.AddrUse // as the map has it
	written bool
}

func newAddrs(t *table[maps.Addr, maps.AddrUse], c clock, grace time.Duration) addrs {
	return addrs{
		table: t, clock: c, grace: grace,
		uses: make(map[maps.Addr]*addrUse), stale: make(map[maps.Addr]struct{}),
	}
}

// want is what the map should say; zero: nothing. Who claims an address and
// could not write a frontend yet keeps the mark that it has got.
func (u *addrUse) want() maps.AddrUse {
	want := u.node
	if u.frontends > 0 || u.lingers != 0 || u.claims > 0 && u.marked() {
		want.Flags |= maps.AddrService
	}

	return want
}

// marked says whether the map says that the address is a Service's.
func (u *addrUse) marked() bool { return u.have.Flags&maps.AddrService != 0 }

func (u *addrUse) settled() bool {
	want := u.want()

	return u.have == want && u.written == (want != maps.AddrUse{})
}

func (a *addrs) use(k maps.Addr) *addrUse {
	u := a.uses[k]
	if u == nil {
		u = &addrUse{}
		a.uses[k] = u
	}

	return u
}

// weigh notes whether the map says what it should of an address, after either
// has changed, and forgets one that is nothing to us any more.
func (a *addrs) weigh(k maps.Addr, u *addrUse) {
	if !u.settled() {
		a.stale[k] = struct{}{}
		a.retry.at = 0

		return
	}
	delete(a.stale, k)
	if *u == (addrUse{}) {
		delete(a.uses, k)
	}
}

// adopt takes over what the map holds, after all frontends have been. What
// marks no Service's address stays the node's until setNode says otherwise. A
// mark without a frontend lingers: nobody knows whose flows it is for.
func (a *addrs) adopt() error {
	for e, err := range a.table.All() {
		if err != nil {
			return err
		}
		u := a.use(e.Key)
		u.have, u.written, u.node = e.Value, true, e.Value
		u.node.Flags &^= maps.AddrService
		if u.marked() && u.frontends == 0 {
			a.linger(u)
		}
		a.table.used++
		a.weigh(e.Key, u)
	}

	return nil
}

// setNode says which addresses are the node's.
func (a *addrs) setNode(node map[maps.Addr]maps.AddrUse) {
	for k, u := range a.uses {
		if _, still := node[k]; !still {
			u.node = maps.AddrUse{}
			a.weigh(k, u)
		}
	}
	for k, v := range node {
		u := a.use(k)
		u.node = v
		a.weigh(k, u)
	}
}

// claim counts the claims to frontends that have an address.
func (a *addrs) claim(key maps.FrontendKey, more int) {
	if !ofEveryAddr(key) {
		u := a.use(key.Addr)
		u.claims += more
		a.weigh(key.Addr, u)
	}
}

// lead counts the frontends in the map that have an address.
func (a *addrs) lead(key maps.FrontendKey, more int) {
	if !ofEveryAddr(key) {
		u := a.use(key.Addr)
		u.frontends += more
		u.lingers = 0
		if u.frontends == 0 {
			a.linger(u)
		}
		a.weigh(key.Addr, u)
	}
}

// linger has u keep its mark without a frontend. A program that is still running
// may have read the last one, and begin a flow.
func (a *addrs) linger(u *addrUse) { u.lingers = a.clock.now().add(a.grace) }

// prune ends the lingering of addresses of which a look at all flows, begun at
// begin, has found none.
func (a *addrs) prune(dialled map[maps.Addr]struct{}, begin instant) {
	for k, u := range a.uses {
		if u.lingers == 0 || u.lingers > begin {
			continue
		}
		if _, needed := dialled[k]; !needed {
			u.lingers = 0
			a.weigh(k, u)
		}
	}
}

// ofEveryAddr says whether key is that of a node port: it has no address of
// its own.
func ofEveryAddr(key maps.FrontendKey) bool { return key.Addr.IP().IsUnspecified() }

// mark makes the address of a frontend a Service's, before it is written.
func (a *addrs) mark(key maps.FrontendKey) error {
	if ofEveryAddr(key) {
		return nil
	}
	u := a.use(key.Addr)
	if u.marked() {
		return nil
	}
	v := u.node
	v.Flags |= maps.AddrService

	return a.write(key.Addr, u, v)
}

// due returns when apply has something to do, or never.
func (a *addrs) due() instant {
	if len(a.stale) == 0 {
		return never
	}

	return a.retry.at
}

// apply makes the map say what it should of every address.
func (a *addrs) apply(now instant) error {
	if a.due() > now {
		return nil
	}
	err := a.settle()
	if err != nil && a.table.full && a.table.freed {
		err = a.settle() // what went has made room
	}
	if err != nil {
		a.retry.fail(now)
	} else {
		a.retry = backoff{}
	}

	return err
}

// settle writes what is new or different, then deletes what is to go.
func (a *addrs) settle() error {
	var failed []error
	var gone []maps.Addr
	for _, k := range slices.SortedFunc(stdmaps.Keys(a.stale), compareAddrs) {
		u := a.uses[k]
		if want := u.want(); want != (maps.AddrUse{}) {
			failed = append(failed, a.write(k, u, want))
		} else {
			gone = append(gone, k)
		}
	}
	for _, k := range gone {
		failed = append(failed, a.remove(k, a.uses[k]))
	}

	return errors.Join(failed...)
}

func (a *addrs) write(k maps.Addr, u *addrUse, v maps.AddrUse) error {
	if err := a.table.put(k, v, u.written); err != nil {
		return err
	}
	u.have, u.written = v, true
	a.weigh(k, u)

	return nil
}

func (a *addrs) remove(k maps.Addr, u *addrUse) error {
	if err := a.table.remove(k); err != nil {
		return err
	}
	u.have, u.written = maps.AddrUse{}, false
	a.weigh(k, u)

	return nil
}

// believed yields what the map was made to say.
func (a *addrs) believed() iter.Seq2[maps.Addr, maps.AddrUse] {
	return func(yield func(maps.Addr, maps.AddrUse) bool) {
		for k, u := range a.uses {
			if u.written && !yield(k, u.have) {
				return
			}
		}
	}
}

func compareAddrs(a, b maps.Addr) int { return bytes.Compare(a.Bytes[:], b.Bytes[:]) }
