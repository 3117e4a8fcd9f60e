package kube

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// SocketKey is the annotation of a Service or a Pod, or the label of a Namespace, that
// decides whether sockets of pods are translated: "on" or "off". With "off" they are left
// alone, and devices translate their packets. An annotation of a Pod overrides the label of
// its Namespace.
const SocketKey = "sluice-lb.io/socket"

// SocketChoice is the value of [SocketKey].
type SocketChoice uint8

// The choices.
const (
	SocketUndecided SocketChoice = iota // no key, or another value, which is a problem
	SocketOn
	SocketOff
)

// Pod is a Pod of this node. One that was deleted has its names and nothing else.
type Pod struct {
	Namespace, Name string
	UID             string
	Socket          SocketChoice
}

// Namespace is a Namespace that has the label [SocketKey]. One that was deleted, or has lost
// the label, has its name and nothing else.
type Namespace struct {
	Name   string
	Socket SocketChoice
}

// socket reads the value of [SocketKey] in a field, "metadata.annotations" or "metadata.labels".
func (p *parser) socket(field string, values map[string]string) SocketChoice {
	text, ok := values[SocketKey]
	switch {
	case !ok:
		return SocketUndecided
	case text == "on":
		return SocketOn
	case text == "off":
		return SocketOff
	}
	p.add(field+"["+SocketKey+"]", "%q is neither on nor off, so it is as if there were none", text)
	return SocketUndecided
}

// translatePod reads a Pod. Devices translate nothing that is sent in the network namespace
// of the node, so a Pod there cannot opt out.
func translatePod(obj *corev1.Pod) (Pod, []lb.Problem) {
	p := &parser{object: keyOf(kindPod, &obj.ObjectMeta)}
	pod := Pod{Namespace: p.object.namespace, Name: p.object.name, UID: string(obj.UID), Socket: p.socket("metadata.annotations", obj.Annotations)}
	p.unknownKeys(&obj.ObjectMeta, SocketKey)
	const field = "metadata.annotations[" + SocketKey + "]"
	_, static := obj.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case obj.Spec.HostNetwork && pod.Socket == SocketOff:
		p.add(field, "the Pod has the network of the node, whose sockets are always translated")
	case static && pod.Socket == SocketOff:
		p.add(field, "a static Pod cannot opt out, because the API server does not have the UID by which the kubelet knows it")
	}
	if obj.Spec.HostNetwork || static {
		pod.Socket = SocketOn
	}
	return pod, p.problems
}

// translateNamespace reads a Namespace.
func translateNamespace(obj *corev1.Namespace) (Namespace, []lb.Problem) {
	p := &parser{object: keyOf(kindNamespace, &obj.ObjectMeta)}
	p.unknownKeys(&obj.ObjectMeta, SocketKey)
	return Namespace{Name: obj.Name, Socket: p.socket("metadata.labels", obj.Labels)}, p.problems
}

// selectPods selects the Pods of a node that may have processes.
func selectPods(nodeName string) func(*metav1.ListOptions) {
	return func(options *metav1.ListOptions) {
		options.FieldSelector = fields.AndSelectors(
			fields.OneTermEqualSelector("spec.nodeName", nodeName),
			fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
			fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
		).String()
	}
}

// OptOuts are the Pods of this node, and the Namespaces that have a say in whether their sockets are left alone. One
// goroutine may use them.
type OptOuts struct {
	enabled    bool // or else none opts out: manifests may have Pods nevertheless
	pods       map[types.NamespacedName]Pod
	namespaces map[string]SocketChoice
	changed    bool
	// awaited is set until all Pods and Namespaces were received. What an earlier agent
	// programmed stays until then.
	awaited bool
}

// NewOptOuts returns none. Unless it is enabled, it stays so.
func NewOptOuts(enabled bool) *OptOuts {
	return &OptOuts{
		enabled: enabled, pods: map[types.NamespacedName]Pod{}, namespaces: map[string]SocketChoice{}, changed: true, awaited: enabled,
	}
}

// SetPod adds, replaces or, if it has no UID, removes a Pod.
func (o *OptOuts) SetPod(pod Pod) {
	name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	o.changed = o.changed || o.pods[name] != pod
	o.pods[name] = pod
	if pod.UID == "" {
		delete(o.pods, name)
	}
}

// SetNamespace adds or replaces a Namespace. One that is undecided counts as none.
func (o *OptOuts) SetNamespace(namespace Namespace) {
	o.changed = o.changed || o.namespaces[namespace.Name] != namespace.Socket
	o.namespaces[namespace.Name] = namespace.Socket
	if namespace.Socket == SocketUndecided {
		delete(o.namespaces, namespace.Name)
	}
}

// Received ends the wait for Pods and Namespaces.
func (o *OptOuts) Received() { o.awaited = false }

// List returns the Pods that have opted out, sorted by name.
func (o *OptOuts) List() []Pod {
	if !o.enabled {
		return nil
	}
	var out []Pod
	for _, pod := range o.pods {
		choice := pod.Socket
		if choice == SocketUndecided {
			choice = o.namespaces[pod.Namespace]
		}
		if choice == SocketOff {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b Pod) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})

	return out
}

// Changed returns the UIDs of the Pods that have opted out, and false unless they are known and may have changed since
// the last call.
func (o *OptOuts) Changed() (uids []string, ok bool) {
	if !o.changed || o.awaited {
		return nil, false
	}
	o.changed = false
	for _, pod := range o.List() {
		uids = append(uids, pod.UID)
	}

	return uids, true
}
