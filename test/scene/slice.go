package scene

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// Condition is what the endpoint controller writes about a pod, in the order of a
// pod's life.
type Condition int

const (
	// Starting is a pod that is not ready yet.
	Starting Condition = iota
	// Ready is one that gets new connections.
	Ready
	// Draining is terminating and still serving.
	Draining
	// Ending is terminating and no longer serving.
	Ending
)

// Endpoint is a pod in an EndpointSlice, with the hints that the controller gives
// it.
type Endpoint struct {
	Pod   *lab.Pod
	Is    Condition
	Zones []string
	Nodes []string
}

// ReadyAll are pods that are all ready.
func ReadyAll(pods ...*lab.Pod) []Endpoint {
	var all []Endpoint
	for _, pod := range pods {
		all = append(all, Endpoint{Pod: pod, Is: Ready})
	}

	return all
}

// SetEndpoints writes the slices of a Service: one of each family, named after it.
func (o *Objects) SetEndpoints(t testing.TB, service string, endpoints ...Endpoint) {
	t.Helper()
	for _, family := range object.Families {
		o.PutSlice(t, o.Slice(service, family, endpoints...))
	}
}

// Slice is what SetEndpoints writes for a family.
func (o *Objects) Slice(service string, family discoveryv1.AddressType, endpoints ...Endpoint) *discoveryv1.EndpointSlice {
	name := service + map[discoveryv1.AddressType]string{"IPv4": "-v4", "IPv6": "-v6"}[family]
	slice := object.Slice(o.Namespace, name, service, family,
		object.EndpointPort("tcp", corev1.ProtocolTCP, PodPort), object.EndpointPort("udp", corev1.ProtocolUDP, PodPort))
	for _, e := range endpoints {
		slice.Endpoints = append(slice.Endpoints, o.endpointOf(e, family))
	}

	return slice
}

func (o *Objects) endpointOf(e Endpoint, family discoveryv1.AddressType) discoveryv1.Endpoint {
	address := e.Pod.IPv4
	if family == discoveryv1.AddressTypeIPv6 {
		address = e.Pod.IPv6
	}
	endpoint := object.Endpoint(address, o.stage.NodeName(e.Pod.Node))
	endpoint.Conditions = object.Conditions(e.Is == Ready, e.Is == Ready || e.Is == Draining, e.Is >= Draining)
	endpoint.Hints = object.Hints(e.Zones, e.Nodes)

	return endpoint
}

// PutSlice creates or replaces a slice.
func (o *Objects) PutSlice(t testing.TB, slice *discoveryv1.EndpointSlice) {
	t.Helper()
	all := o.Client.DiscoveryV1().EndpointSlices(o.Namespace)
	_, err := all.Update(t.Context(), slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = all.Create(t.Context(), slice, metav1.CreateOptions{})
	}
	lab.Must(t, err)
}

// DeleteSlice deletes a slice by its name.
func (o *Objects) DeleteSlice(t testing.TB, name string) {
	t.Helper()
	lab.Must(t, o.Client.DiscoveryV1().EndpointSlices(o.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
}
