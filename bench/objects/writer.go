package objects

import (
	"context"
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

	return &Writer{client: client}, nil
}

// Fill makes the API server hold the objects of the plan, its Nodes included: it adds what the plan
// has more than the one before, which has fewer Services and is the same otherwise. Endpoints that
// [Writer.Change] has replaced stay as they are.
//
// Progress is called after each Service, by one goroutine at a time, with how many of those that are
// to be written have been. It may be nil. After an error the API server holds a part of the plan.
func (w *Writer) Fill(ctx context.Context, plan Plan, progress func(done, total int)) error {
	if err := plan.Fits(); err != nil {
		return err
	}
	before := w.plan
	grown := before
	grown.Services = plan.Services
	if before != (Plan{}) && (grown != plan || plan.Services < before.Services) {
		return fmt.Errorf("plan %+v: it does not only add Services to %+v", plan, before)
	}
	w.plan = plan
	if before == (Plan{}) {
		if err := w.base(ctx); err != nil {
			return fmt.Errorf("objects around the Services: %w", err)
		}
	}
	var (
		group, until = errgroup.WithContext(ctx)
		mu           sync.Mutex
		done, first  int
	)
	group.SetLimit(parallel)
	if first = before.Services; first > 0 && first < plan.Services {
		first-- // it is the last one no more, so it has no DNSPort
	}
	for i := first; i < plan.Services; i++ {
		group.Go(func() error {
			put := w.create
			if i < before.Services {
				put = w.update
			}
			if err := put(until, plan.Service(i), plan.Slice(i, 0)); err != nil {
				return fmt.Errorf("service %d: %w", i, err)
			}
			mu.Lock()
			defer mu.Unlock()
			done++
			if progress != nil {
				progress(done, plan.Services-first)
			}

			return nil
		})
	}

	return group.Wait()
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

// base writes the objects of every plan: namespaces, nodes with their addresses, for which kube-proxy
// waits, and the few Services.
func (w *Writer) base(ctx context.Context) error {
	core := w.client.CoreV1()
	names := []string{FewNamespace}
	for i := range teams {
		names = append(names, team(i))
	}
	for _, name := range names {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := core.Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	for _, place := range []Place{w.plan.Local, w.plan.Remote} {
		node := object.Node(place.Node, place.Address)
		node.Labels = map[string]string{corev1.LabelHostname: place.Node, corev1.LabelTopologyZone: zone}
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: place.Node})
		if _, err := core.Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	services, slices := w.plan.few()
	for i := range services {
		if err := w.create(ctx, services[i], slices[i]); err != nil {
			return err
		}
	}

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
