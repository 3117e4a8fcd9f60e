package metrics

import (
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Scrapes, sweeps and rounds may come at the same time.
func TestConcurrency(t *testing.T) {
	w := newWorld()
	w.crowd(100)
	s := w.services(t, 50)
	changes := NewSync(time.Now)
	registry, err := NewRegistry(changes, NewNodeCollector("v", func() (Node, error) { return Node{}, nil }))
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	for _, do := range []func(){
		func() { gather(t, Gatherers{registry, s}) },
		func() {
			if err := s.Sweep(); err != nil {
				t.Error(err)
			}
		},
		func() {
			changes.SliceQueued(IPv4)
			changes.SliceRead(slice("web", lb.IPv4), true, time.Now())
		},
		func() {
			changes.Done(Round{Begin: time.Now(), Programmed: func(lb.ServiceName) bool { return true }})
		},
	} {
		running.Go(func() {
			for range 20 {
				do()
			}
		})
	}
	running.Wait()
}
