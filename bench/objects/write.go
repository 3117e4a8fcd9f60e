package objects

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Change replaces one endpoint of Service i, see [Plan.EndpointAddress]. It is one
// request, which reads nothing first.
func (w *Writer) Change(ctx context.Context, i, generation int) error {
	slice := w.plan.Slice(i, generation)
	_, err := w.client.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("change of service %d: %w", i, err)
	}

	return nil
}

// ChangeSingle replaces the only endpoint of the Service "single", see
// [Plan.SingleAddress].
func (w *Writer) ChangeSingle(ctx context.Context, generation int) error {
	slice := w.plan.singleSlice(generation)
	_, err := w.client.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("change of the Service \"single\": %w", err)
	}

	return nil
}

// base writes what every plan has: namespaces, nodes, and the few Services.
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
	nodes := w.client.CoreV1().Nodes()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name:   place.Node,
		Labels: map[string]string{corev1.LabelHostname: place.Node, corev1.LabelTopologyZone: zone},
	}}
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: place.Address.String()},
		{Type: corev1.NodeHostName, Address: place.Node},
	}
	if _, err := nodes.Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err := nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})

	return err
}

// write makes Service i as in the plan.
func (w *Writer) write(ctx context.Context, i int) error {
	if i >= w.plan.Services {
		return w.remove(ctx, i)
	}
	put := w.create
	if w.has(i) {
		put = w.update
	}
	if err := put(ctx, w.plan.Service(i), w.plan.Slice(i, 0)); err != nil {
		return err
	}
	w.mu.Lock()
	w.have[i] = w.shape(i)
	w.mu.Unlock()

	return nil
}

func (w *Writer) has(i int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.have[i] != shape{}
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
