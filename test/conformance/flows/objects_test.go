package flows

import (
	"cmp"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/test/object"
)

// resources are the Kubernetes objects of a scenario, by the word for them in
// a request's path.
func (s *scenario) resources() map[string][]runtime.Object {
	all := map[string][]runtime.Object{
		"nodes":          {s.Node.object()},
		"servicecidrs":   {},
		"services":       {},
		"endpointslices": {},
	}
	if len(s.Node.ServiceCIDRs) > 0 {
		all["servicecidrs"] = append(all["servicecidrs"], object.ServiceCIDR("kubernetes", s.Node.ServiceCIDRs...))
	}
	for i := range s.Services {
		all["services"] = append(all["services"], s.Services[i].object())
	}
	for i := range s.EndpointSlices {
		all["endpointslices"] = append(all["endpointslices"], s.EndpointSlices[i].object())
	}

	return all
}

func (n *node) object() *corev1.Node {
	obj := object.Node[netip.Addr](n.Name)
	if n.Zone != nil {
		obj.Labels = map[string]string{corev1.LabelTopologyZone: *n.Zone}
	}
	if n.PrimaryIP.IsValid() {
		obj.Status.Addresses = object.InternalIPs(n.PrimaryIP)
	}

	return obj
}

func (s *service) object() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name},
		Spec:       s.ServiceSpec,
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: s.LoadBalancerIngress}},
	}
}

func (s *slice) object() *discoveryv1.EndpointSlice {
	namespace, name, _ := strings.Cut(s.Service, "/")
	obj := object.Slice(cmp.Or(namespace, metav1.NamespaceDefault), s.Name, name, s.AddressType, s.Ports...)
	for i := range s.Endpoints {
		obj.Endpoints = append(obj.Endpoints, s.Endpoints[i].object())
	}

	return obj
}

func (e *endpoint) object() discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses:  e.Addresses,
		Conditions: e.EndpointConditions,
		NodeName:   e.NodeName,
		Zone:       e.Zone,
		Hostname:   e.Hostname,
		Hints:      object.Hints(e.ForZones, e.ForNodes),
	}
}

// flags are those of the agent. To a scenario no list of
// addresses means every one, to the agent the node IPs.
func (n *node) flags() []string {
	addresses := "0.0.0.0/0,::/0"
	if len(n.NodePortAddresses) > 0 {
		addresses = strings.Join(n.NodePortAddresses, ",")
	}
	flags := []string{"--nodeport-addresses", addresses}
	if n.LocalCIDR.IsValid() {
		flags = append(flags, "--cluster-cidr", n.LocalCIDR.String())
	}
	if n.MasqueradeAll {
		flags = append(flags, "--masquerade-all")
	}

	return flags
}
