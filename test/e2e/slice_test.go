package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// condition is what the endpoint controller writes about a pod, in the order of a
// pod's life.
type condition int

const (
	starting condition = iota // not ready yet
	ready
	draining // terminating, and it still serves
	ending   // terminating, and it does not
)

// endpoint is a pod in an EndpointSlice.
type endpoint struct {
	pod   *lab.Pod
	is    condition
	zones []string // hints
}

// readyAll are pods that are all ready.
func readyAll(pods ...*lab.Pod) []endpoint {
	var all []endpoint
	for _, pod := range pods {
		all = append(all, endpoint{pod: pod, is: ready})
	}

	return all
}

// setEndpoints writes the slices of a Service: one
// slice of each family, named after it.
func (a *api) setEndpoints(t testing.TB, service string, endpoints ...endpoint) {
	t.Helper()
	a.setSlice(t, service+"-v4", service, discoveryv1.AddressTypeIPv4, endpoints...)
	a.setSlice(t, service+"-v6", service, discoveryv1.AddressTypeIPv6, endpoints...)
}

// setSlice creates or replaces one slice, with both ports.
func (a *api) setSlice(t testing.TB, name, service string, family discoveryv1.AddressType, endpoints ...endpoint) {
	t.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: family,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("tcp"), Port: new(int32(serverPort)), Protocol: new(corev1.ProtocolTCP)},
			{Name: new("udp"), Port: new(int32(serverPort)), Protocol: new(corev1.ProtocolUDP)},
		},
	}
	for _, e := range endpoints {
		slice.Endpoints = append(slice.Endpoints, a.endpointOf(e, family))
	}
	a.putSlice(t, slice)
}

func (a *api) endpointOf(e endpoint, family discoveryv1.AddressType) discoveryv1.Endpoint {
	address := e.pod.IPv4
	if family == discoveryv1.AddressTypeIPv6 {
		address = e.pod.IPv6
	}
	object := discoveryv1.Endpoint{
		Addresses: []string{address.String()},
		NodeName:  new(a.nodeName(e.pod.Node)),
		Conditions: discoveryv1.EndpointConditions{
			Ready:       new(e.is == ready),
			Serving:     new(e.is == ready || e.is == draining),
			Terminating: new(e.is >= draining),
		},
	}
	for _, zone := range e.zones {
		if object.Hints == nil {
			object.Hints = &discoveryv1.EndpointHints{}
		}
		object.Hints.ForZones = append(object.Hints.ForZones, discoveryv1.ForZone{Name: zone})
	}

	return object
}

// putSlice creates or replaces a slice.
func (a *api) putSlice(t testing.TB, slice *discoveryv1.EndpointSlice) {
	t.Helper()
	all := a.client.DiscoveryV1().EndpointSlices(a.namespace)
	_, err := all.Update(t.Context(), slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = all.Create(t.Context(), slice, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (a *api) deleteSlice(t testing.TB, name string) {
	t.Helper()
	if err := a.client.DiscoveryV1().EndpointSlices(a.namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}
