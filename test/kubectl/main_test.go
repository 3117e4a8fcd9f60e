// Package kubectl tests `kubectl sluice` as a person uses it: kubectl runs the plugin, which asks a real API server,
// which asks the kubelets of two nodes, on which agents run. The kubelets are stand-ins, see [kubelet].
package kubectl

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("firewall")
	os.Exit(m.Run())
}

// world is a cluster that has a plugin for its kubectl.
//
//	node-1 ─── agent, pod-1-0 (web-1), pod-1-1 (a client)
//	node-2 ─── agent, pod-2-0 (web-2)
//	node-3      a Node and a pod of Sluice, whose kubelet does not answer
//	node-0      a Node without a pod of Sluice
type world struct {
	*cluster.Cluster
	lab        *lab.Cluster
	agents     []*sluice.Node
	cgroups    []*lab.Cgroup // of processes of each node
	client     kubernetes.Interface
	folder     string // has the plugin
	kubeconfig string // of a person with the rights of docs/kubectl.md
}

// objects are what agents read from a folder, since only the verbs need the API server.
const objects = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.0.1
  ports: [{name: http, port: 80, nodePort: 30080, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.244.1.2], nodeName: node-1}
- {addresses: [10.244.2.2], nodeName: node-2}
---
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: shop}
spec:
  clusterIP: 10.96.0.2
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {addresses: [{type: InternalIP, address: 192.168.50.1}]}
---
apiVersion: v1
kind: Node
metadata: {name: node-2}
status: {addresses: [{type: InternalIP, address: 192.168.50.2}]}
`

func mustWorld(t testing.TB) *world {
	t.Helper()
	w := &world{Cluster: cluster.Start(t), lab: lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 2, Client: true}), folder: t.TempDir()}
	cfg := w.Config()
	cfg.WarningHandler = rest.NoWarnings{}
	var err error
	w.client, err = kubernetes.NewForConfig(cfg)
	lab.Must(t, err)
	manifests := t.TempDir()
	lab.Must(t, os.WriteFile(filepath.Join(manifests, "objects.yaml"), []byte(objects), 0o600))
	for _, node := range w.lab.Nodes {
		cgroup := lab.MustCgroup(t, node.Name)
		agent := sluice.MustNode(t, sluice.Config{
			Namespace: node.Namespace, Cgroup: cgroup, NodeName: node.Name, Manifests: manifests,
		})
		w.agents, w.cgroups = append(w.agents, agent), append(w.cgroups, cgroup)
		w.mustCreateNode(t, node.Name, mustKubelet(t, agent, node))
		lab.MustServe(t, node.Pods[0].Namespace, node.Pods[0].Name, node.Pods[0].At(8080)...)
	}
	refusing, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	lab.Must(t, refusing.Close())
	w.mustCreateNode(t, "node-3", portOf(t, refusing.Addr()))
	without := object.Node("node-0", "127.0.0.1")
	without.Labels = map[string]string{corev1.LabelOSStable: "linux"}
	_, err = w.client.CoreV1().Nodes().Create(t.Context(), without, metav1.CreateOptions{})
	lab.Must(t, err)
	w.mustCreatePod(t, "default", "web-1", "node-1", nil)
	w.KubectlInput(t, rights(t), "apply", "-f", "-")
	w.kubeconfig = w.mustLogin(t, "operator")
	for _, name := range []string{"kubectl-sluice", "kubectl_complete-sluice"} {
		lab.Must(t, os.Symlink(sluice.MustBinary(t), filepath.Join(w.folder, name)))
	}

	return w
}

func portOf(t testing.TB, addr net.Addr) int32 {
	t.Helper()

	return int32(addr.(*net.TCPAddr).Port)
}

// mustCreateNode creates a Node with a pod of Sluice.
func (w *world) mustCreateNode(t testing.TB, name string, kubelet int32) {
	t.Helper()
	node := object.Node(name, "127.0.0.1")
	node.Status.DaemonEndpoints.KubeletEndpoint.Port = kubelet
	_, err := w.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	lab.Must(t, err)
	w.mustCreatePod(t, "kube-system", "sluice-"+name, name, map[string]string{"app.kubernetes.io/name": "sluice"})
}

func (w *world) mustCreatePod(t testing.TB, namespace, name, node string, labels map[string]string) {
	t.Helper()
	pods := w.client.CoreV1().Pods(namespace)
	pod, err := pods.Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Name: "sluice", Image: "sluice", Args: []string{"agent", "--hostname-override=$(NODE_NAME)", "--devices=none*", "--dry-run"},
		}}},
	}, metav1.CreateOptions{})
	lab.Must(t, err)
	pod.Status.Phase = corev1.PodRunning
	if name == "web-1" {
		pod.Status.PodIPs = []corev1.PodIP{{IP: "10.244.1.2"}}
	}
	_, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	lab.Must(t, err)
}

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// rights are the objects of docs/kubectl.md that give a person the rights that the plugin needs.
func rights(t testing.TB) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/kubectl.md")
	lab.Must(t, err)
	block := yamlBlock.FindSubmatch(page)
	if block == nil {
		t.Fatal("docs/kubectl.md has no block of YAML")
	}
	account := "\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: operator, namespace: default}\n"
	people := regexp.MustCompile(`\{apiGroup: \S+ kind: Group, name: \S+}`)

	return people.ReplaceAllString(string(block[1]), "{kind: ServiceAccount, name: operator, namespace: default}") + account
}

// mustLogin returns the kubeconfig of a ServiceAccount.
func (w *world) mustLogin(t testing.TB, account string) string {
	t.Helper()
	token, err := w.client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), account,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	lab.Must(t, err)
	config, err := clientcmd.LoadFromFile(w.Kubeconfig())
	lab.Must(t, err)
	config.AuthInfos["admin"].Token = token.Status.Token
	path := filepath.Join(t.TempDir(), "kubeconfig")
	lab.Must(t, clientcmd.WriteToFile(*config, path))

	return path
}

// kubectl runs kubectl as a person does, with the plugin in its PATH, and returns both outputs and the exit code.
func (w *world) kubectl(t testing.TB, args ...string) (string, string, int) {
	t.Helper()
	cmd := w.command(t, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}

	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func (w *world) command(t testing.TB, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), w.Binary("kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+w.kubeconfig, fmt.Sprintf("PATH=%s:%s", w.folder, os.Getenv("PATH")))

	return cmd
}

// inOrder returns the first of texts that is not in text behind those before it, or "".
func inOrder(text string, texts ...string) string {
	for _, want := range texts {
		_, after, found := strings.Cut(text, want)
		if !found {
			return want
		}
		text = after
	}

	return ""
}
