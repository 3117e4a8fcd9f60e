package kube

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// labelServiceProxyName marks a Service as one of another proxy, with any value.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// The select functions set the selectors of requests, which are exactly those of
// kube-proxy. A watch reports an object that stops matching as deleted.

func selectServices(options *metav1.ListOptions) {
	options.LabelSelector = "!" + labelServiceProxyName
	options.FieldSelector = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String()
}

func selectSlices(options *metav1.ListOptions) {
	options.LabelSelector = "!" + corev1.IsHeadlessService
}

func selectNode(name string) func(*metav1.ListOptions) {
	return func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}

func selectAll(*metav1.ListOptions) {}

// selected reports whether the selectors match an object, for objects that do not come
// from an API server.
func selected(obj any, nodeName string) bool {
	switch obj := obj.(type) {
	case *corev1.Service:
		_, optedOut := obj.Labels[labelServiceProxyName]
		return !optedOut && obj.Spec.ClusterIP != corev1.ClusterIPNone
	case *discoveryv1.EndpointSlice:
		_, headless := obj.Labels[corev1.IsHeadlessService]
		return !headless
	case *corev1.Node:
		return obj.Name == nodeName
	}
	return true
}
