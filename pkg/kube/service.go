package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// AlgorithmAnnotation on a Service names the algorithm that chooses a backend for a new
// flow, as [lb.ParseAlgorithm] parses it. A Service without it has the node's algorithm; so
// has one whose annotation names none, which is reported as a problem.
const AlgorithmAnnotation = "sluice-lb.io/algorithm"

// HealAnnotation on a Service limits what is done about its backends that do not answer, as
// [lb.ParseHealing] parses it. Text that it cannot parse is reported as a problem and limits nothing.
const HealAnnotation = "sluice-lb.io/heal"

// FailoverAnnotation on a Service with the external traffic policy Local says where clients outside of the cluster go whose
// node has no endpoint, as [lb.ParseFailover] parses it. Text that it cannot parse is reported as a problem, and leads nowhere.
// OpenShift's FallbackAnnotation is the same as "fallback", whatever its value.
const (
	FailoverAnnotation = "sluice-lb.io/external-failover"
	FallbackAnnotation = "traffic-policy.network.alpha.openshift.io/local-with-fallback"
)

// translateService reads a Service. It sets the defaults that an API server sets, too, so
// that an object from a manifest means the same.
func translateService(obj *corev1.Service) (lb.Service, []lb.Problem) {
	p := &parser{object: keyOf(kindService, &obj.ObjectMeta)}
	spec := &obj.Spec
	if _, other := obj.Labels[labelServiceProxyName]; other {
		service := lb.Service{
			Name:    lb.ServiceName{Namespace: p.object.namespace, Name: p.object.name},
			Created: obj.CreationTimestamp.Time, OtherProxy: true,
		}
		service.ClusterIPs, service.Families = p.clusterIPs(spec)
		return service, nil // what it has is the other proxy's to report
	}
	service := lb.Service{
		Name:                lb.ServiceName{Namespace: p.object.namespace, Name: p.object.name},
		Created:             obj.CreationTimestamp.Time,
		Type:                p.serviceType(spec.Type),
		ExternalIPs:         p.addrs("spec.externalIPs", spec.ExternalIPs),
		LoadBalancers:       p.loadBalancers(obj.Status.LoadBalancer.Ingress),
		SourceRanges:        p.prefixes("spec.loadBalancerSourceRanges", spec.LoadBalancerSourceRanges),
		Affinity:            p.affinity(spec),
		Algorithm:           p.algorithm(obj.Annotations),
		OptedOut:            p.socket("metadata.annotations", obj.Annotations) == SocketOff,
		Healing:             p.healing(obj.Annotations),
		Failover:            p.failover(obj.Annotations),
		HealthCheckNodePort: p.port("spec.healthCheckNodePort", spec.HealthCheckNodePort),
		Ports:               p.servicePorts(spec.Ports),
	}
	p.unknownKeys(&obj.ObjectMeta, AlgorithmAnnotation, FailoverAnnotation, HealAnnotation, SocketKey)
	service.ClusterIPs, service.Families = p.clusterIPs(spec)
	if ptr.Deref(spec.InternalTrafficPolicy, "") == corev1.ServiceInternalTrafficPolicyLocal {
		service.InternalPolicy = lb.Local
	}
	if spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		service.ExternalPolicy = lb.Local
	} else if _, has := obj.Annotations[FailoverAnnotation]; has {
		p.add("metadata.annotations["+FailoverAnnotation+"]", "it has no effect without externalTrafficPolicy: Local")
	}
	return service, p.problems
}

func (p *parser) serviceType(t corev1.ServiceType) lb.ServiceType {
	switch t {
	case corev1.ServiceTypeClusterIP, "":
		return lb.ClusterIP
	case corev1.ServiceTypeNodePort:
		return lb.NodePort
	case corev1.ServiceTypeLoadBalancer:
		return lb.LoadBalancer
	case corev1.ServiceTypeExternalName:
		return lb.ExternalName
	}
	p.add("spec.type", "unknown type %q is taken for ClusterIP", t)
	return lb.ClusterIP
}

// clusterIPs returns the cluster IPs and, index by index, their families. Text that is no
// address becomes the zero address, so that the others keep their family. As in kube-proxy,
// a Service without spec.clusterIP has none, and one without families has only that.
func (p *parser) clusterIPs(spec *corev1.ServiceSpec) ([]netip.Addr, []lb.Family) {
	families := p.families(spec.IPFamilies)
	switch {
	case spec.ClusterIP == corev1.ClusterIPNone, spec.ClusterIP == "":
		return nil, families
	case len(families) == 0:
		return []netip.Addr{p.addr("spec.clusterIP", spec.ClusterIP)}, nil
	}
	return p.addrs("spec.clusterIPs", spec.ClusterIPs), families
}

func (p *parser) families(text []corev1.IPFamily) []lb.Family {
	var families []lb.Family
	for i, t := range text {
		switch t {
		case corev1.IPv4Protocol:
			families = append(families, lb.IPv4)
		case corev1.IPv6Protocol:
			families = append(families, lb.IPv6)
		default:
			p.add(fmt.Sprintf("spec.ipFamilies[%d]", i), "unknown family %q", t)
			families = append(families, 0)
		}
	}
	return families
}

// loadBalancers returns the addresses of a load balancer. An ingress with only a hostname
// becomes the zero address.
func (p *parser) loadBalancers(ingress []corev1.LoadBalancerIngress) []lb.LoadBalancerIP {
	if len(ingress) == 0 {
		return nil
	}
	ips := make([]lb.LoadBalancerIP, len(ingress))
	for i := range ingress {
		entry := &ingress[i]
		if entry.IP == "" {
			continue
		}
		ips[i].Addr = p.addr(fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), entry.IP)
		ips[i].Proxy = ptr.Deref(entry.IPMode, corev1.LoadBalancerIPModeVIP) != corev1.LoadBalancerIPModeVIP
	}
	return ips
}

func (p *parser) affinity(spec *corev1.ServiceSpec) time.Duration {
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil {
		seconds = ptr.Deref(c.ClientIP.TimeoutSeconds, seconds)
	}
	if seconds <= 0 {
		p.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not a valid timeout: the default is used", seconds)
		seconds = corev1.DefaultClientIPServiceAffinitySeconds
	}
	return time.Duration(seconds) * time.Second
}

// ourPrefix begins the keys of all annotations and labels that Sluice reads.
const ourPrefix = "sluice-lb.io/"

// unknownKeys adds a problem for each key of ours that has no effect on an object of this kind: one that is not known, or
// that is where none is read, an annotation of a Namespace or a label of another object.
func (p *parser) unknownKeys(meta *metav1.ObjectMeta, known ...string) {
	kind := kindText[p.object.kind]
	read, other, is := "annotations", "labels", "an annotation"
	values, others := meta.Annotations, meta.Labels
	if p.object.kind == kindNamespace {
		read, other, is = other, read, "a label"
		values, others = others, values
	}
	for _, key := range ourKeys(values) {
		if !slices.Contains(known, key) {
			p.add("metadata."+read+"["+key+"]", "it has no effect: a %s can have %s", kind, strings.Join(known, ", "))
		}
	}
	for _, key := range ourKeys(others) {
		if slices.Contains(known, key) {
			p.add("metadata."+other+"["+key+"]", "it has no effect: for a %s it is %s", kind, is)
		} else {
			p.add("metadata."+other+"["+key+"]", "it has no effect: a %s can have %s, as %s", kind, strings.Join(known, ", "), is)
		}
	}
}

// ourKeys returns the keys of ours, sorted.
func ourKeys(values map[string]string) []string {
	var ours []string
	for key := range values {
		if strings.HasPrefix(key, ourPrefix) {
			ours = append(ours, key)
		}
	}
	slices.Sort(ours)
	return ours
}

func (p *parser) algorithm(annotations map[string]string) lb.Algorithm {
	text, ok := annotations[AlgorithmAnnotation]
	if !ok {
		return lb.DefaultAlgorithm
	}
	algorithm, err := lb.ParseAlgorithm(text)
	if err != nil {
		p.add("metadata.annotations["+AlgorithmAnnotation+"]", "%v: the default is used", err)
	}
	return algorithm
}

func (p *parser) healing(annotations map[string]string) lb.Healing {
	text, ok := annotations[HealAnnotation]
	if !ok {
		return lb.HealAsNode
	}
	healing, err := lb.ParseHealing(text)
	if err != nil {
		p.add("metadata.annotations["+HealAnnotation+"]", "%v: it has no effect", err)
	}
	return healing
}

func (p *parser) failover(annotations map[string]string) lb.Failover {
	text, ok := annotations[FailoverAnnotation]
	if !ok {
		if _, has := annotations[FallbackAnnotation]; has {
			return lb.Fallback
		}
		return lb.NoFailover
	}
	failover, err := lb.ParseFailover(text)
	if err != nil {
		p.add("metadata.annotations["+FailoverAnnotation+"]", "%v: it has no effect", err)
	}
	return failover
}

func (p *parser) servicePorts(specs []corev1.ServicePort) []lb.ServicePort {
	ports := make([]lb.ServicePort, 0, len(specs))
	for i := range specs {
		spec := &specs[i]
		field := fmt.Sprintf("spec.ports[%d]", i)
		protocol, ok := p.protocol(field+".protocol", spec.Protocol)
		if !ok {
			continue
		}
		ports = append(ports, lb.ServicePort{
			Name:     spec.Name,
			Protocol: protocol,
			Port:     p.port(field+".port", spec.Port),
			NodePort: p.port(field+".nodePort", spec.NodePort),
		})
	}
	return ports
}

// protocol parses a protocol; the default is TCP.
func (p *parser) protocol(field string, text corev1.Protocol) (lb.Protocol, bool) {
	switch text {
	case corev1.ProtocolTCP, "":
		return lb.TCP, true
	case corev1.ProtocolUDP:
		return lb.UDP, true
	case corev1.ProtocolSCTP:
		return lb.SCTP, true
	}
	p.add(field, "unknown protocol %q", text)
	return 0, false
}

// port returns a port number, or zero if it is out of range.
func (p *parser) port(field string, number int32) uint16 {
	if number < 0 || number > 65535 {
		p.add(field, "%d is not a port number", number)
		return 0
	}
	return uint16(number)
}

// addrs parses addresses. Text that is no address becomes the zero address, with a problem
// unless it is blank.
func (p *parser) addrs(field string, text []string) []netip.Addr {
	if len(text) == 0 {
		return nil
	}
	addrs := make([]netip.Addr, len(text))
	for i, t := range text {
		if strings.TrimSpace(t) != "" {
			addrs[i] = p.addr(fmt.Sprintf("%s[%d]", field, i), t)
		}
	}
	return addrs
}

func (p *parser) addr(field, text string) netip.Addr {
	addr, err := lb.ParseAddr(text)
	if err != nil {
		p.add(field, "%v", err)
	}
	return addr
}

// prefixes parses prefixes and leaves out text that is none, with a problem unless it is
// blank.
func (p *parser) prefixes(field string, text []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for i, t := range text {
		if strings.TrimSpace(t) == "" {
			continue
		}
		prefix, err := lb.ParsePrefix(t)
		if err != nil {
			p.add(fmt.Sprintf("%s[%d]", field, i), "%v", err)
			continue
		}
		prefixes = append(prefixes, prefix)
	}
	return prefixes
}
