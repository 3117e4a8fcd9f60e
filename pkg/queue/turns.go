package queue

import "slices"

// Turns are elements that wait for their turn. Their owners take turns, so that those of one wait for no more than one
// element of each other owner, however many these have; the elements of an owner have theirs in the order in which they
// came. The zero value is ready for use. One goroutine owns it.
type Turns[T comparable] struct {
	owners  []string // that have elements, in the order of their turns
	waiting map[string][]T
	count   int
}

// Add adds an element of an owner.
func (t *Turns[T]) Add(owner string, element T) {
	if t.waiting == nil {
		t.waiting = make(map[string][]T)
	}
	if len(t.waiting[owner]) == 0 {
		t.owners = append(t.owners, owner)
	}
	t.waiting[owner] = append(t.waiting[owner], element)
	t.count++
}

// Next removes the element whose turn it is. It returns false if none waits.
func (t *Turns[T]) Next() (element T, ok bool) {
	if t.count == 0 {
		return element, false
	}
	owner := t.owners[0]
	t.owners = t.owners[1:]
	waiting := t.waiting[owner]
	element, waiting[0] = waiting[0], element
	t.count--
	if t.waiting[owner] = waiting[1:]; len(waiting) == 1 {
		delete(t.waiting, owner)
	} else {
		t.owners = append(t.owners, owner)
	}

	return element, true
}

// Remove removes an element of an owner, if it waits.
func (t *Turns[T]) Remove(owner string, element T) {
	waiting := t.waiting[owner]
	at := slices.Index(waiting, element)
	if at < 0 {
		return
	}
	t.count--
	if t.waiting[owner] = slices.Delete(waiting, at, at+1); len(waiting) == 1 {
		delete(t.waiting, owner)
		t.owners = slices.DeleteFunc(t.owners, func(o string) bool { return o == owner })
	}
}

// Has reports whether an element of an owner waits.
func (t *Turns[T]) Has(owner string, element T) bool {
	return slices.Contains(t.waiting[owner], element)
}

// Len returns how many elements wait.
func (t *Turns[T]) Len() int { return t.count }
