package remote

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/sluice-lb/sluice/test/lab"
)

func podOf(node, app string, waiting bool) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: app + "-" + node, Labels: map[string]string{label: app}},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if waiting {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: container, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
	}

	return p
}

// Where no agent's pod runs, verbs run in a pod of deploy/nodes, and nodes without either are known.
func TestNodes(t *testing.T) {
	nodeOf := func(name, system string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: system}}}
	}
	c := Cluster{Namespace: "kube-system", Timeout: time.Minute, Client: fake.NewClientset([]runtime.Object{
		nodeOf("a", "linux"), nodeOf("b", "linux"), nodeOf("c", "linux"), nodeOf("d", "linux"), nodeOf("e", "windows"),
		podOf("a", "sluice", false), podOf("a", "sluice-nodes", false),
		podOf("b", "sluice", true), podOf("b", "sluice-nodes", false),
		podOf("c", "sluice-nodes", false),
	}...)}
	nodes, err := c.Nodes(context.Background())
	lab.Must(t, err)
	var pods []string
	for _, n := range nodes {
		pods = append(pods, n.pod.Name)
	}
	if want := []string{"sluice-a", "sluice-nodes-b", "sluice-nodes-c"}; !slices.Equal(pods, want) {
		t.Errorf("verbs run in %q, want %q", pods, want)
	}
	without, err := c.NodesWithout(context.Background(), nodes)
	lab.Must(t, err)
	if !slices.Equal(without, []string{"d"}) {
		t.Errorf("nodes without a pod: %q, want d", without)
	}
}

// Without a limit an answer may have any length.
func TestAnswerWithoutLimit(t *testing.T) {
	a := &answer{tooLong: func() { t.Error("an answer without a limit is too long") }}
	_, err := a.Write([]byte("well"))
	if text, over := a.read(); err != nil || over || text != "well" {
		t.Errorf("it is %q, too long: %v, %v", text, over, err)
	}
}

// A node that prints without end is ended, and does not fill the memory of who asks.
func TestAnswerIsLimited(t *testing.T) {
	ended := false
	a := &answer{max: 10, tooLong: func() { ended = true }}
	if _, err := a.Write([]byte("0123456789")); err != nil || ended {
		t.Errorf("as long as it may be: %v, ended: %v", err, ended)
	}
	_, err := a.Write([]byte("0"))
	if text, over := a.read(); err == nil || !ended || !over || text != "" {
		t.Errorf("longer: %v, ended: %v, over: %v, kept: %q", err, ended, over, text)
	}
	if _, err := a.Write(nil); err == nil {
		t.Error("it takes more after that")
	}
}
