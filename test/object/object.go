// Package object makes the Kubernetes objects that tests write, with all that they have in
// common. Callers set the rest.
package object

import (
	"bytes"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// Families are those of EndpointSlices, IPv4 first.
var Families = []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}

// Service is a Service at these cluster IPs and of their families. Without any, the API server
// assigns one.
func Service(namespace, name string, clusterIPs []string, ports ...corev1.ServicePort) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIPs: clusterIPs, Ports: ports},
	}
	spec := &svc.Spec
	for _, ip := range clusterIPs {
		family := corev1.IPv4Protocol
		if netip.MustParseAddr(ip).Is6() {
			family = corev1.IPv6Protocol
		}
		spec.IPFamilies = append(spec.IPFamilies, family)
	}
	switch len(clusterIPs) {
	case 1:
		spec.ClusterIP, spec.IPFamilyPolicy = clusterIPs[0], new(corev1.IPFamilyPolicySingleStack)
	case 2:
		spec.ClusterIP, spec.IPFamilyPolicy = clusterIPs[0], new(corev1.IPFamilyPolicyRequireDualStack)
	}

	return svc
}

// Slice is an EndpointSlice of a Service, without endpoints.
func Slice(namespace, name, service string, family discoveryv1.AddressType, ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: family,
		Ports:       ports,
	}
}

// EndpointPort is a port of an EndpointSlice.
func EndpointPort(name string, protocol corev1.Protocol, port int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &port}
}

// Endpoint is one on a node. It has no conditions, which is as if it were ready.
func Endpoint(address netip.Addr, node string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{address.String()}, NodeName: &node}
}

// Conditions are those of an endpoint.
func Conditions(ready, serving, terminating bool) discoveryv1.EndpointConditions {
	return discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
}

// Hints are the topology hints of an endpoint for these zones and nodes, nil without any.
func Hints(zones, nodes []string) *discoveryv1.EndpointHints {
	if len(zones)+len(nodes) == 0 {
		return nil
	}
	hints := &discoveryv1.EndpointHints{}
	for _, zone := range zones {
		hints.ForZones = append(hints.ForZones, discoveryv1.ForZone{Name: zone})
	}
	for _, node := range nodes {
		hints.ForNodes = append(hints.ForNodes, discoveryv1.ForNode{Name: node})
	}

	return hints
}

// Node is a Node with these InternalIPs.
func Node[A netip.Addr | string](name string, internalIPs ...A) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status:     corev1.NodeStatus{Addresses: InternalIPs(internalIPs...)},
	}
}

// InternalIPs are addresses of a Node.
func InternalIPs[A netip.Addr | string](ips ...A) []corev1.NodeAddress {
	var all []corev1.NodeAddress
	for _, ip := range ips {
		all = append(all, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: fmt.Sprint(ip)})
	}

	return all
}

// ServiceCIDR is a ServiceCIDR of these ranges.
func ServiceCIDR(name string, ranges ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: ranges},
	}
}

// Manifest is YAML of these objects, as it is in a file for kubectl.
func Manifest(objects ...runtime.Object) ([]byte, error) {
	var text bytes.Buffer
	for _, o := range objects {
		kinds, _, err := scheme.Scheme.ObjectKinds(o)
		if err != nil {
			return nil, err
		}
		o = o.DeepCopyObject()
		o.GetObjectKind().SetGroupVersionKind(kinds[0])
		document, err := yaml.Marshal(o)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&text, "---\n%s", document)
	}

	return text.Bytes(), nil
}
