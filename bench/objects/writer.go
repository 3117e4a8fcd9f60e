package objects

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// parallel is how many requests are under way at once.
const parallel = 16

// Writer writes plans to an API server that has no other writer, so that it
// knows what is there. Fill must not be called concurrently; Change and ChangeSingle may be
// called from many goroutines.
type Writer struct {
	client kubernetes.Interface
	plan   Plan // the last one that was begun

	mu    sync.Mutex
	have  map[int]shape // what is there of the many Services, by their number
	based bool          // nodes, namespaces and the few Services are there
}

// shape is what Services with one number may differ in from plan to plan.
type shape struct {
	endpoints int
	dns       bool
}

// NewWriter makes a writer, for an API server that holds nothing yet.
func NewWriter(config *rest.Config) (*Writer, error) {
	config = rest.CopyConfig(config)
	config.ContentType = runtime.ContentTypeProtobuf
	config.QPS = -1 // no limit
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("writer of objects: %w", err)
	}

	return &Writer{client: client, have: make(map[int]shape)}, nil
}

// Fill makes the API server hold the objects of the plan, its Nodes included: it
// writes what is missing or different from the plans before, and deletes what is
// too much. The places of all plans are the same. Endpoints that [Writer.Change]
// has replaced stay as they are.
//
// Progress is called after each Service, by one goroutine at a time, with how many
// of those that are to be written or deleted have been. It may be nil. When ctx ends,
// Fill ends with its error after a moment, and can be called again.
func (w *Writer) Fill(ctx context.Context, plan Plan, progress func(done, total int)) error {
	if err := plan.Validate(); err != nil {
		return err
	}
	if w.plan != (Plan{}) && (plan.Local != w.plan.Local || plan.Remote != w.plan.Remote) {
		return errors.New("plan with other places than before")
	}
	w.plan = plan
	// A request that is given up may be carried out or not, or by half.
	whole := context.WithoutCancel(ctx)
	if err := w.base(whole); err != nil {
		return fmt.Errorf("objects around the Services: %w", err)
	}

	todo := w.different()
	group, until := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	done := 0
	for _, i := range todo {
		group.Go(func() error {
			if err := until.Err(); err != nil {
				return err
			}
			if err := w.write(whole, i); err != nil {
				return fmt.Errorf("service %d: %w", i, err)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			done++
			if progress != nil {
				progress(done, len(todo))
			}

			return nil
		})
	}

	return group.Wait()
}

// different returns the Services that differ from the plan.
func (w *Writer) different() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	var todo []int
	for i := range w.plan.Services {
		if w.have[i] != w.shape(i) {
			todo = append(todo, i)
		}
	}
	for i := range w.have {
		if i >= w.plan.Services {
			todo = append(todo, i)
		}
	}

	return todo
}

// shape returns the shape that Service i has in the plan.
func (w *Writer) shape(i int) shape {
	return shape{endpoints: w.plan.Endpoints, dns: w.plan.HasDNS(i)}
}
