package reconcile

import (
	"cmp"
	"errors"
	"fmt"
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

// Drift compares the content of all maps with what was written to them. With repair set it restores
// that, in the order of all writes: missing and different entries bottom-up, then entries that
// should not exist top-down. It returns the differences that it found, sorted by map and key; the
// error is about maps that could not be read (then nothing is repaired) and repairs that failed.
// Time and memory are proportional to the maps.
func (r *Reconciler) Drift(repair bool) ([]Drift, error) {
	var c comparison
	r.compareFilters(&c)
	for _, m := range r.maps {
		m.differ(&c)
	}
	for key, why := range r.broken { // adopted, and not replaced yet
		c.add(maps.NameFrontendIDs, modelKey(key).String(), "leads to nowhere: "+why, true, func() error {
			err := r.removeBroken(key)
			if owner := r.claims.Owner(key); err == nil && owner != nil {
				r.markDirty(r.services[owner.Name])
			}

			return err
		})
	}
	if repair && len(c.errs) == 0 {
		undo := func(d *difference) {
			err := d.undo()
			if d.Repaired = err == nil; !d.Repaired {
				c.errs = append(c.errs, fmt.Errorf("repair %s: %w", d.Key, err))
			}
		}
		for i := range c.found {
			if d := &c.found[i]; !d.stray {
				undo(d)
			}
		}
		for i := range slices.Backward(c.found) {
			if d := &c.found[i]; d.stray {
				undo(d)
			}
		}
	}
	found := make([]Drift, len(c.found))
	for i := range c.found {
		found[i] = c.found[i].Drift
	}
	slices.SortFunc(found, func(a, b Drift) int {
		return cmp.Or(cmp.Compare(a.Map, b.Map), cmp.Compare(a.Key, b.Key))
	})

	return found, errors.Join(c.errs...)
}

// comparison collects the differences of all maps, from the bottom up.
type comparison struct {
	found []difference
	errs  []error
}

// difference is a drift and the write that repairs it.
type difference struct {
	Drift
	stray bool // it should not exist
	undo  func() error
}

func (c *comparison) add(table, key, problem string, stray bool, undo func() error) {
	c.found = append(c.found, difference{Drift{Map: table, Key: key, Problem: problem}, stray, undo})
}

func (t *table[K, V]) differ(c *comparison) {
	have := make(map[K]V)
	for e, err := range t.All() {
		if err != nil {
			c.errs = append(c.errs, err)

			return
		}
		have[e.Key] = e.Value
	}
	for k, v := range t.want {
		is, ok := have[k]
		delete(have, k)
		if ok && is == v {
			continue
		}
		key, should := t.text(k, v)
		problem := "is missing"
		if ok {
			_, is := t.text(k, is)
			problem = fmt.Sprintf("is %s, should be %s", is, should)
		}
		c.add(t.Name(), key, problem, false, func() error { return t.put(k, v, true) })
	}
	for k, v := range have {
		key, _ := t.text(k, v)
		c.add(t.Name(), key, "should not exist", true, func() error { return t.remove(k, false) })
	}
}

func (a *array[V]) differ(c *comparison) {
	for i := range uint32(max(len(a.have), a.Len())) {
		is, should := a.Get(i), a.at(i)
		if is == should {
			continue
		}
		key, isText := a.text(i, is)
		_, shouldText := a.text(i, should)
		problem := fmt.Sprintf("is %s, should be %s", isText, shouldText)
		c.add(a.Name(), key, problem, shouldText == nothing, func() error { return a.store(i, should) })
	}
}

// compareFilters finds addresses and node ports that the filters would not let through.
func (r *Reconciler) compareFilters(c *comparison) {
	for k := range r.addrs.have {
		if !r.addrs.filter.May(k) {
			c.add(maps.NameAddrFilter, k.IP().String(), "is missing", false, func() error {
				r.addrs.filter.Add(k)
				r.addrs.filter.Remove(k) // it was counted before

				return nil
			})
		}
	}
	for k := range r.serviceCIDRs.have {
		if covers := r.tables.CIDRCovers; isCovered(k) && !covers.May(k.Addr) {
			c.add(maps.NameCIDRCovers, k.Prefix().String(), "is missing", false, func() error {
				covers.Add(k)
				covers.Remove(k) // it was counted before

				return nil
			})
		}
	}
	for k := range r.frontendIDs.have {
		if port := maps.Port(k.Port); ofEveryAddr(k) && !r.addrs.ports.May(port) {
			c.add(maps.NamePortFilter, strconv.Itoa(int(port)), "is missing", false, func() error {
				r.addrs.ports.Add(port)

				return nil
			})
		}
	}
}
