package kube

import (
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// store is the store that a Reflector fills. It is no cache: it translates every object and
// passes it to the tracker.
type store struct {
	mu      sync.Mutex // a direct watch writes, too, from its own goroutine
	tracker *tracker
	closed  bool // nothing more is reported

	// replaced is called when all objects have been reported.
	replaced func()
	// awaited is closed by the next Replace. The goroutine of the Reflector owns it.
	awaited chan struct{}
}

var _ cache.TransformingStore = (*store)(nil)

func (s *store) Add(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.set(translate(obj))
	return nil
}

func (s *store) Update(obj any) error {
	return s.Add(obj)
}

func (s *store) Delete(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.delete(translate(obj).key)
	return nil
}

// put reports a slice from a direct watch. It does not flush the sink, which the Stream does
// when there is nothing more to read.
func (s *store) put(kind watch.EventType, slice *discoveryv1.EndpointSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := translate(slice)
	switch {
	case s.closed:
	case kind == watch.Deleted:
		s.tracker.remove(o.key)
	default:
		s.tracker.put(o)
	}
}

// close makes sure that nothing is reported after it returns.
func (s *store) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// awaitReplace returns a channel that the next Replace closes.
func (s *store) awaitReplace() <-chan struct{} {
	s.awaited = make(chan struct{})
	return s.awaited
}

// Replace reports all objects. Those of a streamed list have passed the Transformer, those
// of a list in pages have not.
func (s *store) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.replace(func(yield func(*object) bool) {
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

// Resync does nothing, because the sink keeps the objects that it needs.
func (s *store) Resync() error { return nil }

// Transformer translates the objects of a streamed list one by one, so that no two
// Kubernetes objects of it are in memory at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return translate(obj), nil }
}
