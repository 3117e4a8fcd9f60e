package kube

import (
	"cmp"
	"fmt"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// kind is a kind of objects that this package reads.
type kind uint8

const (
	kindService kind = iota
	kindSlice
	kindNode
	kindServiceCIDR
)

var kindText = [...]string{"Service", "EndpointSlice", "Node", "ServiceCIDR"}

// key identifies an object.
type key struct {
	kind      kind
	namespace string
	name      string
}

// String is how problems name the object.
func (k key) String() string {
	if k.namespace == "" {
		return kindText[k.kind] + " " + k.name
	}
	return kindText[k.kind] + " " + k.namespace + "/" + k.name
}

func (k key) compare(other key) int {
	return cmp.Or(
		cmp.Compare(k.kind, other.kind),
		strings.Compare(k.namespace, other.namespace),
		strings.Compare(k.name, other.name),
	)
}

func keyOf(k kind, meta *metav1.ObjectMeta) key {
	// Namespaces are few: names share their memory.
	return key{kind: k, namespace: unique.Make(meta.Namespace).Value(), name: meta.Name}
}

// object is what remains of a Kubernetes object once it is read.
type object struct {
	key key

	// value is a lb.Service, Slice, Node or []netip.Prefix, as key.kind says;
	// nil if the object is to be ignored, and problems say why.
	value    any
	problems []lb.Problem
}

// translate reads a Kubernetes object. It keeps no part of it but strings.
func translate(obj any) *object {
	o := &object{}
	switch obj := obj.(type) {
	case *corev1.Service:
		o.key = keyOf(kindService, &obj.ObjectMeta)
		o.value, o.problems = translateService(obj)
	case *discoveryv1.EndpointSlice:
		o.key = keyOf(kindSlice, &obj.ObjectMeta)
		slice, problems, counts := translateSlice(obj)
		o.problems = problems
		if counts {
			o.value = slice
		}
	case *corev1.Node:
		o.key = keyOf(kindNode, &obj.ObjectMeta)
		o.value, o.problems = translateNode(obj)
	case *networkingv1.ServiceCIDR:
		o.key = keyOf(kindServiceCIDR, &obj.ObjectMeta)
		o.value, o.problems = translateServiceCIDR(obj)
	default:
		panic(fmt.Sprintf("kube: nobody asks for a %T", obj))
	}
	return o
}

// parser reads the fields of one object, and collects what is wrong with them.
type parser struct {
	object   key
	problems []lb.Problem
}

func (p *parser) add(field, format string, args ...any) {
	p.problems = append(p.problems, lb.Problem{
		Object:  p.object.String(),
		Field:   field,
		Message: fmt.Sprintf(format, args...),
	})
}
