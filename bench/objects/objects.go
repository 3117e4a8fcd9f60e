package objects

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-lb/sluice/test/object"
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
	ports := []discoveryv1.EndpointPort{object.EndpointPort("http", corev1.ProtocolTCP, BackendPort)}
	if p.HasDNS(i) {
		ports = append(ports, object.EndpointPort("dns", corev1.ProtocolUDP, BackendPort))
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
		s.Endpoints = append(s.Endpoints, endpoint(address, place.Node, pod))
	}

	return s
}

func team(i int) string { return fmt.Sprintf("team-%d", i%teams) }

func name(i int) string { return fmt.Sprintf("service-%d", i) }

// sliceName is the name of the slice of a Service.
func sliceName(service string) string { return service + "-x7k2p" }

// addMetadata makes metadata as large as that of real objects, most of which is of no
// use to a proxy. The API server adds managedFields.
func addMetadata(to *metav1.ObjectMeta, app string) {
	metav1.SetMetaDataLabel(to, "app.kubernetes.io/name", "shop")
	metav1.SetMetaDataLabel(to, "app.kubernetes.io/instance", app)
	metav1.SetMetaDataLabel(to, "app.kubernetes.io/managed-by", "helm")
	metav1.SetMetaDataAnnotation(to, "meta.helm.sh/release-name", app)
	metav1.SetMetaDataAnnotation(to, "meta.helm.sh/release-namespace", to.Namespace)
}

func service(namespace, name, clusterIP string, ports []corev1.ServicePort) *corev1.Service {
	s := object.Service(namespace, name, []string{clusterIP}, ports...)
	addMetadata(&s.ObjectMeta, name)
	s.Spec.Selector = map[string]string{"app.kubernetes.io/instance": name}

	return s
}

func slice(namespace, service string, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	s := object.Slice(namespace, sliceName(service), service, discoveryv1.AddressTypeIPv4, ports...)
	addMetadata(&s.ObjectMeta, service)
	s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"

	return s
}

func endpoint(address netip.Addr, node, pod string) discoveryv1.Endpoint {
	e := object.Endpoint(address, node)
	e.Zone, e.Conditions = new(zone), object.Conditions(true, true, false)
	e.TargetRef = &corev1.ObjectReference{
		Kind: "Pod", Name: pod, UID: types.UID("7c1d2e3f-4a5b-4c6d-8e9f-000000000000"),
	}

	return e
}

func port(name string, protocol corev1.Protocol, number, target int32) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: protocol, Port: number, TargetPort: intstr.FromInt32(target)}
}

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

// nodePort returns a Service of a pod that is reached from outside too.
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
		ports = append(ports, object.EndpointPort(port.Name, port.Protocol, port.TargetPort.IntVal))
	}
	s := slice(FewNamespace, service.Name, ports)
	s.Endpoints = []discoveryv1.Endpoint{endpoint(place.Pod, place.Node, service.Name+"-0")}

	return s
}

func (p Plan) singleSlice(generation int) *discoveryv1.EndpointSlice {
	s := slice(FewNamespace, "single", []discoveryv1.EndpointPort{object.EndpointPort("http", corev1.ProtocolTCP, BackendPort)})
	s.Endpoints = []discoveryv1.Endpoint{endpoint(p.SingleAddress(generation), p.Local.Node, "single-0")}

	return s
}
