package objects

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// FewNamespace is where the Services are that are measured one by one.
const FewNamespace = "bench"

// BulkPort is where the pods' own addresses take TCP and UDP streams.
const BulkPort = 5201

// The Services that are measured one by one. Each has one endpoint: the pod's own
// address, but for "single".
var (
	// BulkIP has BulkPort (TCP and UDP), at the remote pod.
	BulkIP = netip.MustParseAddr("10.96.1.1")
	// NearIP has BackendPort (TCP) and BulkPort (TCP and UDP), at the local pod.
	NearIP = netip.MustParseAddr("10.96.1.2")
	// FarIP is NearIP, at the remote pod.
	FarIP = netip.MustParseAddr("10.96.1.3")
	// SingleIP has Port (TCP), at [Plan.SingleAddress].
	SingleIP = netip.MustParseAddr("10.96.1.4")
)

// The node ports of the Services at NearIP and FarIP.
const (
	NearPort     = 30080 // to BackendPort
	NearBulkPort = 30201
	FarPort      = 31080
	FarBulkPort  = 31201
)

// few returns the Services that are measured one by one, and their slices in the
// same order, that of "single" last and in its generation 0.
func (p Plan) few() ([]*corev1.Service, []*discoveryv1.EndpointSlice) {
	services := []*corev1.Service{
		service(FewNamespace, "bulk", BulkIP.String(), bulkPorts(0)),
		nodePort("near", NearIP, NearPort, NearBulkPort),
		nodePort("far", FarIP, FarPort, FarBulkPort),
		service(FewNamespace, "single", SingleIP.String(),
			[]corev1.ServicePort{port("http", corev1.ProtocolTCP, Port, BackendPort)}),
	}
	slices := []*discoveryv1.EndpointSlice{
		p.sliceOfPod(services[0], p.Remote),
		p.sliceOfPod(services[1], p.Local),
		p.sliceOfPod(services[2], p.Remote),
		p.singleSlice(0),
	}

	return services, slices
}

// nodePort is a Service of a pod that is reached from outside too.
func nodePort(name string, clusterIP netip.Addr, number, bulk int32) *corev1.Service {
	http := port("http", corev1.ProtocolTCP, BackendPort, BackendPort)
	http.NodePort = number
	s := service(FewNamespace, name, clusterIP.String(), append(bulkPorts(bulk), http))
	s.Spec.Type = corev1.ServiceTypeNodePort

	return s
}

// bulkPorts are BulkPort for both protocols, with a node port unless that is 0.
func bulkPorts(nodePort int32) []corev1.ServicePort {
	ports := []corev1.ServicePort{
		port("bulk-tcp", corev1.ProtocolTCP, BulkPort, BulkPort),
		port("bulk-udp", corev1.ProtocolUDP, BulkPort, BulkPort),
	}
	for i := range ports {
		ports[i].NodePort = nodePort
	}

	return ports
}

// sliceOfPod is the slice of a Service with the pod of a place as its endpoint.
func (p Plan) sliceOfPod(service *corev1.Service, place Place) *discoveryv1.EndpointSlice {
	var ports []discoveryv1.EndpointPort
	for _, port := range service.Spec.Ports {
		ports = append(ports, endpointPort(port.Name, port.Protocol, port.TargetPort.IntVal))
	}
	s := slice(FewNamespace, service.Name, ports)
	s.Endpoints = []discoveryv1.Endpoint{endpoint(place.Pod.String(), place.Node, service.Name+"-0")}

	return s
}

func (p Plan) singleSlice(generation int) *discoveryv1.EndpointSlice {
	s := slice(FewNamespace, "single", []discoveryv1.EndpointPort{endpointPort("http", corev1.ProtocolTCP, BackendPort)})
	address := p.SingleAddress(generation).String()
	s.Endpoints = []discoveryv1.Endpoint{endpoint(address, p.Local.Node, "single-0")}

	return s
}
