package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// reference returns the reference of an Event to a Service or, without a name, to the Node.
// It returns false if the Service is gone. It sends requests until one is answered, and
// lists objects, because the RBAC rules of kube-proxy grant that and not to get them.
func (r *Recorder) reference(ctx context.Context, service lb.ServiceName) (*corev1.ObjectReference, bool) {
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: service.Namespace, Name: service.Name}
	isNode := service == lb.ServiceName{}
	if isNode {
		about.Kind, about.Name = "Node", r.cfg.NodeName
		about.UID = types.UID(about.Name) // the kubelet uses the name, too, as long as there is no Node
	}
	for ; ; sleep(ctx, r.cfg.lookupRetry) {
		uid, err := r.uid(ctx, about)
		switch {
		case err == nil && uid != "":
			about.UID = uid

			return about, true
		case err == nil:
			return about, isNode
		case ctx.Err() != nil:
			return nil, false
		case refused(err):
			return about, true // an Event without a UID is better than none
		}
	}
}

// uid returns the UID of an object, or an empty one if there is no such object.
func (r *Recorder) uid(ctx context.Context, about *corev1.ObjectReference) (types.UID, error) {
	var options metav1.ListOptions
	selectNode(about.Name)(&options)
	if about.Kind == "Node" {
		nodes, err := r.cfg.Client.CoreV1().Nodes().List(ctx, options)
		if err != nil || len(nodes.Items) == 0 {
			return "", err
		}

		return nodes.Items[0].UID, nil
	}
	services, err := r.cfg.Client.CoreV1().Services(about.Namespace).List(ctx, options)
	if err != nil || len(services.Items) == 0 {
		return "", err
	}

	return services.Items[0].UID, nil
}
