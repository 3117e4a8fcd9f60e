package objects

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// teams is how many namespaces the many Services are in.
const teams = 100

// zone is that of all nodes.
const zone = "zone-1"

// Service is Service i, as one writes it.
func (p Plan) Service(i int) *corev1.Service {
	ports := []corev1.ServicePort{port("http", corev1.ProtocolTCP, Port, BackendPort)}
	if p.HasDNS(i) {
		ports = append(ports, port("dns", corev1.ProtocolUDP, DNSPort, BackendPort))
	}

	return service(team(i), name(i), p.ClusterIP(i).String(), ports)
}

// Slice is the only slice of Service i, in one of its generations.
func (p Plan) Slice(i, generation int) *discoveryv1.EndpointSlice {
	ports := []discoveryv1.EndpointPort{endpointPort("http", corev1.ProtocolTCP, BackendPort)}
	if p.HasDNS(i) {
		ports = append(ports, endpointPort("dns", corev1.ProtocolUDP, BackendPort))
	}
	s := slice(team(i), name(i), ports)
	for e := range p.Endpoints {
		address := p.EndpointAddress(i, e, generation)
		place := p.Local
		if RemotePrefix.Contains(address) {
			place = p.Remote
		}
		pod := fmt.Sprintf("%s-5d9c7b8f6d-%05d", name(i), e)
		if e == 0 && generation > 0 {
			pod += fmt.Sprintf("-%d", generation)
		}
		s.Endpoints = append(s.Endpoints, endpoint(address.String(), place.Node, pod))
	}

	return s
}

func team(i int) string { return fmt.Sprintf("team-%d", i%teams) }

func name(i int) string { return fmt.Sprintf("service-%d", i) }

// sliceName is the name of the slice of a Service.
func sliceName(service string) string { return service + "-x7k2p" }

// metadata is as large as that of real objects, most of which is of no use to a
// proxy. The API server adds managedFields.
func metadata(namespace, name, app string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace,
		Name:      name,
		Labels: map[string]string{
			"app.kubernetes.io/name":       "shop",
			"app.kubernetes.io/instance":   app,
			"app.kubernetes.io/managed-by": "helm",
		},
		Annotations: map[string]string{
			"meta.helm.sh/release-name":      app,
			"meta.helm.sh/release-namespace": namespace,
		},
	}
}

func service(namespace, name, clusterIP string, ports []corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metadata(namespace, name, name),
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  clusterIP,
			ClusterIPs: []string{clusterIP},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector:   map[string]string{"app.kubernetes.io/instance": name},
			Ports:      ports,
		},
	}
}

func slice(namespace, service string, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metadata(namespace, sliceName(service), service),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       ports,
	}
	s.Labels[discoveryv1.LabelServiceName] = service
	s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"

	return s
}

func endpoint(address, node, pod string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: []string{address},
		NodeName:  &node,
		Zone:      new(zone),
		Conditions: discoveryv1.EndpointConditions{
			Ready: new(true), Serving: new(true), Terminating: new(false),
		},
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Name: pod, UID: types.UID("7c1d2e3f-4a5b-4c6d-8e9f-000000000000"),
		},
	}
}

func port(name string, protocol corev1.Protocol, number, target int32) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: protocol, Port: number, TargetPort: intstr.FromInt32(target)}
}

func endpointPort(name string, protocol corev1.Protocol, number int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &number}
}
