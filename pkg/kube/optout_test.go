package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
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

// The annotation of a Pod precedes the label of its Namespace.
func TestOptedOut(t *testing.T) {
	o := NewOptOuts(true)
	pod := func(namespace, name string, choice SocketChoice) Pod {
		return Pod{Namespace: namespace, Name: name, UID: namespace + "-" + name, Socket: choice}
	}
	o.SetPod(pod("mesh", "in", SocketOn))
	o.SetPod(pod("mesh", "out", SocketUndecided))
	o.SetPod(pod("plain", "in", SocketUndecided))
	o.SetPod(pod("plain", "out", SocketOff))
	if uids, ok := o.Changed(); ok {
		t.Errorf("before all were received: %v", uids)
	}
	o.Received()

	for _, step := range []struct {
		name   string
		change func()
		want   []string // nil: nothing is new
	}{
		{"Pods", func() {}, []string{"plain-out"}},
		{"a Namespace opts out", func() { o.SetNamespace(Namespace{Name: "mesh", Socket: SocketOff}) }, []string{"mesh-out", "plain-out"}},
		{"a Pod is as before", func() { o.SetPod(pod("plain", "out", SocketOff)) }, nil},
		{"a Pod has another UID", func() {
			o.SetPod(Pod{Namespace: "plain", Name: "out", UID: "again", Socket: SocketOff})
		}, []string{"mesh-out", "again"}},
		{"a Pod is deleted", func() { o.SetPod(Pod{Namespace: "plain", Name: "out"}) }, []string{"mesh-out"}},
		{"a Namespace loses the label", func() { o.SetNamespace(Namespace{Name: "mesh"}) }, []string{}},
	} {
		step.change()
		uids, ok := o.Changed()
		if ok != (step.want != nil) || ok && len(uids)+len(step.want) > 0 && !cmp.Equal(step.want, uids) {
			t.Errorf("%s: %v, %v, want %v", step.name, uids, ok, step.want)
		}
	}
}

// What an earlier agent has programmed goes if this one has not the flag, even if there are manifests of Pods.
func TestNoneOptedOutWithoutTheFlag(t *testing.T) {
	o := NewOptOuts(false)
	o.SetPod(Pod{Namespace: "plain", Name: "out", UID: "1", Socket: SocketOff})
	if uids, ok := o.Changed(); !ok || len(uids) > 0 {
		t.Errorf("%v, %v, want none", uids, ok)
	}
}
