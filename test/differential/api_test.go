package differential

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// api writes objects to the API server, and records them.
type api struct {
	client  kubernetes.Interface
	have    objects
	way     []objects // from what there was to what there is
	markers int       // that there have been
}

const (
	namespace = "default"
	zoneLabel = corev1.LabelTopologyZone
)

// mustAPI expects an empty API server, and leaves it empty.
func mustAPI(t testing.TB, c *cluster.Cluster) *api {
	t.Helper()
	cfg := c.Config()
	cfg.WarningHandler = rest.NoWarnings{} // externalIPs are deprecated
	client, err := kubernetes.NewForConfig(cfg)
	lab.Must(t, err)
	a := &api{client: client, have: objects{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}}}
	lab.Must(t, a.createNode(t.Context()))
	t.Cleanup(func() {
		if err := a.clear(); err != nil {
			t.Error(err)
		}
	})

	return a
}

// clear removes everything.
func (a *api) clear() error {
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()

	return errors.Join(
		a.apply(ctx, objects{}),
		a.removeMarker(ctx, a.markers),
		a.client.CoreV1().Nodes().Delete(ctx, firstNode, metav1.DeleteOptions{}))
}

// createNode creates node-1, as its kubelet would.
func (a *api) createNode(ctx context.Context) error {
	addresses := hostAddresses(1)
	node := object.Node(firstNode, addresses[:]...)
	node.Spec.PodCIDR, node.Spec.PodCIDRs = "10.244.1.0/24", []string{"10.244.1.0/24", "fd00:10:244:1::/64"}
	_, err := a.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})

	return err
}

// apply makes the API server have these objects and no others. All that it has in
// between is on the way.
func (a *api) apply(ctx context.Context, want objects) error {
	a.way = nil
	for _, name := range slices.Sorted(maps.Keys(a.have.services)) {
		if want.services[name] == nil {
			if err := a.deleteService(ctx, name); err != nil {
				return err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.have.slices)) {
		if want.slices[name] == nil {
			if err := a.deleteSlice(ctx, name); err != nil {
				return err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.services)) {
		if err := a.applyService(ctx, want.services[name]); err != nil {
			return fmt.Errorf("service %s: %w", name, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.slices)) {
		if err := a.applySlice(ctx, want.slices[name]); err != nil {
			return fmt.Errorf("slice %s: %w", name, err)
		}
	}
	if want.zone != a.have.zone {
		if err := a.labelNode(ctx, want.zone); err != nil {
			return err
		}
	}
	a.have.zone = want.zone

	return nil
}

// note notes what the API server has now.
func (a *api) note(change func(o objects)) {
	a.have = a.have.clone()
	change(a.have)
	a.way = append(a.way, a.have)
}

func (a *api) deleteService(ctx context.Context, name string) error {
	a.note(func(o objects) { delete(o.services, name) })

	return a.client.CoreV1().Services(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

func (a *api) deleteSlice(ctx context.Context, name string) error {
	a.note(func(o objects) { delete(o.slices, name) })

	return a.client.DiscoveryV1().EndpointSlices(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

// applyService creates or updates a Service with its status. One that cannot
// become the new one is replaced.
func (a *api) applyService(ctx context.Context, want *corev1.Service) error {
	all := a.client.CoreV1().Services(namespace)
	have := a.have.services[want.Name]
	if reflect.DeepEqual(have, want) {
		return nil
	}
	if have != nil {
		updated, err := all.Update(ctx, want.DeepCopy(), metav1.UpdateOptions{})
		if err == nil {
			return a.applyStatus(ctx, updated, want)
		}
		if !apierrors.IsInvalid(err) {
			return err
		}
		if err := a.deleteService(ctx, want.Name); err != nil {
			return err
		}
	}
	created, err := all.Create(ctx, want.DeepCopy(), metav1.CreateOptions{})
	if err != nil {
		return err
	}

	return a.applyStatus(ctx, created, want)
}

// applyStatus writes what a load balancer's controller would, after the Service has
// been written.
func (a *api) applyStatus(ctx context.Context, have, want *corev1.Service) error {
	if !reflect.DeepEqual(have.Status.LoadBalancer, want.Status.LoadBalancer) {
		between := want.DeepCopy()
		between.Status = have.Status
		a.note(func(o objects) { o.services[want.Name] = between })
		have.Status.LoadBalancer = want.Status.LoadBalancer
		if _, err := a.client.CoreV1().Services(namespace).UpdateStatus(ctx, have, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	a.note(func(o objects) { o.services[want.Name] = want })

	return nil
}

func (a *api) applySlice(ctx context.Context, want *discoveryv1.EndpointSlice) error {
	all := a.client.DiscoveryV1().EndpointSlices(namespace)
	have := a.have.slices[want.Name]
	if reflect.DeepEqual(have, want) {
		return nil
	}
	if have != nil && have.AddressType != want.AddressType { // it never changes
		if err := a.deleteSlice(ctx, want.Name); err != nil {
			return err
		}
		have = nil
	}
	var err error
	if have != nil {
		_, err = all.Update(ctx, want.DeepCopy(), metav1.UpdateOptions{})
	} else {
		_, err = all.Create(ctx, want.DeepCopy(), metav1.CreateOptions{})
	}
	a.note(func(o objects) { o.slices[want.Name] = want })

	return err
}

// labelNode puts node-1 into a zone, or "" into none.
func (a *api) labelNode(ctx context.Context, zone string) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		node, err := a.client.CoreV1().Nodes().Get(ctx, firstNode, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if zone == "" {
			delete(node.Labels, zoneLabel)
		} else {
			metav1.SetMetaDataLabel(&node.ObjectMeta, zoneLabel, zone)
		}
		_, err = a.client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{})

		return err
	})
}
