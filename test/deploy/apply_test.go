package deploy

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// testApply: the API server takes every installation, with unknown fields being
// errors, and has afterwards what the manifests contain, beside its defaults.
func testApply(t *testing.T, a *apiServer) {
	for _, is := range installations {
		t.Run(is.name, func(t *testing.T) {
			m := mustBuild(t, is.folder, is.components...)
			a.KubectlInput(t, m.text, "apply", "--server-side", "--validate=strict", "--force-conflicts", "-f", "-")
			for kind, want := range map[string]any{
				"daemonset/sluice": m.daemonSet, "serviceaccount/sluice": m.serviceAccount,
				"clusterrole/sluice": m.role, "clusterrolebinding/sluice": m.binding,
			} {
				got := a.Kubectl(t, "get", "-n", "kube-system", kind, "-o", "json")
				if missing := missingIn(mustUnmarshal(t, got), mustUnmarshal(t, mustMarshal(t, want)), kind); missing != "" {
					t.Errorf("the API server does not have what the manifests contain: %s", missing)
				}
			}
			testAdmission(t, a)
		})
	}
	// What the other tests run.
	a.KubectlInput(t, a.text, "apply", "--server-side", "--validate=strict", "--force-conflicts", "-f", "-")
}

// testAdmission: a pod of the DaemonSet is admitted.
func testAdmission(t *testing.T, a *apiServer) {
	t.Helper()
	set, err := a.client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "sluice", metav1.GetOptions{})
	lab.Must(t, err)
	pod := &corev1.Pod{ObjectMeta: set.Spec.Template.ObjectMeta, Spec: set.Spec.Template.Spec}
	pod.Name, pod.Spec.NodeName = "sluice-1", a.nodeName()
	pod, err = a.client.CoreV1().Pods("kube-system").Create(t.Context(), pod, metav1.CreateOptions{
		DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict,
	})
	lab.Must(t, err)
	if pod.Spec.Priority == nil || *pod.Spec.Priority != 2000001000 {
		t.Errorf("a pod has priority %v, want that of system-node-critical", pod.Spec.Priority)
	}
}

// missingIn returns the path of a field of want that got lacks, or "". Lists must be equal in
// length, objects may have more fields.
func missingIn(got, want any, path string) string {
	switch want := want.(type) {
	case map[string]any:
		has, _ := got.(map[string]any)
		for name, value := range want {
			if missing := missingIn(has[name], value, path+"."+name); missing != "" {
				return missing
			}
		}

		return ""
	case []any:
		has, _ := got.([]any)
		if len(has) != len(want) {
			return fmt.Sprintf("%s has %d elements, want %d", path, len(has), len(want))
		}
		for i := range want {
			if missing := missingIn(has[i], want[i], fmt.Sprintf("%s[%d]", path, i)); missing != "" {
				return missing
			}
		}

		return ""
	}
	// Encoded types have zero values where manifests have nothing.
	if want == nil || reflect.DeepEqual(got, want) || strings.HasPrefix(path[strings.Index(path, ".")+1:], "status") {
		return ""
	}

	return fmt.Sprintf("%s is %v, want %v", path, got, want)
}

func mustMarshal(t testing.TB, value any) string {
	t.Helper()
	text, err := json.Marshal(value)
	lab.Must(t, err)

	return string(text)
}

func mustUnmarshal(t testing.TB, text string) (value any) {
	t.Helper()
	lab.Must(t, json.Unmarshal([]byte(text), &value))

	return value
}
