package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// kubelet runs pods of the DaemonSet on a machine, from what the API server has.
type kubelet struct {
	*machine
	*apiServer
}

// mustSpec is the agent of the DaemonSet that the API server has.
func (k *kubelet) mustSpec(t testing.TB) containerSpec {
	t.Helper()
	set, err := k.client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "sluice", metav1.GetOptions{})
	lab.Must(t, err)
	pod := set.Spec.Template.Spec

	return k.mustSpecOf(t, pod, pod.Containers[0])
}

// mustSpecOf converts a container to what its runtime gets.
func (k *kubelet) mustSpecOf(t testing.TB, pod corev1.PodSpec, is corev1.Container) containerSpec {
	t.Helper()
	security := is.SecurityContext
	if security.Capabilities == nil {
		security.Capabilities = new(corev1.Capabilities)
	}
	spec := containerSpec{
		Root:       k.mustRoot(t),
		ReadOnly:   *security.ReadOnlyRootFilesystem,
		Mounts:     k.mustMounts(t, pod, is),
		Args:       []string{"/usr/bin/sluice"}, // the image's entrypoint
		Privileged: *security.Privileged,
		NoNewPrivs: security.AllowPrivilegeEscalation != nil && !*security.AllowPrivilegeEscalation,
		HostPID:    pod.HostPID,
		Node:       k.cgroups.node,
		// Every container gets the address of the Service `kubernetes` by its
		// environment. Nothing answers there.
		Env: []string{"PATH=/usr/bin", "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443"},
	}
	for _, name := range security.Capabilities.Add {
		if held(string(name)) { // a machine in a sandbox cannot give what it has not
			spec.Capabilities = append(spec.Capabilities, string(name))
		}
	}
	known := make(map[string]string)
	for _, env := range is.Env {
		value := env.Value
		if env.ValueFrom != nil && env.ValueFrom.FieldRef.FieldPath == "spec.nodeName" {
			value = k.nodeName()
		}
		known["$("+env.Name+")"] = value
		spec.Env = append(spec.Env, env.Name+"="+value)
	}
	for _, arg := range is.Args {
		for name, value := range known {
			arg = strings.ReplaceAll(arg, name, value)
		}
		spec.Args = append(spec.Args, arg)
	}

	return spec
}

// mustRoot is a copy of the image's files, which the mounts get folders in.
func (k *kubelet) mustRoot(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	lab.Must(t, os.CopyFS(root, os.DirFS(k.image)))

	return root
}

func (k *kubelet) mustMounts(t testing.TB, pod corev1.PodSpec, is corev1.Container) []mount {
	t.Helper()
	volumes := make(map[string]string)
	for _, volume := range pod.Volumes {
		if from := volume.ConfigMap; from != nil {
			configMap, err := k.client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), from.Name, metav1.GetOptions{})
			lab.Must(t, err)
			volumes[volume.Name] = mustProject(t, configMap.Data)

			continue
		}
		path := k.path(volume.HostPath.Path)
		if *volume.HostPath.Type == corev1.HostPathDirectoryOrCreate {
			lab.Must(t, os.MkdirAll(path, 0o755))
		}
		if is, err := os.Stat(path); err != nil || !is.IsDir() {
			t.Fatalf("the node has no folder %s: %v", volume.HostPath.Path, err)
		}
		volumes[volume.Name] = path
	}
	mounts := []mount{{
		From: mustProject(t, k.mustToken(t, pod.ServiceAccountName)),
		To:   "/var/run/secrets/kubernetes.io/serviceaccount", ReadOnly: true,
	}}
	for _, at := range is.VolumeMounts {
		slave := at.MountPropagation != nil && *at.MountPropagation == corev1.MountPropagationHostToContainer
		mounts = append(mounts, mount{From: volumes[at.Name], To: at.MountPath, ReadOnly: at.ReadOnly, Slave: slave})
	}

	return mounts
}

// mustRun starts an agent.
func (k *kubelet) mustRun(t testing.TB, spec containerSpec) *container {
	t.Helper()

	return mustRun(t, k.node.Namespace, k.cgroups.agent, spec)
}

// mustExec is kubectl exec: another process with all that the container has. It
// returns what that printed, and its exit code.
func (k *kubelet) mustExec(t testing.TB, spec containerSpec, verb ...string) (string, int) {
	t.Helper()
	spec.Args = append([]string{spec.Args[0]}, verb...)
	c := mustRun(t, k.node.Namespace, k.cgroups.agent, spec)
	<-c.done

	return c.log.String(), c.cmd.ProcessState.ExitCode()
}

// probe asks as a probe does, and returns an error unless it passes.
func (k *kubelet) probe(t testing.TB, probe *corev1.Probe) error {
	t.Helper()
	dial := func(_ context.Context, network, address string) (net.Conn, error) {
		return k.node.Dial(network, address, 5*time.Second)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	url := fmt.Sprintf("http://%s:%d%s", k.node.IPv4, probe.HTTPGet.Port.IntValue(), probe.HTTPGet.Path)
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, answer.Status, body)
	}
	if !json.Valid(body) {
		return fmt.Errorf("%s: %s: it is no JSON", url, body)
	}

	return nil
}

// mustBeReady waits until the probes of the pod pass, unless it ends.
func (k *kubelet) mustBeReady(t testing.TB, c *container) {
	t.Helper()
	for _, probe := range []*corev1.Probe{k.container().StartupProbe, k.container().LivenessProbe, k.container().ReadinessProbe} {
		lab.EventuallyIn(t, waitTimeout, probe.HTTPGet.Path, func() error {
			select {
			case <-c.done:
				t.Fatalf("the agent has ended: %v: %s", c.err, c.log.String())
			default:
			}

			return k.probe(t, probe)
		})
	}
}
