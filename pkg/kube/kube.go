// Package kube translates Kubernetes objects to the types of package lb: it follows
// Services, EndpointSlices, this node's Node and ServiceCIDRs, either of an API server
// ([Watcher]) or of a directory of manifests ([Manifests]), and reports them to a [Sink].
//
// A Watcher (watch.go) has a client-go Reflector for each kind of object. The Reflector fills a store
// (tracker.go), which has each object translated (here, service.go, slice.go, node.go) and
// passes it to a tracker. That reports it to the Sink, and knows which objects have been
// deleted during an outage. A Dialer (dialer.go) makes the connections of the watches, and knows when they were heard
// from. Manifests (manifests.go, decode.go) are translated and tracked in the same way. A
// [Recorder] (events.go) sends Events in the opposite direction.
//
// The package parses and makes no decisions: package lb decides which Services count and which
// frontends they have. It keeps only the names of the objects that it has reported. Parts
// that it cannot parse it leaves out, and reports a problem with object and field.
package kube

import (
	"cmp"
	"fmt"
	"net/netip"
	"runtime/debug"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Sink receives the objects of a cluster. Its methods are called from several goroutines,
// though never at the same time for the same object. All but Flush block the source while
// they run: a Sink should queue its work and return.
//
// A Set method is called with the whole object each time that it may have changed, and
// perhaps with one that is the same; the Sink owns the value. The problems are the parts
// of the object that had to be left out; they replace those of the last call and end with
// the object.
type Sink interface {
	SetService(lb.Service, []lb.Problem)
	DeleteService(lb.ServiceName)
	SetSlice(Slice, []lb.Problem)
	DeleteSlice(lb.SliceName)

	// SetNode is called for the node of the configured name only. A node that was deleted
	// has a name and nothing else.
	SetNode(Node, []lb.Problem)

	// SetServiceCIDRs sets the prefixes that ClusterIPs are allocated from: the union
	// of all ServiceCIDR objects, sorted, without duplicates.
	SetServiceCIDRs([]netip.Prefix, []lb.Problem)

	// SetPod and SetNamespace are called for what opts out, if [Config].PodOptOut is set or
	// manifests have it: the Pods of this node, and Namespaces with the label [SocketKey].
	SetPod(Pod, []lb.Problem)
	SetNamespace(Namespace, []lb.Problem)

	// SetDialed is called with each address at which the API server is about to be dialed.
	SetDialed(netip.AddrPort)

	// Report replaces the problems of a source that no Set method is called for: a file
	// or a directory of manifests (its path), a request to the API server ("services"),
	// an EndpointSlice that is ignored ("EndpointSlice ns/name"). Without problems, the
	// source is valid again, or gone. A Set or Delete method for the object ends its problems, too.
	Report(source string, problems []lb.Problem)

	// Unread is Report for an object of a Service that could not be read, for a mistake of ours, and that no Set method was
	// called for: whatever an earlier process made of the Service is to stay. The next Report with the same source, or a Set
	// or Delete method for the object, ends that.
	Unread(source string, service lb.ServiceName, problems []lb.Problem)

	// ReportGone is called when a list lacks at least half of the objects of a kind ("Service") that were known, and
	// they are not few. They are deleted all the same.
	ReportGone(kind string, gone, known int)

	// Flush is called after each list and each event: the Sink should process it now. Flush may be
	// called without a change.
	Flush()
}

// kind is a kind of object that this package reads.
type kind uint8

const (
	kindService kind = iota
	kindSlice
	kindNode
	kindServiceCIDR
	kindPod
	kindNamespace
)

var kindText = [...]string{"Service", "EndpointSlice", "Node", "ServiceCIDR", "Pod", "Namespace"}

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
	// Namespaces are few, so keys share the memory of their names.
	return key{kind: k, namespace: unique.Make(meta.Namespace).Value(), name: meta.Name}
}

// object is a Kubernetes object in the types of package lb.
type object struct {
	key key

	// value is a lb.Service, Slice, Node, []netip.Prefix, Pod or Namespace, according to
	// key.kind. It is nil if the object must be ignored, for the reasons in problems.
	value    any
	problems []lb.Problem

	// failed is the panic that reading the object ended with, empty if there was none,
	// and stack is its stack.
	failed string
	stack  []byte

	// service is the Service that the object is, or is a slice of. It is known although the object could not be read.
	service lb.ServiceName
}

// of sets the Service of an object.
func (o *object) of(namespace, name string) *object {
	o.service = lb.ServiceName{Namespace: namespace, Name: name}

	return o
}

// translate reads a Kubernetes object. The result shares nothing but strings with it.
func translate(obj any) *object {
	switch obj := obj.(type) {
	case *corev1.Service:
		return read(keyOf(kindService, &obj.ObjectMeta), func(o *object) {
			o.value, o.problems = translateService(obj)
		}).of(obj.Namespace, obj.Name)
	case *discoveryv1.EndpointSlice:
		return read(keyOf(kindSlice, &obj.ObjectMeta), func(o *object) {
			slice, problems, counts := translateSlice(o.key, obj)
			o.problems = problems
			if counts {
				o.value = slice
			}
		}).of(obj.Namespace, obj.Labels[discoveryv1.LabelServiceName])
	case *corev1.Node:
		return read(keyOf(kindNode, &obj.ObjectMeta), func(o *object) {
			o.value, o.problems = translateNode(obj)
		})
	case *networkingv1.ServiceCIDR:
		return read(keyOf(kindServiceCIDR, &obj.ObjectMeta), func(o *object) {
			o.value, o.problems = translateServiceCIDR(obj)
		})
	case *corev1.Pod:
		return read(keyOf(kindPod, &obj.ObjectMeta), func(o *object) {
			o.value, o.problems = translatePod(obj)
		})
	case *corev1.Namespace:
		return read(keyOf(kindNamespace, &obj.ObjectMeta), func(o *object) {
			o.value, o.problems = translateNamespace(obj)
		})
	}
	// No object of a cluster can cause this: the package requests no other types.
	panic(fmt.Sprintf("kube: %T is not a type that is requested", obj))
}

// read returns the object that parse fills in. It recovers from a panic, which is a defect
// of this package that one object shows, so that all other objects are still read.
func read(k key, parse func(*object)) (o *object) {
	defer func() {
		if why := recover(); why != nil {
			o = &object{key: k, failed: fmt.Sprintf("panic: %v", why), stack: debug.Stack()}
			o.problems = []lb.Problem{{Object: k.String(), Message: "internal error, so it stays as it was: " + o.failed}}
		}
	}()
	o = &object{key: k}
	parse(o)
	return o
}

// parser reads the fields of one object and collects their problems.
type parser struct {
	object   key
	problems []lb.Problem
}

// add adds a problem of a field, up to [lb.MaxProblems].
func (p *parser) add(field, format string, args ...any) {
	switch n := len(p.problems); {
	case n == lb.MaxProblems:
		p.problems = append(p.problems, lb.ThereAreMore(p.object.String()))
		return
	case n > lb.MaxProblems:
		return
	}
	p.problems = append(p.problems, lb.Problem{
		Object:  p.object.String(),
		Field:   field,
		Message: fmt.Sprintf(format, args...),
	})
}
