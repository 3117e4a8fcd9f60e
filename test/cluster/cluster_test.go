package cluster_test

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// What an agent needs of a cluster: objects can be written and read, a watch
// reports them, and all of it survives an outage of the API server.
func TestCluster(t *testing.T) {
	c := cluster.Start(t)
	client := mustClient(t, c)
	services := client.CoreV1().Services("default")
	watch, err := services.Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=web"})
	lab.Must(t, err)
	defer watch.Stop()

	version, err := client.Discovery().ServerVersion()
	lab.Must(t, err)
	if version.GitVersion != "v1.37.2" || version.Major != "1" || version.Minor != "37" {
		t.Errorf("the version is %s (%s.%s), want v1.37.2 (1.37)", version.GitVersion, version.Major, version.Minor)
	}

	web := mustCreate(t, services.Create, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Type:           corev1.ServiceTypeNodePort,
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack),
			Ports:          []corev1.ServicePort{{Port: 80}},
		},
	})
	if ips := web.Spec.ClusterIPs; len(ips) != 2 ||
		!strings.HasPrefix(ips[0], "10.96.") || !strings.HasPrefix(ips[1], "fd00:10:96::") {
		t.Errorf("the cluster IPs are %v, want one of %s and one of %s",
			ips, cluster.ServiceRangeIPv4, cluster.ServiceRangeIPv6)
	}
	mustCreate(t, client.DiscoveryV1().EndpointSlices("default").Create, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.1.7"}}},
		Ports:       []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
	})
	node := mustCreate(t, client.CoreV1().Nodes().Create, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1"},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.0.1.0/24"}, PodCIDR: "10.0.1.0/24"},
	})
	if len(node.Spec.Taints) != 0 {
		t.Errorf("the node has taints %v, want none", node.Spec.Taints)
	}

	select {
	case event := <-watch.ResultChan():
		if got, ok := event.Object.(*corev1.Service); !ok || got.UID != web.UID {
			t.Errorf("the watch returns %v, want the Service web", event)
		}
	case <-time.After(10 * time.Second):
		t.Error("the watch does not see the Service web")
	}

	c.StopAPIServer(t)
	if _, err := services.Get(t.Context(), "web", metav1.GetOptions{}); err == nil {
		t.Error("the API server answers in its outage")
	}
	c.StartAPIServer(t)

	after, err := services.Get(t.Context(), "web", metav1.GetOptions{})
	lab.Must(t, err)
	if after.UID != web.UID || !slices.Equal(after.Spec.ClusterIPs, web.Spec.ClusterIPs) {
		t.Errorf("after the outage the Service is %v, want %v", after, web)
	}
	if got := c.Kubectl(t, "get", "endpointslices,nodes", "--output=name"); got !=
		"endpointslice.discovery.k8s.io/web-1\nnode/node-1\n" {
		t.Errorf("after the outage kubectl sees %q", got)
	}
}

// An agent has the rights of its ServiceAccount and no more.
func TestServiceAccount(t *testing.T) {
	c := cluster.Start(t)
	c.KubectlInput(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: agent}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: agent}
rules:
- {apiGroups: [""], resources: [services], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: agent}
subjects: [{kind: ServiceAccount, name: agent, namespace: default}]
`, "apply", "-f", "-")

	request, err := mustClient(t, c).CoreV1().ServiceAccounts("default").CreateToken(
		t.Context(), "agent", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	lab.Must(t, err)
	config := c.Config()
	config.BearerToken = request.Status.Token
	agent, err := kubernetes.NewForConfig(config)
	lab.Must(t, err)
	list, err := agent.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)
	if len(list.Items) != 1 || list.Items[0].Name != "kubernetes" {
		t.Errorf("a new cluster has the Services %v, want just kubernetes", list.Items)
	}
	if _, err := agent.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err == nil {
		t.Error("the agent may list nodes, want only what its role permits")
	}
}

// A test whose thread is in another network namespace has its cluster there.
func TestInNetworkNamespace(t *testing.T) {
	lab.NeedsRoot(t)
	runtime.LockOSThread() // and never back: the thread ends with the test
	if err := syscall.Unshare(syscall.CLONE_NEWNET); err != nil {
		t.Fatalf("new network namespace: %v", err)
	}
	mustRaiseLoopback(t)

	c := cluster.Start(t)

	listed := make(chan error)
	go func() { // on another thread
		client, err := kubernetes.NewForConfig(c.Config())
		if err == nil {
			_, err = client.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
		}
		listed <- err
	}()
	if err := <-listed; err != nil {
		t.Errorf("list of the nodes by a thread that is elsewhere: %v", err)
	}
	if got := c.Kubectl(t, "get", "--raw=/readyz"); got != "ok" {
		t.Errorf("kubectl sees %q, want ok", got)
	}
}

func mustClient(t *testing.T, c *cluster.Cluster) kubernetes.Interface {
	t.Helper()

	client, err := kubernetes.NewForConfig(c.Config())
	lab.Must(t, err)

	return client
}

func mustCreate[T any](
	t *testing.T, create func(context.Context, T, metav1.CreateOptions) (T, error), object T,
) T {
	t.Helper()

	created, err := create(t.Context(), object, metav1.CreateOptions{})
	lab.Must(t, err)

	return created
}

func mustRaiseLoopback(t *testing.T) {
	t.Helper()

	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	lab.Must(t, err)
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	lab.Must(t, err)
	request.SetUint16(unix.IFF_UP)
	lab.Must(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request))
}
