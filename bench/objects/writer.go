package objects

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/test/object"
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

// shape is the part of Service i that differs between plans.
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
// writes objects that are missing or different from the plans before, and deletes
// superfluous ones. The places of all plans are the same. Endpoints that [Writer.Change]
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

// Change replaces one endpoint of Service i, see [Plan.EndpointAddress]. It is one
// request, which reads nothing first.
func (w *Writer) Change(ctx context.Context, i, generation int) error {
	return w.change(ctx, w.plan.Slice(i, generation))
}

// ChangeSingle replaces the only endpoint of the Service "single", see
// [Plan.SingleAddress].
func (w *Writer) ChangeSingle(ctx context.Context, generation int) error {
	return w.change(ctx, w.plan.singleSlice(generation))
}

func (w *Writer) change(ctx context.Context, slice *discoveryv1.EndpointSlice) error {
	if _, err := w.client.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("change of %s: %w", slice.Name, err)
	}

	return nil
}

// base writes the objects of every plan: namespaces, nodes, and the few Services.
func (w *Writer) base(ctx context.Context) error {
	if w.based {
		return nil
	}
	namespaces := w.client.CoreV1().Namespaces()
	names := []string{FewNamespace}
	for i := range teams {
		names = append(names, team(i))
	}
	for _, name := range names {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := namespaces.Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	for _, place := range []Place{w.plan.Local, w.plan.Remote} {
		if err := w.writeNode(ctx, place); err != nil {
			return err
		}
	}
	services, slices := w.plan.few()
	for i := range services {
		if err := w.create(ctx, services[i], slices[i]); err != nil {
			return err
		}
	}
	w.based = true

	return nil
}

// writeNode writes a Node with its address, for which kube-proxy waits.
func (w *Writer) writeNode(ctx context.Context, place Place) error {
	node := object.Node(place.Node, place.Address)
	node.Labels = map[string]string{corev1.LabelHostname: place.Node, corev1.LabelTopologyZone: zone}
	node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: place.Node})
	_, err := w.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})

	return err
}

// write makes Service i as in the plan.
func (w *Writer) write(ctx context.Context, i int) error {
	if i >= w.plan.Services {
		return w.remove(ctx, i)
	}
	w.mu.Lock()
	put := w.create
	if w.have[i] != (shape{}) {
		put = w.update
	}
	w.mu.Unlock()
	if err := put(ctx, w.plan.Service(i), w.plan.Slice(i, 0)); err != nil {
		return err
	}
	w.mu.Lock()
	w.have[i] = w.shape(i)
	w.mu.Unlock()

	return nil
}

func (w *Writer) create(ctx context.Context, service *corev1.Service, slice *discoveryv1.EndpointSlice) error {
	_, err := w.client.CoreV1().Services(service.Namespace).Create(ctx, service, metav1.CreateOptions{})
	if err == nil {
		_, err = w.client.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
	}

	return err
}

func (w *Writer) update(ctx context.Context, service *corev1.Service, slice *discoveryv1.EndpointSlice) error {
	_, err := w.client.CoreV1().Services(service.Namespace).Update(ctx, service, metav1.UpdateOptions{})
	if err == nil {
		_, err = w.client.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice, metav1.UpdateOptions{})
	}

	return err
}

// remove deletes Service i with its slice; there is no garbage collector.
func (w *Writer) remove(ctx context.Context, i int) error {
	err := w.client.CoreV1().Services(team(i)).Delete(ctx, name(i), metav1.DeleteOptions{})
	if err == nil {
		err = w.client.DiscoveryV1().EndpointSlices(team(i)).Delete(ctx, sliceName(name(i)), metav1.DeleteOptions{})
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	delete(w.have, i)
	w.mu.Unlock()

	return nil
}
