package scale

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

var real = flag.Bool("apiserver", false, "measure with a real API server too, which takes minutes to be filled")

// BenchmarkStart with a real API server, on the node's loopback device: what
// the agent then waits for is part of the result.
func BenchmarkStartFromAPIServer(b *testing.B) {
	if !*real {
		b.Skip("without -apiserver")
	}
	ns := lab.MustNew(b, lab.Config{Nodes: 1}).Nodes[0].Namespace
	var c *cluster.Cluster
	must(b, ns.Do(func() error {
		c = cluster.Start(b)

		return nil
	}))
	mustFill(b, c)
	n := mustNodeOf(b, ns, c.Kubeconfig())
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		must(b, n.Kill())
		b.StartTimer()
		n.mustStart(b)
		cpu += n.mustReadCPU(b)
	}
	b.StopTimer()
	n.report(b, cpu)
}

// mustFill creates all Services and slices.
func mustFill(b *testing.B, c *cluster.Cluster) {
	b.Helper()
	client, err := kubernetes.NewForConfig(c.Config())
	must(b, err)
	begin := time.Now()
	for team := range teams {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("team-%d", team)}}
		_, err := client.CoreV1().Namespaces().Create(b.Context(), namespace, metav1.CreateOptions{})
		must(b, err)
	}
	group, ctx := errgroup.WithContext(b.Context())
	group.SetLimit(16)
	for i := range serviceCount {
		group.Go(func() error { return create(ctx, client, i+1) })
	}
	must(b, group.Wait())
	b.Logf("the API server took %v for %d Services and slices", time.Since(begin), serviceCount)
}

// create creates Service i with its slice.
func create(ctx context.Context, client kubernetes.Interface, i int) error {
	svc, slice := serviceOf(i), sliceOf(i, 0)
	for _, object := range []metav1.Object{svc, slice} {
		object.SetResourceVersion("")
		object.SetManagedFields(nil) // it writes its own
	}
	if _, err := client.CoreV1().Services(svc.Namespace).Create(ctx, svc, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err := client.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})

	return err
}
