package differential

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-lb/sluice/test/object"
)

// randomService is one that the API server takes, of any type, with all fields
// that matter to a proxy. Numbers make it collide with no other: which of two
// Services an address that both claim belongs to, kube-proxy leaves open.
func randomService(r *rand.Rand, number int) *corev1.Service {
	kind := pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	svc := object.Service(namespace, fmt.Sprintf("s%d", number), randomClusterIPs(r, number))
	spec := &svc.Spec
	spec.Type = kind
	randomPorts(r, spec, number)
	spec.InternalTrafficPolicy = pick(r, nil, new(corev1.ServiceInternalTrafficPolicyCluster), new(corev1.ServiceInternalTrafficPolicyLocal))
	spec.PublishNotReadyAddresses = r.IntN(8) == 0
	spec.TrafficDistribution = pick(r, nil, nil, new(corev1.ServiceTrafficDistributionPreferSameZone))
	for range r.IntN(5) / 2 {
		spec.ExternalIPs = appendNew(spec.ExternalIPs, pick(r, externalIPs...))
	}
	if spec.Type != corev1.ServiceTypeClusterIP || len(spec.ExternalIPs) > 0 {
		spec.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	if r.IntN(4) == 0 {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(pick(r, int32(600), int32(10800)))},
		}
	}
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		randomLoadBalancer(r, svc, number)
	}
	if r.IntN(20) == 0 { // it is another proxy's
		metav1.SetMetaDataLabel(&svc.ObjectMeta, proxyNameLabel, pick(r, "", "other"))
	}

	return svc
}

// clusterIPs are those of the Service with a number.
func clusterIPs(number int) (v4, v6 string) {
	return fmt.Sprintf("10.96.10.%d", number+1), fmt.Sprintf("fd00:10:96::a%02x", number+1)
}

// twinIP is the twin's of the Service that has this ClusterIP.
func twinIP(ip string) string {
	addr := netip.MustParseAddr(ip)
	bytes := addr.AsSlice()
	bytes[len(bytes)-2]++
	twin, _ := netip.AddrFromSlice(bytes)

	return twin.String()
}

// randomClusterIPs are of one family, or of both in either order.
func randomClusterIPs(r *rand.Rand, number int) []string {
	v4, v6 := clusterIPs(number)
	switch r.IntN(6) {
	case 0:
		return []string{v4}
	case 1:
		return []string{v6}
	case 2:
		return []string{v6, v4}
	default:
		return []string{v4, v6}
	}
}

// portNames are those that slices may have, too.
var portNames = []string{"one", "two"}

func randomPorts(r *rand.Rand, spec *corev1.ServiceSpec, number int) {
	both := r.IntN(4) == 0 // one number for TCP and UDP, as DNS has it
	for i := range 1 + r.IntN(2) {
		protocol := pick(r, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP)
		of := i
		if both {
			of, protocol = 0, []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}[i]
		}
		port := corev1.ServicePort{
			Name: portNames[i], Protocol: protocol,
			Port: int32(80 + 10*number + of), TargetPort: intstr.FromInt32(8080),
		}
		if spec.Type != corev1.ServiceTypeClusterIP {
			port.NodePort = int32(30000 + 10*number + of)
		}
		spec.Ports = append(spec.Ports, port)
	}
	if len(spec.Ports) == 1 && r.IntN(4) == 0 {
		spec.Ports[0].Name = ""
	}
}

// Addresses that several Services share, by different ports. A node has the last
// of the VIPs; external IPs may be those of nodes.
var (
	vips        = []string{"192.168.60.1", "192.168.60.2", "192.168.60.6", "fd00:60::1", "fd00:60::2", "fd00:60::6"}
	externalIPs = []string{"192.168.61.1", "192.168.61.2", "192.168.50.1", "fd00:61::1", "fd00:61::2", "fd00:50::1"}
)

// sourceRanges are those that Services admit: all or none of the spares of a
// client are in one.
var sourceRanges = []string{
	"10.99.0.0/16", "10.244.0.0/16", "10.244.1.0/24", "192.168.50.0/24", "192.168.50.1/32", "192.168.60.0/24", "0.0.0.0/0",
	"fd00:99::/64", "fd00:10:244::/48", "fd00:50::/64", "fd00:50::1/128", "fd00:60::/64", "::/0", "198.51.100.0/24", "2001:db8::/32",
}

func randomLoadBalancer(r *rand.Rand, svc *corev1.Service, number int) {
	spec := &svc.Spec
	if r.IntN(3) == 0 {
		spec.AllocateLoadBalancerNodePorts = new(false)
		for i := range spec.Ports {
			spec.Ports[i].NodePort = 0
		}
	}
	if spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		spec.HealthCheckNodePort = int32(32000 + number)
	}
	if r.IntN(2) == 0 {
		for range 1 + r.IntN(4) {
			spec.LoadBalancerSourceRanges = appendNew(spec.LoadBalancerSourceRanges, pick(r, sourceRanges...))
		}
	}
	var ips []string
	for range r.IntN(4) {
		ips = appendNew(ips, pick(r, vips...))
	}
	for _, ip := range ips {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
			IP: ip,
			// The API server fills in VIP.
			IPMode: pick(r, new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeProxy)),
		})
	}
	if r.IntN(8) == 0 {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{Hostname: "lb.example.com"})
	}
}

// appendNew appends what is not there yet.
func appendNew(all []string, more string) []string {
	for _, one := range all {
		if one == more {
			return all
		}
	}

	return append(all, more)
}
