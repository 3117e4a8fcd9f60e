package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// head is the fields that every object and every List has.
type head struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// title is how problems name the object, which may be of any kind.
func (h *head) title() string {
	if h.Metadata.Namespace == "" {
		return strings.TrimSpace(h.Kind + " " + h.Metadata.Name)
	}
	return h.Kind + " " + h.Metadata.Namespace + "/" + h.Metadata.Name
}

func (h *head) isList() bool {
	return h.Kind == "List" && h.APIVersion == "v1"
}

// newObject returns an empty object of h's kind, or nil if this package does not read
// that kind, and the key of the object with the default namespace filled in.
func (h *head) newObject() (runtime.Object, key) {
	k := key{namespace: h.Metadata.Namespace, name: h.Metadata.Name}
	if k.namespace == "" {
		k.namespace = metav1.NamespaceDefault
	}
	switch h.APIVersion + " " + h.Kind {
	case "v1 Service":
		k.kind = kindService
		return &corev1.Service{}, k
	case "discovery.k8s.io/v1 EndpointSlice":
		k.kind = kindSlice
		return &discoveryv1.EndpointSlice{}, k
	case "v1 Node":
		k.kind, k.namespace = kindNode, ""
		return &corev1.Node{}, k
	case "networking.k8s.io/v1 ServiceCIDR":
		k.kind, k.namespace = kindServiceCIDR, ""
		return &networkingv1.ServiceCIDR{}, k
	}
	return nil, k
}

// strictly decodes JSON as an API server does with strict field validation: names are case
// sensitive, and unknown and duplicate ones are errors.
var strictly = jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
	jsonserializer.SerializerOptions{Strict: true})

// mistake is a field that strict decoding does not accept, and why.
type mistake struct {
	field   string
	message string
}

// decodeStrict decodes a document into obj. If it returns mistakes, obj must not be used.
func decodeStrict(doc []byte, obj runtime.Object) []mistake {
	_, _, err := strictly.Decode(doc, nil, obj)
	if err == nil {
		return nil
	}
	errs := []error{err}
	if strict, ok := runtime.AsStrictDecodingError(err); ok {
		errs = strict.Errors()
	}
	var wrong []mistake
	for _, err := range errs {
		wrong = append(wrong, mistakeOf(err))
	}
	return wrong
}

func mistakeOf(err error) mistake {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return mistake{wrongType.Field, "cannot be a " + wrongType.Value}
	}
	// For example: unknown field "spec.prots"
	message, quoted, found := strings.Cut(err.Error(), ` "`)
	field, _, closed := strings.Cut(quoted, `"`)
	if !found || !closed {
		return mistake{"content", err.Error()}
	}
	return mistake{field, message}
}

// complete sets the defaults that an API server would set, where they change the meaning
// of the object. It cannot allocate addresses and ports as an API server does: it returns
// a problem for each that is missing.
func complete(obj runtime.Object, k key) []lb.Problem {
	p := &parser{object: k}
	switch obj := obj.(type) {
	case *corev1.Service:
		obj.Namespace = k.namespace
		p.completeService(&obj.Spec)
	case *discoveryv1.EndpointSlice:
		obj.Namespace = k.namespace
		for i := range obj.Ports {
			// To an API server, an empty name is the same as none.
			obj.Ports[i].Name = ptr.To(ptr.Deref(obj.Ports[i].Name, ""))
		}
	case *corev1.Node:
		obj.Namespace = ""
	case *networkingv1.ServiceCIDR:
		obj.Namespace = ""
	}
	return p.problems
}

func (p *parser) completeService(spec *corev1.ServiceSpec) {
	if spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if len(spec.IPFamilies) == 0 && spec.ClusterIP != corev1.ClusterIPNone {
		spec.IPFamilies = familiesOf(spec.ClusterIPs)
	}
	if spec.ClusterIP == "" {
		p.add("spec.clusterIP", "missing, and none is allocated for a manifest: the Service has no frontends")
	}
	if spec.Type == corev1.ServiceTypeNodePort {
		for i := range spec.Ports {
			if spec.Ports[i].NodePort == 0 {
				p.add(fmt.Sprintf("spec.ports[%d].nodePort", i), "missing, and none is allocated for a manifest")
			}
		}
	}
}

// familiesOf returns the families of addresses, or nil if one cannot be parsed.
func familiesOf(clusterIPs []string) []corev1.IPFamily {
	var families []corev1.IPFamily
	for _, text := range clusterIPs {
		addr, err := lb.ParseAddr(text)
		switch {
		case err != nil:
			return nil
		case addr.Is4():
			families = append(families, corev1.IPv4Protocol)
		default:
			families = append(families, corev1.IPv6Protocol)
		}
	}
	return families
}
