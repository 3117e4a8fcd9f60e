package objects

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// A real API server takes a plan, then one with more Services, which writes the differences only, and
// watchers receive changes.
func TestWriter(t *testing.T) {
	c := cluster.Start(t, "--service-cluster-ip-range="+ServiceRange)
	client, err := kubernetes.NewForConfig(c.Config())
	lab.Must(t, err)
	w, err := NewWriter(c.Config())
	lab.Must(t, err)

	mustCost(t, w, planOf(20, 3), 20)
	mustHold(t, client, planOf(20, 3))
	mustCost(t, w, planOf(50, 3), 31) // 30 new ones, and number 19 is not the last any more
	mustHold(t, client, planOf(50, 3))
	mustCost(t, w, planOf(50, 3), 0)
	for name, other := range map[string]Plan{"fewer Services": planOf(30, 3), "other endpoints": planOf(60, 2)} {
		if err := w.Fill(t.Context(), other, nil); err == nil {
			t.Errorf("no error from a plan with %s", name)
		}
	}

	watch, err := client.DiscoveryV1().EndpointSlices("").Watch(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)
	defer watch.Stop()
	seen := func(address string) bool {
		t.Helper()
		timeout := time.After(time.Minute)
		for {
			select {
			case event := <-watch.ResultChan():
				slice, ok := event.Object.(*discoveryv1.EndpointSlice)
				if ok && slices.Contains(slice.Endpoints[0].Addresses, address) {
					return true
				}
			case <-timeout:
				return false
			}
		}
	}
	lab.Must(t, w.Change(t.Context(), 7, 3))
	if want := planOf(50, 3).EndpointAddress(7, 0, 3).String(); !seen(want) {
		t.Errorf("no watcher receives %s", want)
	}
	lab.Must(t, w.ChangeSingle(t.Context(), 5))
	if want := planOf(50, 3).SingleAddress(5).String(); !seen(want) {
		t.Errorf("no watcher receives %s", want)
	}
}

// mustCost fills, and wants it to take writes of so many Services.
func mustCost(t *testing.T, w *Writer, plan Plan, want int) {
	t.Helper()
	got, total, start := 0, 0, time.Now()
	lab.Must(t, w.Fill(t.Context(), plan, func(done, all int) { got, total = done, all }))
	if got != want || total != want {
		t.Errorf("plan of %d × %d: %d of %d Services written, want %d", plan.Services, plan.Endpoints, got, total, want)
	}
	t.Logf("%d Services written in %v", got, time.Since(start))
}

// mustHold wants the API server to hold a plan, no more and no less.
func mustHold(t *testing.T, client kubernetes.Interface, plan Plan) {
	t.Helper()
	services, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)
	slices, err := client.DiscoveryV1().EndpointSlices("").List(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)

	// Ports of Services, endpoints of slices, and addresses of nodes.
	want := map[string]int{
		"service kubernetes": 1, "service bulk": 2, "service near": 3, "service far": 3, "service single": 1,
		"slice bulk": 1, "slice near": 1, "slice far": 1, "slice single": 1,
		"node " + plan.Local.Address.String(): 1, "node " + plan.Remote.Address.String(): 1,
	}
	for i := range plan.Services {
		want["service "+name(i)], want["slice "+name(i)] = len(plan.Service(i).Spec.Ports), plan.Endpoints
	}
	got := make(map[string]int)
	for _, service := range services.Items {
		got["service "+service.Name] = len(service.Spec.Ports)
	}
	for _, slice := range slices.Items {
		got["slice "+slice.Labels[discoveryv1.LabelServiceName]] += len(slice.Endpoints)
	}
	for _, node := range nodes.Items {
		got["node "+node.Status.Addresses[0].Address]++
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("objects (-want +got):\n%s", diff)
	}
}
