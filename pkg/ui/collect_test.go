package ui

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/pkg/remote"
)

// A picture runs no more verbs at once than it may, and no other on a node that does not answer.
func TestCollect(t *testing.T) {
	var pods corev1.PodList
	for i := range 3 {
		pods.Items = append(pods.Items, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: fmt.Sprintf("sluice-%d", i)},
			Spec:       corev1.PodSpec{NodeName: fmt.Sprintf("node-%d", i)},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning},
		})
	}
	var running, verbs atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/exec") {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(pods) // the test fails without the pods

			return
		}
		verbs.Add(1)
		if now := running.Add(1); now > 2 {
			t.Errorf("%d verbs run at once, want 2 at most", now)
		}
		defer running.Add(-1)
		time.Sleep(20 * time.Millisecond)
		http.Error(w, "no kubelet", http.StatusBadGateway)
	}))
	defer server.Close()
	config := &rest.Config{Host: server.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	cluster := &remote.Cluster{Config: config, Client: client, Namespace: "kube-system", Parallel: 2, Timeout: 10 * time.Second, MaxAnswer: 1 << 20}
	nodes, err := cluster.Nodes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	picture := Collect(t.Context(), cluster, nodes)
	if len(picture.Nodes) != 3 || verbs.Load() != 2*3 { // by WebSocket, then by SPDY
		t.Errorf("%d requests to run a verb, want 6, of the nodes %+v", verbs.Load(), picture.Nodes)
	}
	for _, node := range picture.Nodes {
		if !strings.HasPrefix(node.Problem, "no answer: ") {
			t.Errorf("the problem of %s is %q", node.Name, node.Problem)
		}
	}
}
