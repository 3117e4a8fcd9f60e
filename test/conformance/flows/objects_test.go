package flows

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// resources are the Kubernetes objects of a scenario, by the word for them in
// a request's path.
func (s *scenario) resources() map[string][]any {
	all := map[string][]any{
		"nodes":          {s.Node.object()},
		"servicecidrs":   {},
		"services":       {},
		"endpointslices": {},
	}
	if len(s.Node.ServiceCIDRs) > 0 {
		all["servicecidrs"] = append(all["servicecidrs"], &networkingv1.ServiceCIDR{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
			ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: s.Node.ServiceCIDRs},
		})
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
	obj := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
	}
	if n.Zone != nil {
		obj.Labels = map[string]string{corev1.LabelTopologyZone: *n.Zone}
	}
	if n.PrimaryIP.IsValid() {
		obj.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.PrimaryIP.String()}}
	}

	return obj
}

func (s *service) object() *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name},
		Spec:       s.ServiceSpec,
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: s.LoadBalancerIngress}},
	}
}

func (s *slice) object() *discoveryv1.EndpointSlice {
	namespace, name, _ := strings.Cut(s.Service, "/")
	obj := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cmp.Or(namespace, metav1.NamespaceDefault),
			Name:      s.Name,
			Labels:    map[string]string{discoveryv1.LabelServiceName: name},
		},
		AddressType: s.AddressType,
		Ports:       s.Ports,
	}
	for i := range s.Endpoints {
		obj.Endpoints = append(obj.Endpoints, s.Endpoints[i].object())
	}

	return obj
}

func (e *endpoint) object() discoveryv1.Endpoint {
	obj := discoveryv1.Endpoint{
		Addresses:  e.Addresses,
		Conditions: e.EndpointConditions,
		NodeName:   e.NodeName,
		Zone:       e.Zone,
		Hostname:   e.Hostname,
	}
	if len(e.ForZones)+len(e.ForNodes) > 0 {
		obj.Hints = &discoveryv1.EndpointHints{}
	}
	for _, zone := range e.ForZones {
		obj.Hints.ForZones = append(obj.Hints.ForZones, discoveryv1.ForZone{Name: zone})
	}
	for _, name := range e.ForNodes {
		obj.Hints.ForNodes = append(obj.Hints.ForNodes, discoveryv1.ForNode{Name: name})
	}

	return obj
}

// mustManifests writes the objects of a scenario into a folder of its own.
func mustManifests(t *testing.T, s *scenario) string {
	t.Helper()
	var text bytes.Buffer
	for resource, objects := range s.resources() {
		for _, obj := range objects {
			doc, err := yaml.Marshal(obj)
			if err != nil {
				t.Fatalf("%s of %s: %v", resource, s.Name, err)
			}
			fmt.Fprintf(&text, "---\n%s", doc)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "scenario.yaml"), text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}

	return dir
}

// completedByManifests reports whether objects of the scenario would not arrive as
// written: what reads manifests names a port that has no name, as an API server
// does before it stores one. One that was stored earlier has none.
func (s *scenario) completedByManifests() bool {
	return slices.ContainsFunc(s.EndpointSlices, func(s slice) bool {
		return slices.ContainsFunc(s.Ports, func(p discoveryv1.EndpointPort) bool { return p.Name == nil })
	})
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
