package kube

import "k8s.io/client-go/tools/cache"

// store is what a Reflector fills in place of a cache: it reads every object
// as it comes and tells about it. What it keeps is the ledger's.
type store struct {
	ledger *ledger

	// replaced is called after all there is has been told about.
	replaced func()
}

var _ cache.TransformingStore = (*store)(nil)

func (s *store) Add(obj any) error {
	s.ledger.set(translate(obj))
	return nil
}

func (s *store) Update(obj any) error {
	return s.Add(obj)
}

func (s *store) Delete(obj any) error {
	s.ledger.delete(translate(obj).key)
	return nil
}

// Replace tells about all there is. After a streamed list the objects come as
// the Transformer made them, after a list of pages as the server sent them.
func (s *store) Replace(list []any, _ string) error {
	s.ledger.replace(func(yield func(*object) bool) {
		for _, obj := range list {
			o, ok := obj.(*object)
			if !ok {
				o = translate(obj)
			}
			if !yield(o) {
				return
			}
		}
	})
	s.replaced()
	return nil
}

// Resync does nothing: whoever wants to see an object again has kept it.
func (s *store) Resync() error { return nil }

// Transformer makes a streamed list be read while it comes, so that no two
// Kubernetes objects of it are in memory at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return translate(obj), nil }
}
