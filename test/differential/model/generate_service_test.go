package model

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var serviceKeys = []objectKey{{"ns1", "a"}, {"ns1", "b"}, {"ns1", "c"}, {"ns2", "a"}}

// service is a new Service, or one that is there with something changed.
func (g *generator) service() *corev1.Service {
	key := pick(g, serviceKeys...)
	parts := []func(*corev1.Service){
		g.serviceType, g.clusterIPs, g.servicePorts, g.externalIPs, g.ingress, g.sourceRanges, g.policies, g.affinity, g.annotations, g.labels,
	}
	if known := g.have.services[key]; known != nil && !g.one(8) {
		svc := known.DeepCopy()
		if g.one(8) { // deleted, and created again before the agent runs
			svc.CreationTimestamp = g.created()
			g.servicePorts(svc)
			return svc
		}
		for range 1 + g.IntN(2) {
			pick(g, parts...)(svc)
		}
		return svc
	}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: key.namespace, Name: key.name,
		CreationTimestamp: g.created(),
	}}
	for _, part := range parts {
		part(svc)
	}
	return svc
}

func (g *generator) created() metav1.Time {
	return metav1.NewTime(time.Unix(pick[int64](g, 100, 200, 200, 300), 0))
}

func (g *generator) serviceType(svc *corev1.Service) {
	svc.Spec.Type = pick(g, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	if g.one(15) {
		svc.Spec.Type = corev1.ServiceTypeExternalName
	}
	svc.Spec.HealthCheckNodePort = pick[int32](g, 0, 30999)
}

// clusterIPs are those of an API server, and sometimes what it would not accept.
func (g *generator) clusterIPs(svc *corev1.Service) {
	v4, v6 := pick(g, clusterIPs4...), pick(g, clusterIPs6...)
	if g.one(12) {
		v4 = pick(g, "172.30.0.041", "::ffff:172.30.0.42", vips4[0], nodeIPs4[1], "172.30.0")
	}
	spec := &svc.Spec
	switch g.IntN(6) {
	case 0, 1:
		spec.ClusterIPs, spec.IPFamilies = []string{v4}, []corev1.IPFamily{corev1.IPv4Protocol}
	case 2:
		spec.ClusterIPs, spec.IPFamilies = []string{v6}, []corev1.IPFamily{corev1.IPv6Protocol}
	case 3, 4:
		spec.ClusterIPs, spec.IPFamilies = []string{v4, v6}, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	case 5:
		spec.ClusterIPs, spec.IPFamilies = []string{v6, v4}, []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	}
	spec.ClusterIP = spec.ClusterIPs[0]
	if !g.one(8) {
		return
	}
	switch g.IntN(6) {
	case 0:
		spec.ClusterIP, spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	case 1:
		spec.ClusterIP = ""
	case 2:
		spec.IPFamilies = nil
	case 3:
		spec.IPFamilies = append(spec.IPFamilies, corev1.IPv6Protocol)
	case 4:
		spec.ClusterIPs = spec.ClusterIPs[:1]
	case 5:
		spec.ClusterIPs = nil
	}
}

// portSpec is one of few ports, so that names, numbers and protocols collide.
type portSpec struct {
	name     string
	protocol corev1.Protocol
	port     int32
	nodePort int32
	target   int32
}

var portSpecs = []portSpec{
	{"http", corev1.ProtocolTCP, 80, 30080, 8080},
	{"http", corev1.ProtocolTCP, 80, 30080, 8080},
	{"", corev1.ProtocolTCP, 80, 30080, 8080},
	{"alt", corev1.ProtocolTCP, 443, 30080, 9090},
	{"dns", corev1.ProtocolUDP, 53, 30053, 53},
	{"dns", corev1.ProtocolTCP, 53, 30053, 53},
	{"sigtran", corev1.ProtocolSCTP, 80, 30080, 9090},
}

func (g *generator) servicePorts(svc *corev1.Service) {
	svc.Spec.Ports = nil
	for range 1 + g.IntN(3) {
		spec := pick(g, portSpecs...)
		port := corev1.ServicePort{Name: spec.name, Protocol: spec.protocol, Port: spec.port}
		if !g.one(3) {
			port.NodePort = spec.nodePort
		}
		if g.one(20) {
			port.Protocol = ""
		}
		if g.one(10) {
			port.Port = pick[int32](g, 443, 30080)
		}
		svc.Spec.Ports = append(svc.Spec.Ports, port)
	}
	if g.one(25) {
		svc.Spec.Ports = nil
	}
}

func (g *generator) externalIPs(svc *corev1.Service) {
	svc.Spec.ExternalIPs = nil
	if g.one(2) {
		return
	}
	svc.Spec.ExternalIPs = some(g, 3, g.externalAddresses()...)
}

// externalAddresses are addresses that clients outside may dial.
func (g *generator) externalAddresses() []string {
	from := append(append([]string{}, vips4...), vips6...)
	switch g.IntN(6) {
	case 0:
		from = append(from, ugly...)
	case 1:
		from = append(from, "192.168.0.2", "fd00:1::2", "172.30.0.41", "172.30.0.99", "10.244.1.5")
	}
	return from
}

func (g *generator) ingress(svc *corev1.Service) {
	svc.Status.LoadBalancer.Ingress = nil
	if g.one(3) {
		return
	}
	for _, ip := range some(g, 3, g.externalAddresses()...) {
		entry := corev1.LoadBalancerIngress{IP: ip}
		switch g.IntN(8) {
		case 0:
			entry.IPMode = ptr.To(corev1.LoadBalancerIPModeProxy)
		case 1:
			entry.IPMode = ptr.To(corev1.LoadBalancerIPModeVIP)
		case 2:
			entry = corev1.LoadBalancerIngress{Hostname: "lb.example"}
		}
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, entry)
	}
}

func (g *generator) sourceRanges(svc *corev1.Service) {
	svc.Spec.LoadBalancerSourceRanges = nil
	if g.one(2) {
		return
	}
	from := []string{
		"203.0.113.0/24", "203.0.113.5/32", "10.244.0.0/16", "192.168.0.0/24", " 10.244.1.5/32 ",
		"2001:db8:ffff::/48", "fd00:244::/32", "fd00:1::2/128",
	}
	if g.one(3) {
		from = append(from, "0.0.0.0/0", "::/0", "nonsense", "", "203.0.113.77/24", "203.000.113.0/024", "::ffff:203.0.113.0/120", "1.2.3.4")
	}
	svc.Spec.LoadBalancerSourceRanges = some(g, 4, from...)
}

func (g *generator) policies(svc *corev1.Service) {
	svc.Spec.ExternalTrafficPolicy = pick(g, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal, "")
	svc.Spec.InternalTrafficPolicy = pick(g, nil, ptr.To(corev1.ServiceInternalTrafficPolicyCluster), ptr.To(corev1.ServiceInternalTrafficPolicyLocal))
	if g.one(20) {
		svc.Spec.ExternalTrafficPolicy, svc.Spec.InternalTrafficPolicy = "Nearby", ptr.To(corev1.ServiceInternalTrafficPolicy("Nearby"))
	}
}

func (g *generator) affinity(svc *corev1.Service) {
	svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig = pick(g, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP), nil
	switch g.IntN(6) {
	case 0:
		return
	case 1:
		svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{}
		return
	}
	seconds := ptr.To(pick[int32](g, 10800, 60, 1, 86400))
	if g.one(10) {
		seconds = pick(g, nil, ptr.To[int32](0), ptr.To[int32](-5))
	}
	svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: seconds}}
}

func (g *generator) annotations(svc *corev1.Service) {
	svc.Annotations = nil
	if g.one(3) {
		text := pick(g, append([]string{"", "wrr", "Maglev"}, algorithms...)...)
		svc.Annotations = map[string]string{"sluice-lb.io/algorithm": text}
	}
}

// labels: those that matter, and fields that do not (CONTRACT 1.1.11).
func (g *generator) labels(svc *corev1.Service) {
	svc.Labels = nil
	if g.one(10) {
		svc.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": pick(g, "", "other")}
	}
	svc.Spec.PublishNotReadyAddresses = g.one(4)
	svc.Spec.Selector = map[string]string{"app": fmt.Sprint(g.IntN(3))}
	svc.Spec.TrafficDistribution = pick(g, nil, ptr.To(corev1.ServiceTrafficDistributionPreferClose))
}
