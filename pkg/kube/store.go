package kube

import (
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// store is what a Reflector fills in place of a cache: it reads every object
// as it comes and tells about it. What it keeps is the ledger's.
type store struct {
	mu     sync.Mutex // a direct watch writes, too, from a goroutine of its own
	ledger *ledger
	closed bool // nothing is told any more

	// replaced is called after all there is has been told about.
	replaced func()
	// awaited is closed by the next Replace. The goroutine of the Reflector owns it.
	awaited chan struct{}
}

var _ cache.TransformingStore = (*store)(nil)

func (s *store) Add(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger.set(translate(obj))
	return nil
}

func (s *store) Update(obj any) error {
	return s.Add(obj)
}

func (s *store) Delete(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger.delete(translate(obj).key)
	return nil
}

// put tells about a slice that a direct watch brings. The sink is flushed when there is
// nothing more to read.
func (s *store) put(kind watch.EventType, slice *discoveryv1.EndpointSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := translate(slice)
	switch {
	case s.closed:
	case kind == watch.Deleted:
		s.ledger.remove(o.key)
	default:
		s.ledger.put(o)
	}
}

// close returns when nothing is being told, and nothing will be.
func (s *store) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// awaitReplace returns a channel that is closed when all there is has been told about again.
func (s *store) awaitReplace() <-chan struct{} {
	s.awaited = make(chan struct{})
	return s.awaited
}

// Replace tells about all there is. After a streamed list the objects come as
// the Transformer made them, after a list of pages as the server sent them.
func (s *store) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
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
	if s.awaited != nil {
		close(s.awaited)
		s.awaited = nil
	}
	return nil
}

// Resync does nothing: whoever wants to see an object again has kept it.
func (s *store) Resync() error { return nil }

// Transformer makes a streamed list be read while it comes, so that no two
// Kubernetes objects of it are in memory at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return translate(obj), nil }
}
