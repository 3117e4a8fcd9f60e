package kube

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// refusals returns why an API server would not accept an object of a manifest, of the fields that are read here. What
// an API server fills in may be missing.
func refusals(obj runtime.Object) field.ErrorList {
	var r refuser
	meta := obj.(metav1.Object)
	path := field.NewPath("metadata")
	name := apivalidation.NameIsDNSSubdomain
	switch obj.(type) {
	case *corev1.Service, *corev1.Namespace:
		name = apivalidation.NameIsDNSLabel
	}
	r.words(path.Child("name"), meta.GetName(), name(meta.GetName(), false))
	if namespace := meta.GetNamespace(); namespace != "" {
		r.words(path.Child("namespace"), namespace, apivalidation.ValidateNamespaceName(namespace, false))
	}
	r.list = append(r.list, metavalidation.ValidateLabels(meta.GetLabels(), path.Child("labels"))...)
	r.list = append(r.list, apivalidation.ValidateAnnotations(meta.GetAnnotations(), path.Child("annotations"))...)
	switch obj := obj.(type) {
	case *corev1.Service:
		r.service(obj)
	case *discoveryv1.EndpointSlice:
		r.slice(obj)
	case *corev1.Node:
		r.prefixes(field.NewPath("spec", "podCIDRs"), obj.Spec.PodCIDRs)
	case *networkingv1.ServiceCIDR:
		r.prefixes(field.NewPath("spec", "cidrs"), obj.Spec.CIDRs)
	}
	return r.list
}

// refuser collects the errors of an object.
type refuser struct{ list field.ErrorList }

func (r *refuser) add(path *field.Path, value any, why string) {
	r.list = append(r.list, field.Invalid(path, value, why))
}

// words adds each of the errors of a name.
func (r *refuser) words(path *field.Path, value string, errors []string) {
	for _, why := range errors {
		r.add(path, value, why)
	}
}

// oneOf adds an error unless the value is empty or one of these.
func oneOf[T ~string](r *refuser, path *field.Path, value T, allowed ...T) {
	if value != "" && !slices.Contains(allowed, value) {
		r.list = append(r.list, field.NotSupported(path, value, allowed))
	}
}

func (r *refuser) addr(path *field.Path, text string) netip.Addr {
	addr, err := lb.ParseAddr(text)
	if err != nil {
		r.add(path, text, "must be an IP address")
	}
	return addr
}

func (r *refuser) prefixes(path *field.Path, texts []string) {
	for i, text := range texts {
		if _, err := lb.ParsePrefix(text); err != nil {
			r.add(path.Index(i), text, "must be an address range, as 10.0.0.0/8")
		}
	}
}

// port adds an error unless the number is a port. Zero is one that is not set, if it may be missing.
func (r *refuser) port(path *field.Path, number int32, optional bool) {
	if number != 0 || !optional {
		for _, why := range validation.IsValidPortNum(int(number)) {
			r.add(path, number, why)
		}
	}
}

func (r *refuser) service(svc *corev1.Service) {
	spec, path := &svc.Spec, field.NewPath("spec")
	oneOf(r, path.Child("type"), spec.Type,
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if spec.Type == corev1.ServiceTypeExternalName {
		return // it is nothing to a proxy
	}
	if len(spec.Ports) == 0 && spec.ClusterIP != corev1.ClusterIPNone {
		r.list = append(r.list, field.Required(path.Child("ports"), ""))
	}
	r.servicePorts(path.Child("ports"), spec.Ports)
	r.clusterIPs(path, spec)
	for i, text := range spec.ExternalIPs {
		r.addr(path.Child("externalIPs").Index(i), text)
	}
	r.prefixes(path.Child("loadBalancerSourceRanges"), spec.LoadBalancerSourceRanges)
	oneOf(r, path.Child("externalTrafficPolicy"), spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	oneOf(r, path.Child("internalTrafficPolicy"), ptr.Deref(spec.InternalTrafficPolicy, ""), corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	oneOf(r, path.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		const most = 24 * 60 * 60
		if seconds := *c.ClientIP.TimeoutSeconds; seconds <= 0 || seconds > most {
			r.add(path.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), seconds, "must be from 1 to 86400")
		}
	}
	r.port(path.Child("healthCheckNodePort"), spec.HealthCheckNodePort, true)
	ingress := field.NewPath("status", "loadBalancer", "ingress")
	for i, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			r.addr(ingress.Index(i).Child("ip"), in.IP)
		}
		oneOf(r, ingress.Index(i).Child("ipMode"), ptr.Deref(in.IPMode, ""), corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
	}
}

func (r *refuser) servicePorts(path *field.Path, ports []corev1.ServicePort) {
	type numbered struct {
		number   int32
		protocol corev1.Protocol
	}
	names, numbers, nodePorts := map[string]bool{}, map[numbered]bool{}, map[numbered]bool{}
	for i := range ports {
		p, at := &ports[i], path.Index(i)
		protocol := p.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		oneOf(r, at.Child("protocol"), protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		r.port(at.Child("port"), p.Port, false)
		r.port(at.Child("nodePort"), p.NodePort, true)
		switch {
		case p.Name == "" && len(ports) > 1:
			r.list = append(r.list, field.Required(at.Child("name"), "each of several ports needs one"))
		case p.Name != "":
			r.words(at.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))
			if names[p.Name] {
				r.list = append(r.list, field.Duplicate(at.Child("name"), p.Name))
			}
		}
		key, nodeKey := numbered{p.Port, protocol}, numbered{p.NodePort, protocol}
		if numbers[key] {
			r.list = append(r.list, field.Duplicate(at.Child("port"), p.Port))
		}
		if p.NodePort != 0 && nodePorts[nodeKey] {
			r.list = append(r.list, field.Duplicate(at.Child("nodePort"), p.NodePort))
		}
		names[p.Name], numbers[key], nodePorts[nodeKey] = true, true, true
		switch target := p.TargetPort; {
		case target.Type == intstr.Int && target.IntVal != 0:
			r.port(at.Child("targetPort"), target.IntVal, false)
		case target.Type == intstr.String:
			r.words(at.Child("targetPort"), target.StrVal, validation.IsValidPortName(target.StrVal))
		}
	}
}

func (r *refuser) clusterIPs(path *field.Path, spec *corev1.ServiceSpec) {
	if spec.ClusterIP != "" && spec.ClusterIP != corev1.ClusterIPNone {
		r.addr(path.Child("clusterIP"), spec.ClusterIP)
	}
	if len(spec.ClusterIPs) > 0 && spec.ClusterIP != "" && spec.ClusterIPs[0] != spec.ClusterIP {
		r.add(path.Child("clusterIPs"), spec.ClusterIPs, "the first one must be spec.clusterIP")
	}
	var families []bool
	for i, text := range spec.ClusterIPs {
		if text == corev1.ClusterIPNone {
			continue
		}
		// spec.clusterIP has been checked already.
		addr, err := lb.ParseAddr(text)
		switch {
		case err != nil && text != spec.ClusterIP:
			r.addr(path.Child("clusterIPs").Index(i), text)
		case err == nil && slices.Contains(families, addr.Is4()):
			r.add(path.Child("clusterIPs"), spec.ClusterIPs, "may have one address of each family")
		case err == nil:
			families = append(families, addr.Is4())
		}
	}
	for i, family := range spec.IPFamilies {
		oneOf(r, path.Child("ipFamilies").Index(i), family, corev1.IPv4Protocol, corev1.IPv6Protocol)
	}
}

func (r *refuser) slice(slice *discoveryv1.EndpointSlice) {
	oneOf(r, field.NewPath("addressType"), slice.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	if slice.AddressType == "" {
		r.list = append(r.list, field.Required(field.NewPath("addressType"), ""))
	}
	names := map[string]bool{}
	for i, port := range slice.Ports {
		at := field.NewPath("ports").Index(i)
		oneOf(r, at.Child("protocol"), ptr.Deref(port.Protocol, ""), corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		if port.Port != nil {
			r.port(at.Child("port"), *port.Port, false)
		}
		name := ptr.Deref(port.Name, "")
		if name != "" {
			r.words(at.Child("name"), name, validation.IsDNS1123Label(name))
		}
		if names[name] {
			r.list = append(r.list, field.Duplicate(at.Child("name"), name))
		}
		names[name] = true
	}
	if slice.AddressType == discoveryv1.AddressTypeFQDN {
		return
	}
	for i, endpoint := range slice.Endpoints {
		addresses := field.NewPath("endpoints").Index(i).Child("addresses")
		if len(endpoint.Addresses) == 0 {
			r.list = append(r.list, field.Required(addresses, ""))
		}
		for n, text := range endpoint.Addresses {
			addr := r.addr(addresses.Index(n), text)
			if addr.IsValid() && addr.Is4() != (slice.AddressType == discoveryv1.AddressTypeIPv4) {
				r.add(addresses.Index(n), text, "is of another family than addressType")
			}
		}
	}
}
