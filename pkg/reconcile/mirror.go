package reconcile

import "errors"

// mirror keeps a map that refers to no other one equal to what was set.
type mirror[K, V comparable] struct {
	table *table[K, V]
	want  map[K]V // nil: nothing was set yet, so have stays
	have  map[K]V
	dirty bool
	retry backoff
}

func newMirror[K, V comparable](t *table[K, V]) mirror[K, V] {
	return mirror[K, V]{table: t, have: make(map[K]V)}
}

func (m *mirror[K, V]) adopt() error {
	for e, err := range m.table.All() {
		if err != nil {
			return err
		}
		m.have[e.Key] = e.Value
		m.table.used++
	}

	return nil
}

func (m *mirror[K, V]) set(want map[K]V) {
	m.want = want
	m.dirty = true
	m.retry.at = 0
}

// due returns when apply has something to do, or never.
func (m *mirror[K, V]) due() instant {
	if !m.dirty {
		return never
	}

	return m.retry.at
}

// apply adds and changes what is wanted, then removes the rest.
func (m *mirror[K, V]) apply(now instant) error {
	if m.due() > now {
		return nil
	}
	var failed []error
	for k, v := range m.want {
		failed = append(failed, m.put(k, v))
	}
	for k := range m.have {
		if _, wanted := m.want[k]; !wanted {
			failed = append(failed, m.remove(k))
		}
	}
	err := errors.Join(failed...)
	if m.dirty = err != nil; m.dirty {
		m.retry.fail(now)
	} else {
		m.retry = backoff{}
	}

	return err
}

func (m *mirror[K, V]) put(k K, v V) error {
	have, there := m.have[k]
	if there && have == v {
		return nil
	}
	if err := m.table.put(k, v, there); err != nil {
		return err
	}
	m.have[k] = v

	return nil
}

func (m *mirror[K, V]) remove(k K) error {
	if err := m.table.remove(k); err != nil {
		return err
	}
	delete(m.have, k)

	return nil
}
