package conformance

import (
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The agent programs nothing before it has both Services and EndpointSlices, as it
// would refuse clients of a Service that has endpoints. What an earlier agent has
// programmed stays meanwhile.
//
//	pod, node ── web:80 ── pod-1-0
func TestStartWaitsForServicesAndSlices(t *testing.T) {
	t.Parallel()
	account := mustAccount(t)
	s := scene.MustSet(t, scene.Config{Unready: true, Kubeconfig: account.kubeconfig})
	pod, next := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	inside := []*scene.Client{s.Pod, s.Node}

	account.allow(t, "services", "nodes")
	lab.Must(t, s.Agent.Start())
	mustWaitForSlices(t, s)
	scene.MustAllFail(t, scene.Untouched, scene.Dials(inside, "tcp", web)...)
	account.allow(t, "services", "nodes", "endpointslices")
	sluice.MustWait(t, s.Agent)
	for _, c := range inside {
		scene.MustReach(t, c.To("tcp", web), pod.Name)
	}

	account.allow(t, "services", "nodes")
	load := scene.MustDial(t, 50, scene.Dials(inside, "tcp", web)...)
	lab.Must(t, s.Agent.Stop())
	s.SetEndpoints(t, "web", scene.ReadyAll(next)...)
	lab.Must(t, s.Agent.Start())
	mustWaitForSlices(t, s)
	for _, c := range inside {
		scene.MustReach(t, c.To("tcp", web), pod.Name)
	}
	account.allow(t, "services", "nodes", "endpointslices")
	for _, c := range inside {
		scene.MustReach(t, c.To("tcp", web), next.Name)
	}
	load.MustHaveWorked(t)
}

// mustWaitForSlices waits until the agent, since it was started last, has got
// the error that it may not list EndpointSlices.
func mustWaitForSlices(t *testing.T, s *scene.Scene) {
	t.Helper()
	before := strings.Count(s.Agent.Log(), "forbidden")
	lab.Eventually(t, "the agent asks for slices in vain", func() bool {
		return strings.Count(s.Agent.Log(), "forbidden") > before
	})
	if status, err := s.Agent.Status(); err != nil || status.Synced {
		t.Errorf("the agent is synced: %t, %v", status.Synced, err)
	}
}

// account is a ServiceAccount with a ClusterRole.
type account struct {
	name       string
	kubeconfig string
}

func mustAccount(t *testing.T) *account {
	t.Helper()
	client := scene.MustClient(t)
	a := &account{name: "start", kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	_, err := client.CoreV1().ServiceAccounts("default").Create(t.Context(),
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: a.name}}, metav1.CreateOptions{})
	lab.Must(t, err)
	_, err = client.RbacV1().ClusterRoles().Create(t.Context(),
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: a.name}}, metav1.CreateOptions{})
	lab.Must(t, err)
	_, err = client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: a.name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: a.name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: a.name}},
	}, metav1.CreateOptions{})
	lab.Must(t, err)
	token, err := client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), a.name,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	lab.Must(t, err)

	server := cluster.Shared(t).Config()
	config := clientcmdapi.NewConfig()
	config.Clusters["lab"] = &clientcmdapi.Cluster{
		Server: server.Host, CertificateAuthority: server.CAFile, CertificateAuthorityData: server.CAData,
	}
	config.AuthInfos[a.name] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	config.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: a.name}
	config.CurrentContext = "lab"
	lab.Must(t, clientcmd.WriteToFile(*config, a.kubeconfig))

	return a
}

// allow lets the account see resources of these kinds and no others.
func (a *account) allow(t *testing.T, resources ...string) {
	t.Helper()
	_, err := scene.MustClient(t).RbacV1().ClusterRoles().Update(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: a.name},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{"", "discovery.k8s.io", "networking.k8s.io"},
			Resources: resources,
			Verbs:     []string{"get", "list", "watch"},
		}},
	}, metav1.UpdateOptions{})
	lab.Must(t, err)
}
