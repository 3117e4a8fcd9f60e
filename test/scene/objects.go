package scene

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// Objects writes into one namespace what users, controllers and kubelets would. All
// of it is deleted when the test ends.
type Objects struct {
	Client    kubernetes.Interface
	Namespace string

	stage *Stage
}

// mustObjects makes a namespace that is called after the test.
func mustObjects(t testing.TB, stage *Stage) *Objects {
	t.Helper()
	o := &Objects{Client: MustClient(t), Namespace: namespaceOf(t), stage: stage}
	t.Cleanup(func() {
		if err := o.clear(); err != nil {
			t.Errorf("objects of the test: %v", err)
		}
	})
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.Namespace}}
	_, err := o.Client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) { // go test -count 2
		t.Fatal(err)
	}

	return o
}

// clear removes what is in the namespace. Deleting the namespace would not: there are
// no controllers.
func (o *Objects) clear() error {
	ctx, cancel := context.WithTimeout(context.Background(), lab.Timeout)
	defer cancel()
	now := metav1.DeleteOptions{}
	errs := []error{o.Client.DiscoveryV1().EndpointSlices(o.Namespace).DeleteCollection(ctx, now, metav1.ListOptions{})}
	services, err := o.Client.CoreV1().Services(o.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, svc := range services.Items {
		errs = append(errs, o.Client.CoreV1().Services(o.Namespace).Delete(ctx, svc.Name, now))
	}

	return errors.Join(errs...)
}

// mustCreateNodes creates the Node objects of the stage. The addresses are the first
// node's, nil for both that it has.
func (s *Stage) mustCreateNodes(t testing.TB, addresses []netip.Addr) {
	t.Helper()
	for i, node := range s.Lab.Nodes {
		if i > 0 || addresses == nil {
			addresses = []netip.Addr{node.IPv4, node.IPv6}
		}
		s.createNode(t, node, addresses...)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := MustClient(t).CoreV1().Nodes().Delete(ctx, s.NodeName(node), metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// CreateNode creates the Node object of a node again, after it was deleted.
func (s *Stage) CreateNode(t testing.TB, node *lab.Node) {
	t.Helper()
	s.createNode(t, node, node.IPv4, node.IPv6)
}

func (s *Stage) createNode(t testing.TB, node *lab.Node, addresses ...netip.Addr) {
	t.Helper()
	_, err := MustClient(t).CoreV1().Nodes().Create(t.Context(), object.Node(s.NodeName(node), addresses...), metav1.CreateOptions{})
	lab.Must(t, err)
}

// LabelNode gives a node a label, or changes it; "" takes it away.
func (o *Objects) LabelNode(t testing.TB, node *lab.Node, key, value string) {
	t.Helper()
	nodes := o.Client.CoreV1().Nodes()
	lab.Must(t, retry.RetryOnConflict(retry.DefaultRetry, func() error {
		object, err := nodes.Get(t.Context(), o.stage.NodeName(node), metav1.GetOptions{})
		if err != nil {
			return err
		}
		if metav1.SetMetaDataLabel(&object.ObjectMeta, key, value); value == "" {
			delete(object.Labels, key)
		}
		_, err = nodes.Update(t.Context(), object, metav1.UpdateOptions{})

		return err
	}))
}

var virtualAddresses atomic.Int32

// VirtualIPs returns an address of each family for a load balancer, or an external
// IP, which the machine outside sends to node-1. No test that runs at the same time
// uses them: they are used again after 254 calls.
func VirtualIPs() (v4, v6 string) {
	n := 1 + virtualAddresses.Add(1)%254

	return fmt.Sprintf("203.0.113.%d", n), fmt.Sprintf("2001:db8:113::%x", n)
}

// MustClient returns a client of the API server that all tests share, as
// cluster-admin.
func MustClient(t testing.TB) kubernetes.Interface {
	t.Helper()
	cfg := cluster.Shared(t).Config()
	cfg.WarningHandler = rest.NoWarnings{} // externalIPs are deprecated
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}

	return client
}
