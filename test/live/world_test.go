// Package live runs the verbs that show live connections, `sluice connections` and `sluice top`, with real
// sockets and a real terminal.
package live

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("cni")
	os.Exit(m.Run())
}

// world is a node with an agent that follows manifests, a pod with processes that dial, and two pods that
// answer.
//
//	node 192.168.50.1 ─┬─ web-0  10.244.1.2
//	                   ├─ red    10.244.1.3:8080
//	                   └─ green  10.244.1.4:8080
//
// The Service shop/db has the ports sql (TCP, 10.96.0.1:5432) and stats (UDP, 10.96.0.1:8125), shop/cache has
// 10.96.0.2:6379 and fd00:10:96::2:6379, shop/logs has UDP 10.96.0.4:9001 to 9006, and shop/empty, 10.96.0.3:80,
// has no endpoint.
type world struct {
	agent   *sluice.Node
	node    *lab.Node
	web     *lab.Pod
	cgroup  *lab.Cgroup // of the node
	podLogs string
}

const webUID = "0e4f2b6e-6d0a-4c1f-9a57-93d1f0f0a001"

func mustWorld(t *testing.T, args ...string) *world {
	t.Helper()
	w := &world{cgroup: lab.MustCgroup(t, "live"), podLogs: t.TempDir()}
	w.node = lab.MustNew(t, lab.Config{Nodes: 1, PodsPerNode: 3}).Nodes[0]
	w.web = w.node.Pods[0]
	for i, name := range []string{"red", "green"} {
		pod := w.node.Pods[i+1]
		lab.MustServe(t, pod.Namespace, name, pod.At(8080)...)
	}
	lab.Must(t, os.Mkdir(filepath.Join(w.podLogs, "shop_web-0_"+webUID), 0o755))
	manifests := t.TempDir()
	lab.Must(t, os.WriteFile(filepath.Join(manifests, "shop.yaml"), []byte(w.manifests()), 0o644))
	w.agent = sluice.MustNode(t, sluice.Config{Namespace: w.node.Namespace, Cgroup: w.cgroup, Manifests: manifests, Args: args})

	return w
}

// manifests are the Services and their endpoints.
func (w *world) manifests() string {
	red, green := w.node.Pods[1], w.node.Pods[2]
	var all strings.Builder
	service := func(name, spec string) {
		fmt.Fprintf(&all, "apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: shop}\nspec: %s\n---\n", name, spec)
	}
	slice := func(service, family, ports string, addresses ...any) {
		fmt.Fprintf(&all, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n"+
			"metadata: {name: %s-%s, namespace: shop, labels: {kubernetes.io/service-name: %[1]s}}\naddressType: %[3]s\nports: [%s]\nendpoints:\n",
			service, strings.ToLower(family), family, ports)
		for _, address := range addresses {
			fmt.Fprintf(&all, "- {addresses: [%q]}\n", address)
		}
		all.WriteString("---\n")
	}
	service("db", "{clusterIP: 10.96.0.1, ports: [{name: sql, port: 5432, protocol: TCP}, {name: stats, port: 8125, protocol: UDP}]}")
	slice("db", "IPv4", "{name: sql, port: 8080, protocol: TCP}, {name: stats, port: 8080, protocol: UDP}", red.IPv4)
	service("cache", `{clusterIP: 10.96.0.2, clusterIPs: [10.96.0.2, "fd00:10:96::2"], ports: [{port: 6379, protocol: TCP}]}`)
	slice("cache", "IPv4", "{port: 8080, protocol: TCP}", green.IPv4)
	slice("cache", "IPv6", "{port: 8080, protocol: TCP}", green.IPv6)
	var ports, targets []string
	for i := 1; i <= 6; i++ {
		ports = append(ports, fmt.Sprintf("{name: p%d, port: %d, protocol: UDP}", i, 9000+i))
		targets = append(targets, fmt.Sprintf("{name: p%d, port: 8080, protocol: UDP}", i))
	}
	service("logs", "{clusterIP: 10.96.0.4, ports: ["+strings.Join(ports, ", ")+"]}")
	slice("logs", "IPv4", strings.Join(targets, ", "), red.IPv4, green.IPv4)
	service("empty", "{clusterIP: 10.96.0.3, ports: [{port: 80, protocol: TCP}]}")

	return all.String()
}

// pod starts a process of the pod web-0, in a cgroup as the kubelet makes it.
func (w *world) pod(t *testing.T) *lab.Caller {
	t.Helper()
	cgroup := w.cgroup
	for _, name := range []string{"kubepods-pod" + strings.ReplaceAll(webUID, "-", "_") + ".slice", "app"} {
		child, err := cgroup.Child(name)
		lab.Must(t, err)
		cgroup = child
	}

	return lab.MustCaller(t, w.web.Namespace, cgroup)
}

// host starts a process of the node.
func (w *world) host(t *testing.T) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, w.node.Namespace, w.cgroup)
}

// mustDial returns a socket that has connected to an address.
func mustDial(t *testing.T, client *lab.Caller, network, to string) *lab.Socket {
	t.Helper()
	s, err := client.Socket(network)
	lab.Must(t, err)
	lab.Must(t, s.Connect(to))

	return s
}

// mustExchange sends a text and receives an answer.
func mustExchange(t *testing.T, s *lab.Socket, text string) {
	t.Helper()
	lab.Must(t, s.Send(text))
	_, _, err := s.Recv()
	lab.Must(t, err)
}

// run runs a verb with an input, and returns its output, its messages and its error.
func (w *world) run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, notes bytes.Buffer
	err = w.agent.Exec(&out, &notes, args...)

	return out.String(), notes.String(), err
}
