package deploy

import (
	"encoding/json"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/doctor"
	"github.com/sluice-lb/sluice/test/lab"
)

// testDoctor: the Job of deploy/doctor is taken by the API server, sees the node with what it is
// granted, and leaves nothing there. No agent runs.
func testDoctor(t *testing.T, k *kubelet) {
	tool, err := kubectl()
	lab.Must(t, err)
	text, err := exec.Command(tool, "kustomize", "../../deploy/doctor").Output()
	lab.Must(t, err)
	k.KubectlInput(t, strings.ReplaceAll(string(text), "NODE", k.nodeName()), "apply", "--server-side", "--validate=strict", "-f", "-")
	job, err := k.client.BatchV1().Jobs("kube-system").Get(t.Context(), "sluice-doctor-"+k.nodeName(), metav1.GetOptions{})
	lab.Must(t, err)
	pod := &corev1.Pod{ObjectMeta: job.Spec.Template.ObjectMeta, Spec: job.Spec.Template.Spec}
	pod.Name = "sluice-doctor-1"
	_, err = k.client.CoreV1().Pods("kube-system").Create(t.Context(), pod, metav1.CreateOptions{
		DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict,
	})
	lab.Must(t, err)
	if pod.Spec.NodeName != k.nodeName() {
		t.Errorf("it runs on node %q", pod.Spec.NodeName)
	}

	folders := []string{k.path("/run"), k.bpffs}
	lab.Must(t, os.MkdirAll(k.path("/run/sluice"), 0o755), os.MkdirAll(k.path("/run/netns"), 0o755)) // as the kubelet does
	before := filesBelow(t, folders)
	spec := k.mustSpecOf(t, pod.Spec, pod.Spec.Containers[0])
	// The ClusterIP leads to the API server here, as it does where kube-proxy runs.
	server, err := url.Parse(k.URL())
	lab.Must(t, err)
	spec.Env = slices.DeleteFunc(spec.Env, func(env string) bool { return strings.HasPrefix(env, "KUBERNETES_") })
	spec.Env = append(spec.Env, "KUBERNETES_SERVICE_HOST="+server.Hostname(), "KUBERNETES_SERVICE_PORT="+server.Port())
	out, code := k.mustExec(t, spec, append(spec.Args[1:], "-o", "json")...)
	var report doctor.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 || report.Problems != 0 {
		t.Fatalf("exit code %d: %v:\n%s", code, err, out)
	}
	seen := make(map[string]doctor.Finding)
	for _, f := range report.Findings {
		seen[f.Check] = f
		if strings.HasPrefix(f.Seen, "not looked at") {
			t.Errorf("%s: %s", f.Check, f.Seen)
		}
	}
	for _, is := range spec.Mounts {
		if strings.HasPrefix(is.To, "/run") && is.From != k.path("/run/sluice") && is.From != k.path("/run/netns") {
			t.Errorf("of the node's /run, it has %s at %s", is.From, is.To)
		}
	}
	for check, want := range map[string]string{
		"cgroup":     "/host/cgroup",
		"bpffs":      "/host/bpf/sluice is on bpffs",
		"agent":      "no agent runs, and nothing is programmed",
		"api-server": k.URL() + " answers",
	} {
		if !strings.HasPrefix(seen[check].Seen, want) {
			t.Errorf("%s: %q, want %q", check, seen[check].Seen, want)
		}
	}
	// Other tests may run one.
	if f := seen["kube-proxy"]; strings.Contains(f.Seen, "PID namespace") {
		t.Errorf("it does not see the processes of the node: %s", f.Seen)
	}
	for i, after := range filesBelow(t, folders) {
		if diff := cmp.Diff(before[i], after); diff != "" {
			t.Errorf("%s has changed (-before +after):\n%s", folders[i], diff)
		}
	}
}

// filesBelow returns what is in each folder, and in folders below it.
func filesBelow(t *testing.T, folders []string) [][]string {
	t.Helper()
	paths := make([][]string, len(folders))
	for i, folder := range folders {
		lab.Must(t, filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			paths[i] = append(paths[i], path)

			return err
		}))
	}

	return paths
}
