package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/transport"

	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// TestKubectl asks the nodes of one world.
func TestKubectl(t *testing.T) {
	w := mustWorld(t)
	t.Run("a verb runs on the right nodes", func(t *testing.T) { testVerbs(t, w) })
	t.Run("JSON has an answer or an error for each node", func(t *testing.T) { testJSON(t, w) })
	t.Run("rows that nodes do not share name their node", func(t *testing.T) { testDifferences(t, w) })
	t.Run("connections of all nodes are one table", func(t *testing.T) { testConnections(t, w) })
	t.Run("rates of all nodes are added up", func(t *testing.T) { testTop(t, w) })
	t.Run("an explanation is that of the pod's node", func(t *testing.T) { testExplain(t, w) })
	t.Run("what a change would do is told by each node", func(t *testing.T) { testChange(t, w) })
	t.Run("SPDY serves where WebSocket does not pass", func(t *testing.T) { testFallback(t, w) })
	t.Run("a node that hangs does not hold up the others", func(t *testing.T) { testHang(t, w) })
	t.Run("the page shows what nodes answer", func(t *testing.T) { testUI(t, w) })
	t.Run("what is followed on nodes ends with the plugin", func(t *testing.T) { testMonitor(t, w) })
	t.Run("names are completed", func(t *testing.T) { testCompletion(t, w) })
}

func testVerbs(t *testing.T, w *world) {
	for _, test := range []struct {
		name string
		args string
		code int
		out  []string // in this order
		errs []string
	}{
		{
			"status is a table of nodes", "status", 2,
			[]string{"NODE", "AGENT", "node-1   test", "ok\n", "node-2   test", "ok\n", "node-3   -", "NO ANSWER: the kubelet at 127.0.0.1:", "connection refused\n",
				"node-1, node-2: not covered: ", "differs: pins: ", "no pod of Sluice: node-0: what an agent programmed there stays in force"},
			nil,
		},
		{
			"rows that nodes share are there once", "services --node node-1,node-2", 0,
			[]string{"SEEN ON   SERVICE", "all 2     shop/empty", "all 2     shop/web:http   ClusterIP", "all 2     shop/web:http   NodePort"}, nil,
		},
		{
			"texts that nodes share are there once", "verify", 2,
			[]string{"== node-1, node-2\n", "0 differences\n", "node-3: NO ANSWER: the kubelet at 127.0.0.1:"}, nil,
		},
		{
			"a name gets its namespace", "services web -n shop --node node-2", 0,
			[]string{"== node-2\n", "shop/web (NodePort): ok"}, nil,
		},
		{
			"a name in another namespace is not found", "services web -n default --node node-2", 1,
			nil, []string{`node-2: sluice: no Service is called "default/web"`},
		},
		{"the node of a pod is asked", "services pod/web-1", 0, []string{"node-1    shop/empty"}, nil},
		{"flags reach the node", "verify --against nosuch --node node-1", 1, nil, []string{`--against "nosuch": it is kube-proxy`}},
		{
			"the doctor gets the agent's flags", "doctor --node node-1", 0,
			[]string{"== node-1\n", "eth0 (not among --devices)", "problems: 0"}, nil,
		},
		{"no such pod", "services pod/nosuch", 1, nil, []string{`pod default/nosuch: pods "nosuch" not found`}},
		{"another node than the pod's", "services pod/web-1 --node node-2", 1, nil, []string{"pod default/web-1 is on node node-1"}},
		{"a pod that no node has", "connections --pod nosuch --node node-1,node-2", 1, nil, []string{"--pod nosuch: no node that was asked has such a pod"}},
		{"a pod that no node has, followed", "monitor --pod nosuch -n shop --node node-1,node-2", 1, nil, []string{"--pod shop/nosuch: no node that was asked has such a pod"}},
		{"a Service that there is not, followed", "monitor --service shop/nosuch --node node-1,node-2", 1, nil, []string{`all 2: sluice: --service: no Service is called "shop/nosuch"`}},
		{"a namespace without a name", "backends --namespace shop", 1, nil, []string{"--namespace shop: it completes the name of a Service or pod"}},
		{"no such node", "status --node nosuch", 1, nil, []string{`node "nosuch" has no pod of Sluice in namespace kube-system`}},
		{"no right to look for it", "status --sluice-namespace default", 1, nil, []string{"pods of Sluice in namespace default", "cannot list"}},
		{"too many arguments", "version now", 1, nil, []string{`unknown command "now"`}},
		{"what changes a node is not there", "cleanup", 1, nil, []string{`unknown command "cleanup"`}},
		{"the agent is not there", "agent", 1, nil, []string{`unknown command "agent"`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			out, errs, code := w.kubectl(t, append([]string{"sluice"}, strings.Fields(test.args)...)...)
			if code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			if missing := inOrder(out, test.out...); missing != "" {
				t.Errorf("%q is not in:\n%s", missing, out)
			}
			if missing := inOrder(errs, test.errs...); missing != "" {
				t.Errorf("%q is not in:\n%s", missing, errs)
			}
			if t.Failed() {
				t.Logf("outputs:\n%s\n%s", out, errs)
			}
		})
	}
}

func testJSON(t *testing.T, w *world) {
	answers, code := w.ask(t, "services", "shop/web")
	if code != 2 || len(answers) != 3 {
		t.Fatalf("exit code %d, want 2; %d answers, want 3: %+v", code, len(answers), answers)
	}
	for _, a := range answers[:2] {
		var svc status.Service
		lab.Must(t, json.Unmarshal(a.Answer, &svc))
		if svc.Name != "shop/web" || a.ExitCode != 0 || a.Error != "" {
			t.Errorf("the answer is %+v", a)
		}
	}
	if a := answers[2]; a.Node != "node-3" || a.ExitCode != 2 || !strings.Contains(a.Error, "connection refused") || a.Answer != nil {
		t.Errorf("of a node that does not answer: %+v", a)
	}
}

// ask runs a verb with -o json.
func (w *world) ask(t testing.TB, args ...string) (answers []remote.NodeAnswer, code int) {
	t.Helper()
	out, errs, code := w.kubectl(t, append(append([]string{"sluice"}, args...), "-o", "json")...)
	if err := json.Unmarshal([]byte(out), &answers); err != nil {
		t.Fatalf("%v: %s%s", err, out, errs)
	}

	return answers, code
}

// testDifferences has connections from a pod of node-1 and a flow that came to node-2.
func testDifferences(t *testing.T, w *world) {
	w.mustConnect(t)
	out, errs, _ := w.kubectl(t, "sluice", "backends")
	for _, want := range []string{"node-1 ", "node-2 "} {
		if !strings.Contains(out, "\n"+want) {
			t.Errorf("the backends have other connections on each node, and no row of %s: %s%s", want, out, errs)
		}
	}
	out, errs, _ = w.kubectl(t, "sluice", "flows", "shop/web")
	if missing := inOrder(out, "SEEN ON   SERVICE", "node-2    shop/web:http", "192.168.50.100"); missing != "" || strings.Contains(out, "node-1    ") {
		t.Errorf("%q is not in, or the flow is on the wrong node: %s%s", missing, out, errs)
	}
}

func testConnections(t *testing.T, w *world) {
	w.mustConnect(t)
	out, errs, code := w.kubectl(t, "sluice", "connections", "--node", "node-1,node-2", "--service", "web", "--namespace", "shop")
	if code != 0 || strings.Count(out, "\nnode-1    shop/web:http") != 3 || strings.Contains(out, "node-2    ") {
		t.Errorf("exit code %d; the three connections of node-1 are not what it shows: %s%s", code, out, errs)
	}
	_, errs, code = w.kubectl(t, "sluice", "connections", "--kill", "--service", "shop/web")
	if code != 1 || !strings.Contains(errs, "add --yes") {
		t.Errorf("nodes cannot ask before they end connections: exit code %d: %s", code, errs)
	}
}

func testTop(t *testing.T, w *world) {
	w.mustConnect(t)
	out, errs, code := w.kubectl(t, "sluice", "top", "--once")
	if missing := inOrder(out, "2 of 3 nodes\n", "  11 live, ", "\nSERVICE ", "\nshop/web   11 ", "node-1, node-2\n", "node-3: NO ANSWER: "); missing != "" || code != 2 {
		t.Errorf("exit code %d; %q is not in: %s%s", code, missing, out, errs)
	}
}

func testExplain(t *testing.T, w *world) {
	out, errs, code := w.kubectl(t, "sluice", "explain", "pod/web-1", "--to", "empty:80", "--namespace", "shop")
	if code != 1 || !strings.Contains(errs, "pod shop/web-1: ") {
		t.Errorf("there is no such pod in the namespace: exit code %d: %s%s", code, out, errs)
	}
	out, errs, code = w.kubectl(t, "sluice", "explain", "pod/web-1", "--to", "shop/web")
	if missing := inOrder(out, "== node-1\n", "client     10.244.1.2, a pod of this node", "10.244.2.2:8080 "); missing != "" || code != 0 {
		t.Errorf("from a pod: exit code %d; %q is not in: %s%s", code, missing, out, errs)
	}
	out, errs, code = w.kubectl(t, "sluice", "explain", "--node", "node-1", "--to", "empty:80", "--namespace", "shop")
	if missing := inOrder(out, "== node-1\n", "reject_no_backend"); missing != "" || code != 0 {
		t.Errorf("exit code %d; %q is not in: %s%s", code, missing, out, errs)
	}
}

// The endpoint on node-2 is to go, and a Service to come whose endpoint is nowhere.
func testChange(t *testing.T, w *world) {
	w.mustConnect(t)
	file := filepath.Join(t.TempDir(), "change.yaml")
	slice := strings.Replace(strings.Split(objects, "---")[1], "- {addresses: [10.244.2.2], nodeName: node-2}\n", "", 1)
	lab.Must(t, os.WriteFile(file, []byte(slice), 0o600))
	all := []string{"sluice", "explain", "--node", "node-1,node-2", "-f", file}
	out, errs, code := w.kubectl(t, all...)
	// Backends are chosen at random: all three clients of node-1 may be with the one that stays, but hardly all eleven of both.
	if missing := inOrder(out, "of this node's clients are with endpoints that go\n"); missing != "" {
		t.Errorf("%q is not in: %s%s", missing, out, errs)
	}
	if missing := inOrder(out, "== node-1\n", "Service shop/web: changed\n",
		"10.244.1.2:8080   TCP        50 %   100 %", "10.244.2.2:8080   TCP        50 %   -       goes    ", "== node-2\n"); missing != "" || code != 0 {
		t.Errorf("exit code %d; %q is not in: %s%s", code, missing, out, errs)
	}
	lab.Must(t, os.WriteFile(file, []byte(strings.NewReplacer("10.96.0.2", "10.96.0.3", "name: empty", "name: new").Replace(strings.Split(objects, "---")[2])), 0o600))
	out, errs, code = w.kubectl(t, all...)
	if missing := inOrder(out, "Service shop/new: new\n", "frontend     shop/new ClusterIP 10.96.0.3:80: comes\n"); missing != "" || code != 1 || !strings.Contains(errs, "no endpoint would serve new connections to shop/new") {
		t.Errorf("exit code %d; %q is not in: %s%s", code, missing, out, errs)
	}
	out, errs, code = w.kubectl(t, append(all, "--deleted")...)
	if code != 0 || !strings.Contains(out, "nothing would change") {
		t.Errorf("there is no such Service: exit code %d: %s%s", code, out, errs)
	}
	lab.Must(t, os.WriteFile(file, []byte("a: ["), 0o600))
	if out, errs, code = w.kubectl(t, all...); code != 2 || !strings.Contains(errs, "change: ") {
		t.Errorf("no YAML: exit code %d: %s%s", code, out, errs)
	}
	for i, agent := range w.agents {
		if services, err := agent.Services(); err != nil || len(services) != 2 {
			t.Errorf("node-%d has %d Services after questions only: %v", i+1, len(services), err)
		}
	}
}

// mustConnect opens connections that stay: three from a pod of node-1, and eight from outside by way of node-2.
func (w *world) mustConnect(t testing.TB) {
	t.Helper()
	for _, from := range []struct {
		*lab.Caller
		to    string
		count int
	}{
		{lab.MustCaller(t, w.lab.Nodes[0].Pods[1].Namespace, w.cgroups[0]), "10.96.0.1:80", 3},
		{lab.MustCaller(t, w.lab.Client.Namespace, nil), "192.168.50.2:30080", 8},
	} {
		load, err := from.StartLoad(lab.Load{Exchange: lab.Exchange{Network: "tcp", Address: from.to}, Rate: 20, Keep: from.count})
		lab.Must(t, err)
		t.Cleanup(func() {
			report, err := load.Stop()
			lab.Must(t, err)
			if len(report.Failures) > 0 {
				t.Errorf("connections to %s: %v", from.to, report.Failures)
			}
		})
	}
	for i, want := range []int{3, 8} {
		lab.Eventually(t, "all connections are counted", func() error {
			if got := connections(t, w.agents[i]); got != want {
				return fmt.Errorf("%s has %d, want %d", w.lab.Nodes[i].Name, got, want)
			}

			return nil
		})
	}
}

// connections returns how many connections backends have from a node.
func connections(t testing.TB, agent *sluice.Node) (count int) {
	t.Helper()
	services, err := agent.Services()
	lab.Must(t, err)
	for _, svc := range services {
		for _, port := range svc.Ports {
			for _, backend := range port.Backends {
				count += backend.Connections
			}
		}
	}

	return count
}

// testFallback: a proxy before the API server refuses WebSockets.
func testFallback(t *testing.T, w *world) {
	target, err := url.Parse(w.URL())
	lab.Must(t, err)
	config, err := w.Config().TransportConfig()
	lab.Must(t, err)
	config.BearerToken = ""                      // the client sends its own
	config.TLS.NextProtos = []string{"http/1.1"} // HTTP/2 has no upgrades
	roundTripper, err := transport.New(config)
	lab.Must(t, err)
	var refused, upgraded atomic.Int32
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport = roundTripper
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch strings.ToLower(r.Header.Get("Upgrade")) {
		case "websocket":
			refused.Add(1)
			http.Error(rw, "no WebSockets here", http.StatusForbidden)
		case "spdy/3.1":
			upgraded.Add(1)
			proxy.ServeHTTP(rw, r)
		default:
			proxy.ServeHTTP(rw, r)
		}
	}))
	t.Cleanup(server.Close)
	out, errs, code := w.kubectl(t, "sluice", "version", "--node", "node-1", "--server", server.URL, "--insecure-skip-tls-verify")
	if code != 0 || refused.Load() != 1 || upgraded.Load() != 1 || !strings.Contains(out, "sluice test") {
		t.Errorf("exit code %d, %d WebSockets refused, %d by SPDY: %s%s", code, refused.Load(), upgraded.Load(), out, errs)
	}
}

// testHang: a kubelet takes requests and does not answer.
func testHang(t *testing.T, w *world) {
	gone := make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-gone }))
	t.Cleanup(func() { close(gone); server.Close() })
	w.mustCreateNode(t, "node-4", portOf(t, server.Listener.Addr()))
	begin := time.Now()
	out, _, code := w.kubectl(t, "sluice", "version", "--timeout", "2s")
	if missing := inOrder(out, "== node-1, node-2\n", "node-3: NO ANSWER: ", "node-4: NO ANSWER: no answer after 2s\n"); missing != "" || code != 2 {
		t.Errorf("exit code %d; %q is not in: %s", code, missing, out)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	lab.Must(t, w.client.CoreV1().Nodes().Delete(t.Context(), "node-4", metav1.DeleteOptions{}))
	lab.Must(t, w.client.CoreV1().Pods("kube-system").Delete(t.Context(), "sluice-node-4", *metav1.NewDeleteOptions(0)))
}

// testCompletion runs what kubectl runs when a person presses the tab key.
func testCompletion(t *testing.T, w *world) {
	for args, want := range map[string]string{
		"serv":                          "services\t",
		"services sh":                   "default/kubernetes",
		"backends --namespace shop --o": "--output\t",
		"status --node node-1,":         "node-3",
	} {
		cmd := w.command(t)
		cmd.Path, cmd.Args = w.folder+"/kubectl_complete-sluice", append([]string{"kubectl_complete-sluice"}, strings.Split(args, " ")...)
		out, err := cmd.Output()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%q is completed by %q, %v, want %q", args, out, err, want)
		}
	}
}

// A verb that the plugin has started on a node ends when the plugin has gone, which closes its input. Container
// runtimes do not end it.
func TestVerbEndsWithItsInput(t *testing.T) {
	namespace := lab.MustNamespace(t, "input")
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: namespace, Cgroup: lab.MustCgroup(t, "input"),
	})
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, node.Close()) })
	verb := []string{"--end-with-stdin", "agent", "--manifests", t.TempDir(), "--hostname-override", "node-1", "--flow-table-memory", "4Mi"}
	cmd := exec.Command(node.Binary(), append(node.Places(), verb...)...)
	input, err := cmd.StdinPipe()
	lab.Must(t, err)
	lab.Must(t, lab.Start(namespace, node.AgentCgroup(), cmd))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lab.Must(t, node.WaitSynced(ctx))
	lab.Must(t, input.Close())
	select {
	case err := <-ended:
		lab.Must(t, err)
	case <-time.After(10 * time.Second):
		t.Error("it goes on without its input")
	}
}
