package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"

	"github.com/sluice-lb/sluice/maps"
)

// Drift is one place where a map differs from what was written to it: another program wrote to it,
// or there is a bug.
type Drift struct {
	Map      string
	Key      string // formatted: "10.96.0.1:80/TCP internal", "backend 7"
	Problem  string // "is missing", "should not exist", "is …, should be …"
	Repaired bool
}

func (d Drift) String() string {
	return fmt.Sprintf("%s: %s %s", d.Map, d.Key, d.Problem)
}

// Drift compares the content of all maps with what was written to them, as [Reconciler.Compare] does, at once. It returns
// the differences that it found, sorted by map and key, and the errors.
func (r *Reconciler) Drift(repair bool) ([]Drift, error) {
	c := r.Compare(repair)
	for range c.Steps() {
	}
	slices.SortFunc(c.Found, func(a, b Drift) int {
		return cmp.Or(cmp.Compare(a.Map, b.Map), cmp.Compare(a.Key, b.Key))
	})

	return c.Found, errors.Join(c.Errs...)
}

// Comparison is a comparison of all maps with what was written to them. The fields are complete when its steps are.
type Comparison struct {
	// Found are the differences.
	Found []Drift
	// Errs are about a map that could not be read, which ends the comparison, and about repairs that failed.
	Errs []error

	r      *Reconciler
	repair bool
	stray  []func() // look again at what should not exist, from the bottom up
	keys   int      // that were looked at
	pause  func() bool
	ended  bool
}

// Compare returns a comparison of the maps with what was written to them. With repair set it restores that, in the order of
// all writes: missing and different entries bottom-up, then entries that should not exist top-down.
func (r *Reconciler) Compare(repair bool) *Comparison { return &Comparison{r: r, repair: repair} }

// keysPerStep is how many keys a step of a [Comparison] looks at: some microseconds of work, and at times a system call that
// reads thousands of entries.
const keysPerStep = 64

// Steps compares. It yields after each step, so often that a step takes less than some milliseconds. The Reconciler may be
// used between two steps: what it writes is no difference.
func (c *Comparison) Steps() iter.Seq[struct{}] {
	return func(yield func(struct{}) bool) {
		c.pause = func() bool { return yield(struct{}{}) }
		c.filters()
		for _, m := range c.r.maps {
			m.compareWritten(c)
		}
		for key := range c.r.broken { // adopted, and not replaced yet
			c.again(func() { c.broken(key) })
		}
		for _, look := range slices.Backward(c.stray) {
			if !c.next() {
				return
			}
			look()
		}
	}
}

// next pauses between two steps. It returns false if the comparison has ended.
func (c *Comparison) next() bool {
	if c.keys++; !c.ended && c.keys%keysPerStep == 0 {
		c.ended = !c.pause()
	}

	return !c.ended
}

// again has look called when all that is missing was found, those that were passed last first.
func (c *Comparison) again(look func()) { c.stray = append(c.stray, look) }

// fail ends the comparison: what is above a map that cannot be read must not be repaired.
func (c *Comparison) fail(err error) {
	c.Errs = append(c.Errs, err)
	c.ended = true
}

// found records a difference, and repairs it.
func (c *Comparison) found(table, key, problem string, repair func() error) {
	d := Drift{Map: table, Key: key, Problem: problem}
	if c.repair {
		err := repair()
		if d.Repaired = err == nil; !d.Repaired {
			c.Errs = append(c.Errs, fmt.Errorf("repair %s: %w", key, err))
		}
	}
	c.Found = append(c.Found, d)
}

// compareWritten implements [managed]. What the writer changes meanwhile is no difference, whether it is read before or after
// that. Entries cannot be looked up one by one: a trie finds those of shorter prefixes, too.
func (t *table[K, V]) compareWritten(c *Comparison) {
	t.changed = make(map[K]struct{})
	defer func() { t.changed = nil }()
	same, other := make(map[K]struct{}), make(map[K]V)
	for e, err := range t.All() {
		if err != nil {
			c.fail(err)
		}
		if !c.next() {
			return
		}
		if t.has(e.Key, e.Value) {
			same[e.Key] = struct{}{}
		} else {
			other[e.Key] = e.Value
		}
	}
	for k, v := range t.want {
		if !c.next() {
			return
		}
		is, differs := other[k]
		delete(other, k)
		_, equal := same[k]
		if _, changed := t.changed[k]; equal || changed {
			continue
		}
		key, should := t.text(k, v)
		problem := "is missing"
		if differs {
			_, isText := t.text(k, is)
			problem = fmt.Sprintf("is %s, should be %s", isText, should)
		}
		c.found(t.Name(), key, problem, func() error { return t.put(k, v, true) })
	}
	for k := range other {
		if _, changed := t.changed[k]; !changed {
			c.again(func() { t.compareStray(c, k) })
		}
	}
}

// compareStray finds an entry that was not written.
func (t *table[K, V]) compareStray(c *Comparison, k K) {
	is, ok, err := t.Lookup(k)
	switch {
	case err != nil:
		c.fail(err)
	case ok && !t.has(k, is):
		key, _ := t.text(k, is)
		c.found(t.Name(), key, "should not exist", func() error { return t.remove(k, false) })
	}
}

func (a *array[V]) compareWritten(c *Comparison) {
	for i := range uint32(max(len(a.have), a.Len())) {
		if !c.next() {
			return
		}
		a.comparePlace(c, i, false)
	}
}

// comparePlace compares a place. One that should be empty is only found if stray is set, and else looked at again later.
func (a *array[V]) comparePlace(c *Comparison, i uint32, stray bool) {
	is, should := a.Get(i), a.at(i)
	if is == should {
		return
	}
	key, isText := a.text(i, is)
	_, shouldText := a.text(i, should)
	if shouldText == nothing && !stray {
		c.again(func() { a.comparePlace(c, i, true) })

		return
	}
	c.found(a.Name(), key, fmt.Sprintf("is %s, should be %s", isText, shouldText), func() error { return a.store(i, should) })
}

// broken finds a frontend that was adopted and leads to nowhere, if it was not replaced meanwhile.
func (c *Comparison) broken(key maps.FrontendKey) {
	why, is := c.r.broken[key]
	if !is {
		return
	}
	c.found(maps.NameFrontendIDs, modelKey(key).String(), "leads to nowhere: "+why, func() error {
		err := c.r.removeBroken(key)
		if owner := c.r.claims.Owner(key); err == nil && owner != nil {
			c.r.markDirty(c.r.services[owner.Name])
		}

		return err
	})
}

// held yields keys with pauses between them, and not those that the writer removes in a pause.
func held[K comparable, V any](c *Comparison, have map[K]V) iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range have {
			if !c.next() {
				return
			}
			if _, there := have[k]; there && !yield(k) {
				return
			}
		}
	}
}

// filters finds addresses and node ports that the filters would not let through.
func (c *Comparison) filters() {
	addrs, covers := c.r.addrs, c.r.tables.CIDRCovers
	for k := range held(c, addrs.have) {
		if !addrs.filter.May(k) {
			c.found(maps.NameAddrFilter, k.IP().String(), "is missing", func() error {
				addrs.filter.Add(k)
				addrs.filter.Remove(k) // it was counted before

				return nil
			})
		}
	}
	for k := range held(c, c.r.serviceCIDRs.have) {
		if isCovered(k) && !covers.May(k.Addr) {
			c.found(maps.NameCIDRCovers, k.Prefix().String(), "is missing", func() error {
				covers.Add(k)
				covers.Remove(k) // it was counted before

				return nil
			})
		}
	}
	for k := range held(c, c.r.frontendIDs.have) {
		if port := maps.Port(k.Port); ofEveryAddr(k) && !addrs.ports.May(port) {
			c.found(maps.NamePortFilter, strconv.Itoa(int(port)), "is missing", func() error {
				addrs.ports.Add(port)

				return nil
			})
		}
	}
}
