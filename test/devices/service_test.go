package devices

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// service is a Service of both families with everything that one can dial: what
// its number determines its addresses and its node port.
type service struct {
	number   int
	local    bool   // externalTrafficPolicy: Local
	sticky   bool   // sessionAffinity: ClientIP
	port     uint16 // where backends answer; 0: podPort
	backends []backend

	annotations map[string]string
}

// backend is an endpoint of each family.
type backend struct {
	name string // of the pod or the node that answers
	node string
	ips  [2]netip.Addr
}

// way is one of the addresses that a Service has.
type way int

const (
	nodePort way = iota
	loadBalancer
	externalIP
	clusterIP
)

func (w way) String() string {
	return [...]string{"node port", "load balancer", "external IP", "cluster IP"}[w]
}

// fromOutside are the ways that are meant for clients outside of the cluster.
var fromOutside = []way{nodePort, loadBalancer, externalIP}

// family is an index: of addresses, of backend.ips, of lab.Pod.At.
type family int

const (
	ipv4 family = iota
	ipv6
)

func (f family) String() string { return [...]string{"IPv4", "IPv6"}[f] }

var families = []family{ipv4, ipv6}

// Where the virtual addresses of all Services are.
var (
	serviceCIDRs    = [2]string{"10.96.0.0/16", "fd00:96::/108"}
	virtualPrefixes = []netip.Prefix{
		netip.MustParsePrefix(serviceCIDRs[ipv4]), netip.MustParsePrefix(serviceCIDRs[ipv6]),
		netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:113::/64"),
		netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:100::/64"),
	}
)

const servicePort = 80

// ip is the service's virtual address; it has no node port.
func (s service) ip(w way, f family) string {
	formats := map[way][2]string{
		loadBalancer: {"203.0.113.%d", "2001:db8:113::%d"},
		externalIP:   {"198.51.100.%d", "2001:db8:100::%d"},
		clusterIP:    {"10.96.0.%d", "fd00:96::%d"},
	}

	return fmt.Sprintf(formats[w][f], s.number)
}

// at is what to dial. Node ports are those of a node.
func (s service) at(w way, f family, node *lab.Node) string {
	if w == nodePort {
		return netip.AddrPortFrom([]netip.Addr{node.IPv4, node.IPv6}[f], s.nodePort()).String()
	}

	return netip.AddrPortFrom(netip.MustParseAddr(s.ip(w, f)), servicePort).String()
}

func (s service) nodePort() uint16 { return uint16(30000 + s.number) }

func (s service) targetPort() int32 { return int32(cmp.Or(s.port, podPort)) }

func (s service) name() string { return fmt.Sprintf("service-%d", s.number) }

// onPod and onHost are backends that answer on podPort.
func onPod(pod *lab.Pod) backend {
	return backend{name: pod.Name, node: pod.Node.Name, ips: [2]netip.Addr{pod.IPv4, pod.IPv6}}
}

func onHost(node *lab.Node) backend {
	return backend{name: node.Name, node: node.Name, ips: [2]netip.Addr{node.IPv4, node.IPv6}}
}

var protocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}

func portName(of corev1.Protocol) string { return strings.ToLower(string(of)) }

func (s service) object() *corev1.Service {
	svc := object.Service("lab", s.name(), []string{s.ip(clusterIP, ipv4), s.ip(clusterIP, ipv6)})
	svc.Annotations = s.annotations
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.ExternalIPs = []string{s.ip(externalIP, ipv4), s.ip(externalIP, ipv6)}
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	if s.local {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if s.sticky {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	for _, protocol := range protocols {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name:       portName(protocol),
			Protocol:   protocol,
			Port:       servicePort,
			NodePort:   int32(s.nodePort()),
			TargetPort: intstr.FromInt32(s.targetPort()),
		})
	}
	for _, f := range families {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: s.ip(loadBalancer, f)})
	}

	return svc
}

func (s service) slice(f family) *discoveryv1.EndpointSlice {
	slice := object.Slice("lab", fmt.Sprintf("%s-%d", s.name(), f), s.name(), object.Families[f])
	for _, protocol := range protocols {
		slice.Ports = append(slice.Ports, object.EndpointPort(portName(protocol), protocol, s.targetPort()))
	}
	for _, backend := range s.backends {
		slice.Endpoints = append(slice.Endpoints, object.Endpoint(backend.ips[f], backend.node))
	}

	return slice
}

// publish makes these the cluster's Services.
func (w *world) publish(t *testing.T, services ...service) {
	t.Helper()
	objects := []runtime.Object{object.ServiceCIDR("kubernetes", serviceCIDRs[:]...)}
	for _, s := range services {
		objects = append(objects, s.object(), s.slice(ipv4), s.slice(ipv6))
	}
	text, err := object.Manifest(objects...)
	lab.Must(t, err)
	// In one step, or an agent might see half of it.
	draft := filepath.Join(w.manifests, ".cluster.yaml")
	lab.Must(t, os.WriteFile(draft, text, 0o644))
	lab.Must(t, os.Rename(draft, filepath.Join(w.manifests, "cluster.yaml")))
}
