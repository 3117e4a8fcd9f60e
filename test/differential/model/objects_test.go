package model

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	netutils "k8s.io/utils/net"
)

// servicePort is one port of one Service in one family, with what CONTRACT.md
// part 0 needs to know of it.
type servicePort struct {
	text     string // namespace/name:port protocol family, as service_ports has it
	service  *corev1.Service
	name     string
	protocol corev1.Protocol
	port     int32
	nodePort int32
	family   corev1.IPFamily

	clusterIP   netip.Addr
	vips        []netip.Addr
	externalIPs []netip.Addr
	ranges      []netip.Prefix

	internalLocal bool // ITP
	externalLocal bool // ETP
	affinity      int32
	algorithm     string

	all        []endpoint
	clusterEps []endpoint
	localEps   []endpoint
	hasAny     bool
}

// endpoint is one (address, port) behind a service port.
type endpoint struct {
	at                          netip.AddrPort
	local                       bool
	ready, serving, terminating bool
	forZones                    []discoveryv1.ForZone
	forNodes                    []discoveryv1.ForNode
}

// read makes the service ports of all objects, those of older Services first.
func (c *cluster) read() {
	var services []*corev1.Service
	for _, svc := range c.services {
		if c.isProxied(svc) {
			services = append(services, svc)
		}
	}
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	c.serviceCIDRs, c.otherProxies = nil, nil
	for _, obj := range c.cidrs {
		c.serviceCIDRs = append(c.serviceCIDRs, parsePrefixes(obj.Spec.CIDRs)...)
	}
	for _, svc := range c.services {
		if isOfOtherProxy(svc) {
			c.otherProxies = append(c.otherProxies, c.clusterIPsOf(svc)...)
		}
	}
	c.ports = nil
	for _, svc := range services {
		for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
			c.ports = append(c.ports, c.servicePorts(svc, family)...)
		}
	}
	c.readClaims()
}

// isProxied: CONTRACT 1.1.1 and 1.1.3.
func (c *cluster) isProxied(svc *corev1.Service) bool {
	if isOfOtherProxy(svc) {
		c.note(optedOut)
		return false
	}
	if svc.Spec.ClusterIP == "" || svc.Spec.ClusterIP == corev1.ClusterIPNone {
		c.note(noClusterIP)
		return false
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		c.note(externalName)
		return false
	}
	return true
}

func isOfOtherProxy(svc *corev1.Service) bool {
	_, labelled := svc.Labels["service.kubernetes.io/service-proxy-name"]
	return labelled
}

// clusterIPsOf is what a Service of another proxy has of addresses, whatever its type and families.
func (c *cluster) clusterIPsOf(svc *corev1.Service) []netip.Addr {
	texts := svc.Spec.ClusterIPs
	switch {
	case svc.Spec.ClusterIP == "", svc.Spec.ClusterIP == corev1.ClusterIPNone:
		return nil
	case len(svc.Spec.IPFamilies) == 0:
		texts = []string{svc.Spec.ClusterIP}
	}
	var ips []netip.Addr
	for _, text := range texts {
		if ip := parse(text); ip.IsValid() {
			ips = append(ips, ip)
		}
	}
	return ips
}

// servicePorts: what a Service has of one family, if it has a ClusterIP there.
func (c *cluster) servicePorts(svc *corev1.Service, family corev1.IPFamily) []*servicePort {
	clusterIP := c.clusterIP(svc, family)
	if !clusterIP.IsValid() {
		c.note(familyMissing)
		return nil
	}
	var ports []*servicePort
	for _, spec := range svc.Spec.Ports {
		sp := &servicePort{
			service: svc, name: spec.Name, protocol: orTCP(spec.Protocol), port: spec.Port, nodePort: spec.NodePort, family: family,
			clusterIP: clusterIP, vips: c.vips(svc, family), externalIPs: c.externalIPs(svc, family), ranges: c.sourceRanges(svc, family),
			internalLocal: svc.Spec.InternalTrafficPolicy != nil && *svc.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
			externalLocal: c.externalPolicy(svc) == corev1.ServiceExternalTrafficPolicyLocal,
			affinity:      c.affinity(svc), algorithm: c.algorithm(svc),
		}
		if !isPort(spec.Port) || !isProtocol(sp.protocol) || slices.ContainsFunc(ports, sp.isNamedAs) {
			continue // nothing that an API server would accept
		}
		sp.text = sp.String()
		sp.all = c.endpoints(sp)
		c.categorize(sp, sp.all)
		ports = append(ports, sp)
	}
	return ports
}

func (sp *servicePort) String() string {
	text := sp.service.Namespace + "/" + sp.service.Name
	if sp.name != "" {
		text += ":" + sp.name
	}
	return text + " " + string(sp.protocol) + " " + string(sp.family)
}

func (sp *servicePort) isNamedAs(other *servicePort) bool {
	return sp.name == other.name && sp.protocol == other.protocol
}

// clusterIP: CONTRACT 1.1.4.
func (c *cluster) clusterIP(svc *corev1.Service, family corev1.IPFamily) netip.Addr {
	if len(svc.Spec.IPFamilies) == 0 {
		c.note(familyOfClusterIP)
		return c.parseOf(family, svc.Spec.ClusterIP)
	}
	for i, f := range svc.Spec.IPFamilies {
		if f == family && i < len(svc.Spec.ClusterIPs) {
			c.note(familyListed)
			return c.parseOf(family, svc.Spec.ClusterIPs[i])
		}
	}
	return netip.Addr{}
}

// externalIPs: CONTRACT 1.1.6. They count for the policy even where no client can
// dial them.
func (c *cluster) externalIPs(svc *corev1.Service, family corev1.IPFamily) []netip.Addr {
	if c.options.ignoreExternalIPs {
		c.note(externalIPsOff)
		return nil
	}
	var ips []netip.Addr
	for _, text := range svc.Spec.ExternalIPs {
		if ip := c.parseOf(family, text); ip.IsValid() {
			ips = append(ips, ip)
		}
	}
	return ips
}

// vips: CONTRACT 1.1.7, whatever the type of the Service.
func (c *cluster) vips(svc *corev1.Service, family corev1.IPFamily) []netip.Addr {
	var ips []netip.Addr
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		if ingress.IP == "" {
			c.note(hostnameIngress)
			continue
		}
		if ingress.IPMode != nil && *ingress.IPMode != corev1.LoadBalancerIPModeVIP {
			c.note(proxyIngress)
			continue
		}
		if ip := c.parseOf(family, ingress.IP); ip.IsValid() {
			ips = append(ips, ip)
		}
	}
	return ips
}

// sourceRanges: CONTRACT 1.8.4.
func (c *cluster) sourceRanges(svc *corev1.Service, family corev1.IPFamily) []netip.Prefix {
	var ranges []netip.Prefix
	for _, text := range svc.Spec.LoadBalancerSourceRanges {
		p := parsePrefix(text)
		if !p.IsValid() || familyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			c.note(rangesOpenByZero)
			return nil
		}
		ranges = append(ranges, p)
	}
	if len(ranges) == 0 && len(svc.Spec.LoadBalancerSourceRanges) > 0 {
		c.note(rangesOpenByFamily)
	}
	return ranges
}

// externalPolicy: CONTRACT 1.1.9.
func (c *cluster) externalPolicy(svc *corev1.Service) corev1.ServiceExternalTrafficPolicy {
	switch {
	case svc.Spec.Type == corev1.ServiceTypeLoadBalancer, svc.Spec.Type == corev1.ServiceTypeNodePort:
		return svc.Spec.ExternalTrafficPolicy
	case len(svc.Spec.ExternalIPs) > 0:
		c.note(policyByExternalIP)
		return svc.Spec.ExternalTrafficPolicy
	case svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal:
		c.note(policyNotApplicable)
	}
	return corev1.ServiceExternalTrafficPolicyCluster
}

// affinity: CONTRACT 1.9.2 and 1.15, in seconds; zero is none.
func (c *cluster) affinity(svc *corev1.Service) int32 {
	if svc.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	config := svc.Spec.SessionAffinityConfig
	if config == nil || config.ClientIP == nil || config.ClientIP.TimeoutSeconds == nil || *config.ClientIP.TimeoutSeconds <= 0 {
		c.note(affinityDefault)
		return 10800
	}
	c.note(affinityGiven)
	return *config.ClientIP.TimeoutSeconds
}

// algorithm is Sluice's own: the annotation, else the agent's.
func (c *cluster) algorithm(svc *corev1.Service) string {
	text, annotated := svc.Annotations["sluice-lb.io/algorithm"]
	switch {
	case slices.Contains(algorithms, text):
		c.note(algorithmGiven)
		return text
	case annotated:
		c.note(algorithmBad)
	}
	return c.options.algorithm
}

var algorithms = []string{"random", "rr", "lc", "sed", "nq", "sh", "dh", "maglev"}

// parseOf: CONTRACT 1.1.5. What is no address, or another destination in each network
// namespace (docs/kube-proxy.md, "Addresses that no Service has"), or of the other
// family, is the zero one.
func (c *cluster) parseOf(family corev1.IPFamily, text string) netip.Addr {
	ip := parse(text)
	if !ip.IsValid() {
		c.note(badAddress)
	}
	c.noteIf(differsSpecialAddress, isSpecial(ip))
	if !ip.IsValid() || isSpecial(ip) || familyOf(ip) != family {
		return netip.Addr{}
	}
	return ip
}

func isSpecial(ip netip.Addr) bool {
	return ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

func parse(text string) netip.Addr {
	ip, _ := netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	return ip.Unmap()
}

func parsePrefix(text string) netip.Prefix {
	_, n, err := netutils.ParseCIDRSloppy(strings.TrimSpace(text))
	if err != nil {
		return netip.Prefix{}
	}
	ip, _ := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if ip.Is4In6() { // 10.0.0.0/8 may be written ::ffff:10.0.0.0/104
		return netip.PrefixFrom(ip.Unmap(), ones-(bits-32))
	}
	return netip.PrefixFrom(ip, ones)
}

// parsePrefixes leaves out what is none.
func parsePrefixes(texts []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, text := range texts {
		if p := parsePrefix(text); p.IsValid() {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

func familyOf(ip netip.Addr) corev1.IPFamily {
	if ip.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func orTCP(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }

func isPort(n int32) bool { return 0 < n && n < 65536 }

func isProtocol(p corev1.Protocol) bool {
	return p == corev1.ProtocolTCP || p == corev1.ProtocolUDP || p == corev1.ProtocolSCTP
}
