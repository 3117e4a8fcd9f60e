package differential

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// objects are what is to be in the API server, by name. They are never changed,
// only replaced.
type objects struct {
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	zone     string // of node-1
}

func (o objects) clone() objects {
	return objects{services: maps.Clone(o.services), slices: maps.Clone(o.slices), zone: o.zone}
}

// slicesOf are those of a Service, by name.
func (o objects) slicesOf(service string) []*discoveryv1.EndpointSlice {
	var all []*discoveryv1.EndpointSlice
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		if o.slices[name].Labels[discoveryv1.LabelServiceName] == service {
			all = append(all, o.slices[name])
		}
	}

	return all
}

// isLocal reports whether an endpoint of a Service is on node-1. One without a node is not,
// wherever it is. One that is not terminating replaces one that is.
func (o objects) isLocal(service string, at netip.AddrPort) bool {
	local := false
	for _, slice := range o.slicesOf(service) {
		for _, e := range slice.Endpoints {
			if e.Addresses[0] != at.Addr().String() {
				continue
			}
			local = e.NodeName != nil && *e.NodeName == firstNode
			if e.Conditions.Terminating == nil || !*e.Conditions.Terminating {
				return local
			}
		}
	}

	return local
}

// remove removes a Service, and its slices.
func (o objects) remove(service string) {
	delete(o.services, service)
	for _, slice := range o.slicesOf(service) {
		delete(o.slices, slice.Name)
	}
}

// A Service that remembers its clients has a twin that does not: equal but for
// names and numbers. The twin shows which backends may answer, the Service that always the
// same one does.
const twinSuffix = "-twin"

// isSticky reports whether a Service has affinity.
func isSticky(svc *corev1.Service) bool {
	return svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
}

// put adds or replaces a Service with its slices, and with its twin if it has
// one.
func (o objects) put(svc *corev1.Service, all []*discoveryv1.EndpointSlice) {
	o.remove(svc.Name)
	o.remove(svc.Name + twinSuffix)
	o.putOne(svc, all)
	if isSticky(svc) {
		o.putOne(twinOf(svc), all)
	}
}

func (o objects) putOne(svc *corev1.Service, all []*discoveryv1.EndpointSlice) {
	o.services[svc.Name] = svc
	for i, slice := range all {
		slice = slice.DeepCopy()
		slice.Name = fmt.Sprintf("%s-%d", svc.Name, i)
		metav1.SetMetaDataLabel(&slice.ObjectMeta, discoveryv1.LabelServiceName, svc.Name)
		o.slices[slice.Name] = slice
	}
}

// twinDistance is what a twin's ports have more.
const twinDistance = 500

func twinOf(svc *corev1.Service) *corev1.Service {
	twin := svc.DeepCopy()
	twin.Name += twinSuffix
	twin.Spec.SessionAffinity, twin.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
	for i, ip := range twin.Spec.ClusterIPs {
		twin.Spec.ClusterIPs[i] = twinIP(ip)
	}
	if len(twin.Spec.ClusterIPs) > 0 {
		twin.Spec.ClusterIP = twin.Spec.ClusterIPs[0]
	}
	for i := range twin.Spec.Ports {
		port := &twin.Spec.Ports[i]
		port.Port += twinDistance
		if port.NodePort != 0 {
			port.NodePort += twinDistance
		}
	}
	if twin.Spec.HealthCheckNodePort != 0 {
		twin.Spec.HealthCheckNodePort += twinDistance
	}

	return twin
}
