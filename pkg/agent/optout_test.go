package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// The annotation of a Pod precedes the label of its Namespace.
func TestOptedOut(t *testing.T) {
	cfg, _ := recordingConfig()
	cfg.PodOptOut = true
	m := newModel(cfg)
	pod := func(namespace, name string, choice kube.SocketChoice) kube.Pod {
		return kube.Pod{Namespace: namespace, Name: name, UID: namespace + "-" + name, Socket: choice}
	}
	m.optOuts.setPod(pod("mesh", "in", kube.SocketOn))
	m.optOuts.setPod(pod("mesh", "out", kube.SocketUndecided))
	m.optOuts.setPod(pod("plain", "in", kube.SocketUndecided))
	m.optOuts.setPod(pod("plain", "out", kube.SocketOff))
	if uids, ok := m.newOptedOut(); ok {
		t.Errorf("before all were received: %v", uids)
	}
	m.podsReceived()

	for _, step := range []struct {
		name   string
		change func()
		want   []string // nil: nothing is new
	}{
		{"Pods", func() {}, []string{"plain-out"}},
		{"a Namespace opts out", func() { m.optOuts.setNamespace(kube.Namespace{Name: "mesh", Socket: kube.SocketOff}) }, []string{"mesh-out", "plain-out"}},
		{"a Pod is as before", func() { m.optOuts.setPod(pod("plain", "out", kube.SocketOff)) }, nil},
		{"a Pod has another UID", func() {
			m.optOuts.setPod(kube.Pod{Namespace: "plain", Name: "out", UID: "again", Socket: kube.SocketOff})
		}, []string{"mesh-out", "again"}},
		{"a Pod is deleted", func() { m.optOuts.setPod(kube.Pod{Namespace: "plain", Name: "out"}) }, []string{"mesh-out"}},
		{"a Namespace loses the label", func() { m.optOuts.setNamespace(kube.Namespace{Name: "mesh"}) }, []string{}},
	} {
		step.change()
		uids, ok := m.newOptedOut()
		if ok != (step.want != nil) || ok && len(uids)+len(step.want) > 0 && !cmp.Equal(step.want, uids) {
			t.Errorf("%s: %v, %v, want %v", step.name, uids, ok, step.want)
		}
	}
}

// What an earlier agent has programmed goes if this one has not the flag, even if there are manifests of Pods.
func TestNoneOptedOutWithoutTheFlag(t *testing.T) {
	cfg, _ := recordingConfig()
	m := newModel(cfg)
	m.optOuts.setPod(kube.Pod{Namespace: "plain", Name: "out", UID: "1", Socket: kube.SocketOff})
	if uids, ok := m.newOptedOut(); !ok || len(uids) > 0 {
		t.Errorf("%v, %v, want none", uids, ok)
	}
}

// A bad value is an Event of the Pod or the Namespace that has it.
func TestOptOutProblemsAreEvents(t *testing.T) {
	cfg, events := recordingConfig()
	m := newModel(cfg)
	for _, object := range []string{"Pod ns/a", "Namespace mesh"} {
		m.report(object, []lb.Problem{{Object: object, Field: "f", Message: "m"}})
	}
	want := []kube.Event{
		{Pod: types.NamespacedName{Namespace: "ns", Name: "a"}, Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
		{Namespace: "mesh", Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
	}
	if diff := cmp.Diff(want, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
