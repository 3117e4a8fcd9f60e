package deploy

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// apiServer is a real one, which notes what our ServiceAccount asks for. It has
// kube-proxy's ConfigMap, as kubeadm makes it, the Node, and our manifests.
type apiServer struct {
	*cluster.Cluster
	manifests
	client kubernetes.Interface
	audit  string
}

const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["system:serviceaccount:kube-system:sluice"]
- level: None
`

// mustAPIServer starts one on the loopback device of a node.
func mustAPIServer(t testing.TB, node *lab.Node) *apiServer {
	t.Helper()
	folder := t.TempDir()
	a := &apiServer{audit: filepath.Join(folder, "audit")}
	policy := filepath.Join(folder, "policy")
	lab.Must(t, os.WriteFile(policy, []byte(auditPolicy), 0o600))
	lab.Must(t, node.Do(func() error {
		// Without lists that are streamed, clients ask for lists, as they do of
		// older API servers.
		a.Cluster = cluster.Start(t, "--audit-policy-file="+policy, "--audit-log-path="+a.audit,
			"--feature-gates=WatchList=false")

		return nil
	}))
	cfg := a.Config()
	cfg.WarningHandler = rest.NoWarnings{}
	var err error
	a.client, err = kubernetes.NewForConfig(cfg)
	lab.Must(t, err)
	text, err := os.ReadFile("testdata/kubeadm.yaml")
	lab.Must(t, err)
	a.KubectlInput(t, strings.ReplaceAll(string(text), "SERVER", a.URL()), "apply", "-f", "-")
	_, err = a.client.CoreV1().Nodes().Create(t.Context(), object.Node(a.nodeName(), node.IPv4, node.IPv6), metav1.CreateOptions{})
	lab.Must(t, err)
	a.manifests = mustBuild(t, "overlays/kubeadm")
	a.KubectlInput(t, a.text, "apply", "--server-side", "--validate=strict", "-f", "-")

	return a
}

// nodeName is not the host name of this machine.
func (a *apiServer) nodeName() string { return "worker-1" }

// mustToken is what is projected into the pods of a ServiceAccount.
func (a *apiServer) mustToken(t testing.TB, account string) map[string]string {
	t.Helper()
	request, err := a.client.CoreV1().ServiceAccounts("kube-system").CreateToken(
		t.Context(), account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	lab.Must(t, err)

	return map[string]string{
		"token": request.Status.Token, "ca.crt": string(a.Config().CAData), "namespace": "kube-system",
	}
}

// mustService creates a Service of two ports, TCP and UDP, and its endpoints.
// It returns the ClusterIP.
func (a *apiServer) mustService(t testing.TB, name string, backends ...*lab.Pod) string {
	t.Helper()
	svc := object.Service("default", name, nil,
		corev1.ServicePort{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80},
		corev1.ServicePort{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80})
	svc.Spec.Type = corev1.ServiceTypeNodePort
	svc, err := a.client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{})
	lab.Must(t, err)
	slice := object.Slice("default", name, name, discoveryv1.AddressTypeIPv4,
		object.EndpointPort("tcp", corev1.ProtocolTCP, 8080), object.EndpointPort("udp", corev1.ProtocolUDP, 8080))
	for _, pod := range backends {
		slice.Endpoints = append(slice.Endpoints, object.Endpoint(pod.IPv4, a.nodeName()))
	}
	_, err = a.client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{})
	lab.Must(t, err)

	return svc.Spec.ClusterIP
}

// request is one request of a client, and the code of its answer.
type request struct {
	verb, group, resource string
}

// mustRequests returns what our ServiceAccount has asked for so far, and how
// often it was answered with which code.
func (a *apiServer) mustRequests(t testing.TB) map[request]map[int]int {
	t.Helper()
	file, err := os.Open(a.audit)
	lab.Must(t, err)
	defer file.Close()
	asked := make(map[request]map[int]int)
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event struct {
			Verb, RequestURI string
			ObjectRef        struct{ Resource, APIGroup string }
			ResponseStatus   struct{ Code int }
		}
		if json.Unmarshal(lines.Bytes(), &event) != nil {
			break // it is being written
		}
		is := request{event.Verb, event.ObjectRef.APIGroup, event.ObjectRef.Resource}
		if is.resource == "" {
			is.resource = event.RequestURI
		}
		if asked[is] == nil {
			asked[is] = make(map[int]int)
		}
		asked[is][event.ResponseStatus.Code]++
	}
	lab.Must(t, lines.Err())

	return asked
}

// testRequests: no request of the agent was refused, and whatever the role
// grants was asked for.
func testRequests(t *testing.T, k *kubelet) {
	// An Event reports a field without meaning, and the same Event counts repetitions.
	for _, value := range []string{`"bad"`, "null", `"bad"`} {
		patch := `{"metadata":{"annotations":{"sluice-lb.io/algorithm":` + value + `}}}`
		_, err := k.client.CoreV1().Services("default").Patch(
			t.Context(), "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		lab.Must(t, err)
	}
	grants := make(map[request]bool)
	for _, rule := range k.role.Rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					grants[request{verb, group, resource}] = true
				}
			}
		}
	}
	lab.EventuallyIn(t, waitTimeout, "the agent has asked for all that its role grants", func() error {
		asked := k.mustRequests(t)
		for grant := range grants {
			if len(asked[grant]) == 0 {
				return fmt.Errorf("never asked for: %v", grant)
			}
		}

		return nil
	})
	for is, codes := range k.mustRequests(t) {
		if !grants[is] {
			t.Errorf("the agent asks for %v, which the role does not grant: answered with %v", is, codes)
		}
		for code := range codes {
			if slices.Contains([]int{401, 403}, code) {
				t.Errorf("the agent may not ask for %v: %v", is, codes)
			}
		}
	}
}
