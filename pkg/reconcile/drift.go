package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	stdmaps "maps"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// Drift is one place where a map does not say what it was made to say: somebody
// else wrote to it, or there is a bug.
type Drift struct {
	Map      string
	Key      string // as people read it: "10.96.0.1:80/TCP internal", "backend 7"
	Problem  string // "is missing", "should not exist", "is …, should be …"
	Repaired bool
}

func (d Drift) String() string {
	return fmt.Sprintf("%s: %s %s", d.Map, d.Key, d.Problem)
}

// Drift compares all that the maps hold with what was written to them. With
// repair set it puts them right, in the order of all writes: bottom-up what is
// missing or differs, then top-down what should not exist. It returns what it
// found, sorted by map and key; the error is about maps that could not be read
// (then nothing is repaired) and repairs that failed. It takes time and memory
// in proportion to the maps.
func (r *Reconciler) Drift(repair bool) ([]Drift, error) {
	t := &r.tables
	var c comparison
	c.add(compareTable(&t.servicePorts, r.believedNames(), servicePortText))
	c.add(compareTable(&t.backends, r.believedBackends(), backendText))
	c.add(r.compareSlots())
	c.add(compareTable(&t.sourceRanges, r.believedRanges(), sourceRangeText))
	c.add(compareTable(&t.addrs, r.addrs.believed(), addrText))
	c.add(compareTable(&t.devices, stdmaps.All(r.devices.have), deviceText))
	c.add(compareTable(&t.localCIDRs, stdmaps.All(r.localCIDRs.have), cidrText))
	c.add(r.compareFrontends())
	c.add(compareTable(&t.serviceCIDRs, stdmaps.All(r.serviceCIDRs.have), cidrText))
	if repair && len(c.errs) == 0 {
		c.repair()
	}

	return c.found(), errors.Join(c.errs...)
}

// comparison gathers the differences of all maps, from the bottom up.
type comparison struct {
	maps []differences
	errs []error
}

// differences are those of one map.
type differences struct {
	puts, deletes []difference
}

// difference is a drift, and what undoes it.
type difference struct {
	Drift
	repair func() error
}

func (c *comparison) add(d differences, err error) {
	c.maps = append(c.maps, d)
	if err != nil {
		c.errs = append(c.errs, err)
	}
}

func (c *comparison) repair() {
	for _, d := range c.maps {
		c.repairEach(d.puts)
	}
	for _, d := range slices.Backward(c.maps) {
		c.repairEach(d.deletes)
	}
}

func (c *comparison) repairEach(differences []difference) {
	for i := range differences {
		d := &differences[i]
		err := d.repair()
		d.Repaired = err == nil
		if err != nil {
			c.errs = append(c.errs, fmt.Errorf("repair %s: %w", d.Key, err))
		}
	}
}

func (c *comparison) found() []Drift {
	var all []Drift
	for _, d := range c.maps {
		for _, one := range slices.Concat(d.puts, d.deletes) {
			all = append(all, one.Drift)
		}
	}
	slices.SortFunc(all, func(a, b Drift) int {
		return cmp.Or(cmp.Compare(a.Map, b.Map), cmp.Compare(a.Key, b.Key))
	})

	return all
}

// compareTable compares a map with what it should hold. Text returns a key and
// a value as people read them.
func compareTable[K, V comparable](t *table[K, V], want iter.Seq2[K, V], text func(K, V) (string, string)) (differences, error) {
	var d differences
	have := make(map[K]V)
	for e, err := range t.All() {
		if err != nil {
			return d, err
		}
		have[e.Key] = e.Value
	}
	for k, v := range want {
		is, ok := have[k]
		delete(have, k)
		if ok && is == v {
			continue
		}
		key, should := text(k, v)
		problem := "is missing"
		if ok {
			_, is := text(k, is)
			problem = fmt.Sprintf("is %s, should be %s", is, should)
		}
		repair := func() error { return t.replace(k, v) }
		d.puts = append(d.puts, difference{Drift{Map: t.Name(), Key: key, Problem: problem}, repair})
	}
	for k, v := range have {
		key, _ := text(k, v)
		repair := func() error { return t.removeStray(k) }
		d.deletes = append(d.deletes, difference{Drift{Map: t.Name(), Key: key, Problem: "should not exist"}, repair})
	}

	return d, nil
}

// compareSlots compares the slots of every extent.
func (r *Reconciler) compareSlots() (differences, error) {
	var d differences
	for _, p := range r.ports {
		for _, e := range p.extents {
			if e.base == 0 {
				continue
			}
			for slot, id := range e.slots() {
				is, err := r.tables.slots.array.Get(slot)
				if err != nil {
					return d, err
				}
				if is == id {
					continue
				}
				problem := fmt.Sprintf("is backend %d, should be backend %d", is, id)
				repair := func() error { return r.tables.slots.repair(slot, id) }
				d.puts = append(d.puts, difference{Drift{Map: maps.NameSlots, Key: fmt.Sprintf("slot %d", slot), Problem: problem}, repair})
			}
		}
	}

	return d, nil
}

// compareFrontends compares the frontends. Those that were adopted broken
// count as such until somebody's claim has replaced them.
func (r *Reconciler) compareFrontends() (differences, error) {
	d, err := compareTable(&r.tables.frontends, r.believedFrontends(), frontendText)
	broken := make(map[string]maps.FrontendKey, len(r.broken)) // by what d calls them
	for key := range r.broken {
		broken[modelKey(key).String()] = key
	}
	for i := range d.deletes {
		stray := &d.deletes[i]
		if key, ok := broken[stray.Key]; ok {
			stray.Problem = "leads to nowhere: " + r.broken[key]
			stray.repair = func() error { return r.repairBroken(key) }
		}
	}

	return d, err
}

// repairBroken deletes a frontend that was adopted broken. Who claims it is
// due.
func (r *Reconciler) repairBroken(key maps.FrontendKey) error {
	if err := r.tables.frontends.remove(key); err != nil {
		return err
	}
	f := r.frontends[key]
	r.touch(f.port.svc)
	r.stay(f)
	r.unlead(f, nil)
	r.contest(f, nil)

	return nil
}

func (r *Reconciler) believedNames() iter.Seq2[uint32, maps.ServicePort] {
	return func(yield func(uint32, maps.ServicePort) bool) {
		for id, p := range r.ports {
			if p.named && !yield(id, p.label()) {
				return
			}
		}
	}
}

func (r *Reconciler) believedBackends() iter.Seq2[uint32, maps.Backend] {
	return func(yield func(uint32, maps.Backend) bool) {
		for id, p := range r.ports {
			for i := range p.backends {
				b := &p.backends[i]
				if b.written && !yield(b.id, maps.BackendOf(b.addrPort(), id, b.have)) {
					return
				}
			}
		}
	}
}

func (r *Reconciler) believedRanges() iter.Seq2[maps.SourceRangeKey, uint32] {
	return func(yield func(maps.SourceRangeKey, uint32) bool) {
		for _, p := range r.ports {
			for _, g := range p.ranges {
				if g.written && !yield(g.key, 1) {
					return
				}
			}
		}
	}
}

func (r *Reconciler) believedFrontends() iter.Seq2[maps.FrontendKey, maps.Frontend] {
	return func(yield func(maps.FrontendKey, maps.Frontend) bool) {
		for key, f := range r.frontends {
			if f.present && r.broken[key] == "" && !yield(key, f.have) {
				return
			}
		}
	}
}
