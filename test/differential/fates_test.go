package differential

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Names of differences in what changes do to connections.
const (
	endsStale     = "a UDP flow of a backend or frontend that is gone is ended"
	endsSocket    = "a UDP socket of a backend that is gone is ended"
	keepsUnserved = "a ready endpoint that does not serve keeps its UDP flows"
)

// fatesDiffer returns which listed difference explains the fates of a pair, or what is
// wrong with them.
func (c *comparison) fatesDiffer(l *lasting) (used, wrong string) {
	reference, candidate := l.fates[0], l.fates[1]
	if reference.kept && candidate.kept {
		return "", ""
	}
	// A proxy may apply every change by itself, or several at once. Mostly Sluice
	// applies every one.
	usable, now := true, c.objects.usable(l.service, l.to) && c.isThere(c.objects, l)
	for _, o := range c.way {
		usable = usable && o.usable(l.service, l.to) && c.isThere(o, l)
	}
	reason := ""
	switch {
	case l.frontend.protocol == "tcp":
	case reference.kept && !usable:
		reason = endsStale
	case candidate.kept && now && !usable:
		return "", "" // here kube-proxy did
	case candidate.kept && now:
		reason = keepsUnserved
	case candidate.ended && l.client.socket && !usable:
		reason = endsSocket
	case !reference.kept && !candidate.kept && !candidate.ended:
		return "", "" // comparing dials checks where they go now
	}
	if slices.ContainsFunc(c.listed, func(d difference) bool { return d.name == reason }) {
		return reason, ""
	}

	return "", fmt.Sprintf("\n\ta connection to %s is %s with kube-proxy, and %s with Sluice; it may be used: %t",
		l.to, reference, candidate, usable)
}

// isThere reports whether the frontend of a pair is one of its Service.
func (c *comparison) isThere(o objects, l *lasting) bool {
	svc := o.services[l.service]
	if svc == nil {
		return false
	}
	if _, other := svc.Labels["service.kubernetes.io/service-proxy-name"]; other {
		return false
	}
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		if ingress.IP == l.frontend.address.Addr().String() && *ingress.IPMode == corev1.LoadBalancerIPModeProxy {
			return false
		}
	}

	return slices.ContainsFunc(c.settings.frontendsOf(svc), func(f frontend) bool {
		return f.key() == l.frontend.key() && f.kind == l.frontend.kind
	})
}

// usable reports whether an endpoint of a Service is ready, or serves.
func (o objects) usable(service string, at netip.AddrPort) bool {
	svc := o.services[service]
	if svc == nil {
		return false
	}
	is := func(p *bool, unset bool) bool { return p == nil && unset || p != nil && *p }
	for _, slice := range o.slicesOf(service) {
		if _, headless := slice.Labels[corev1.IsHeadlessService]; headless {
			continue
		}
		port := slices.ContainsFunc(slice.Ports, func(p discoveryv1.EndpointPort) bool {
			return *p.Port == int32(at.Port()) && *p.Protocol == corev1.ProtocolUDP &&
				slices.ContainsFunc(svc.Spec.Ports, func(of corev1.ServicePort) bool { return of.Name == *p.Name && of.Protocol == *p.Protocol })
		})
		for _, e := range slice.Endpoints {
			if port && e.Addresses[0] == at.Addr().String() && (is(e.Conditions.Ready, true) || is(e.Conditions.Serving, true)) {
				return true
			}
		}
	}

	return false
}
