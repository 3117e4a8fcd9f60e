package e2e

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/sluice-lb/sluice/test/lab"
)

// api writes what people, controllers and kubelets would, into one namespace.
// All of it goes with the test.
type api struct {
	client    kubernetes.Interface
	namespace string
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// mustAPI makes a namespace that is called after the test, and the Nodes.
func mustAPI(t testing.TB, client kubernetes.Interface, nodes []*lab.Node) *api {
	t.Helper()
	a := &api{client: client, namespace: notInNames.ReplaceAllString(strings.ToLower(t.Name()), "-")}
	t.Cleanup(func() {
		if err := a.clear(nodes); err != nil {
			t.Errorf("objects of the test: %v", err)
		}
	})
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: a.namespace}}
	_, err := client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) { // go test -count 2
		t.Fatal(err)
	}
	for _, node := range nodes {
		a.createNode(t, node)
	}

	return a
}

// clear removes what is in the namespace. Deleting the namespace would not:
// there are no controllers.
func (a *api) clear(nodes []*lab.Node) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	now := metav1.DeleteOptions{}
	errs := []error{a.client.DiscoveryV1().EndpointSlices(a.namespace).DeleteCollection(ctx, now, metav1.ListOptions{})}
	services, err := a.client.CoreV1().Services(a.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, svc := range services.Items {
		errs = append(errs, a.client.CoreV1().Services(a.namespace).Delete(ctx, svc.Name, now))
	}
	for _, node := range nodes {
		errs = append(errs, a.client.CoreV1().Nodes().Delete(ctx, a.nodeName(node), now))
	}

	return errors.Join(errs...)
}

// nodeName is how the API server calls a node of the lab.
func (a *api) nodeName(node *lab.Node) string { return a.namespace + "-" + node.Name }

func (a *api) createNode(t testing.TB, node *lab.Node) {
	t.Helper()
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: a.nodeName(node)},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: node.IPv4.String()},
			{Type: corev1.NodeInternalIP, Address: node.IPv6.String()},
		}},
	}
	if _, err := a.client.CoreV1().Nodes().Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// labelNode gives a node a label, or changes it.
func (a *api) labelNode(t testing.TB, node *lab.Node, key, value string) {
	t.Helper()
	nodes := a.client.CoreV1().Nodes()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		object, err := nodes.Get(t.Context(), a.nodeName(node), metav1.GetOptions{})
		if err != nil {
			return err
		}
		metav1.SetMetaDataLabel(&object.ObjectMeta, key, value)
		_, err = nodes.Update(t.Context(), object, metav1.UpdateOptions{})

		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
