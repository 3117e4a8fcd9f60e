package e2e

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// Pods and Namespaces opt out while the agent runs and while it does not. A bad value is an Event of the
// object.
func TestOptOut(t *testing.T) {
	s := &testbed{scene.MustSet(t, scene.Config{Args: []string{"--flow-table-memory", "4Mi", "--pod-opt-out"}})}
	pods := s.Client.CoreV1().Pods(s.Namespace)
	create := func(name, choice string) {
		t.Helper()
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{kube.SocketKey: choice}},
			Spec: corev1.PodSpec{
				NodeName:   s.NodeName(s.Lab.Nodes[0]),
				Containers: []corev1.Container{{Name: "c", Image: "none"}},
			},
		}
		if choice == "" {
			pod.Annotations = nil
		}
		_, err := pods.Create(t.Context(), pod, metav1.CreateOptions{})
		lab.Must(t, err)
	}
	label := func(value string) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, kube.SocketKey, value)
		_, err := s.Client.CoreV1().Namespaces().Patch(t.Context(), s.Namespace, types.MergePatchType, patch, metav1.PatchOptions{})
		lab.Must(t, err)
	}
	optedOut := func(want ...string) {
		t.Helper()
		lab.Eventually(t, fmt.Sprintf("%q have opted out", want), func() error {
			status, err := s.Agent.Status()
			if err != nil {
				return err
			}
			var have []string
			for _, pod := range status.OptedOut {
				have = append(have, pod.Pod)
			}
			if !slices.Equal(have, want) {
				return fmt.Errorf("%q have", have)
			}
			return nil
		})
	}

	create("annotated", "off")
	create("bad", "no")
	create("plain", "")
	optedOut(s.Namespace + "/annotated")
	s.mustSeeEvent(t, s.Namespace, "bad", "FieldIgnored", `"no" is neither on nor off`)
	label("never")
	s.mustSeeEvent(t, "default", s.Namespace, "FieldIgnored", `"never" is neither on nor off`)
	label("off")
	optedOut(s.Namespace+"/annotated", s.Namespace+"/bad", s.Namespace+"/plain")

	lab.Must(t, s.Agent.Stop())
	lab.Must(t, pods.Delete(t.Context(), "annotated", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	label("on")
	create("late", "off")
	lab.Must(t, s.Agent.Start())
	optedOut(s.Namespace + "/late")
}
