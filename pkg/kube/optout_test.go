package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pods and Namespaces are only requested by agents that need them: Pods of this node, and Namespaces with
// the label.
func TestWatchOptOuts(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "mesh", Name: "a", UID: "1", Annotations: map[string]string{SocketKey: "off"},
	}}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mesh", Labels: map[string]string{SocketKey: "off"}}}
	api.set(pod, namespace)
	cfg := api.config(t, sink)
	cfg.PodOptOut = true
	w := mustWatch(t, cfg)
	mustClose(t, "PodsSynced", w.PodsSynced())
	mustClose(t, "Synced", w.Synced())
	mustBecome(t, sink, "Pod mesh/a", `uid="1" socket="off"`)
	mustBecome(t, sink, "Namespace mesh", `socket="off"`)

	for resource, want := range map[string][2]string{
		"pods":       {"", "spec.nodeName=node1,status.phase!=Succeeded,status.phase!=Failed"},
		"namespaces": {SocketKey, ""},
	} {
		for _, query := range api.asked(resource) {
			if got := [2]string{query.Get("labelSelector"), query.Get("fieldSelector")}; got != want {
				t.Errorf("a request for %s has the selectors %q, want %q", resource, got, want)
			}
		}
	}
	api.delete(pod)
	api.delete(namespace)
	mustBecome(t, sink, "Pod mesh/a", `uid="" socket=""`)
	mustBecome(t, sink, "Namespace mesh", `socket=""`)
}

func TestWatchWithoutOptOuts(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	w := mustWatch(t, api.config(t, sink))
	mustClose(t, "Synced", w.Synced())
	mustClose(t, "NodeSynced", w.NodeSynced())
	for _, resource := range []string{"pods", "namespaces"} {
		if n := len(api.asked(resource)); n > 0 {
			t.Errorf("%d requests for %s", n, resource)
		}
	}
}

// The Services of an API server that refuses Pods are programmed nevertheless.
func TestWatchWithoutPods(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	api.absent["pods"] = true
	cfg := api.config(t, sink)
	cfg.PodOptOut = true
	w := mustWatch(t, cfg)
	mustClose(t, "Synced", w.Synced())
	mustReport(t, sink, "pods", true)
	select {
	case <-w.PodsSynced():
		t.Error("synced without Pods")
	default:
	}
}
