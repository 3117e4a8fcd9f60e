// Package cluster gives a test a real Kubernetes API: etcd and a
// kube-apiserver of the versions that binaries/go.mod pins, and kubectl to go
// with them.
//
// It is not a whole cluster. No kube-controller-manager, scheduler or kubelet
// runs, so nobody writes EndpointSlices, Nodes or statuses but the test.
package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// The ranges from which the API server allocates cluster IPs. 10.96.0.1
// belongs to the Service default/kubernetes.
const (
	ServiceRangeIPv4 = "10.96.0.0/16"
	ServiceRangeIPv6 = "fd00:10:96::/112"
)

const (
	// readyTimeout is generous: a start takes some seconds on an idle machine,
	// but the machine may be compiling.
	readyTimeout = 3 * time.Minute
	pollInterval = 50 * time.Millisecond
)

// Cluster is a running etcd and kube-apiserver. Its methods may be called from
// any goroutine, except that StopAPIServer and StartAPIServer are for one at a
// time.
type Cluster struct {
	binaries  string // folder of the executables
	directory string // all files of this cluster
	flags     []string
	namespace *namespace

	etcdURL string
	port    int // the API server's
	files   credentials
	config  *rest.Config

	etcd      *process
	apiServer *process // nil during an outage
}

// Start runs etcd and a kube-apiserver on free ports of 127.0.0.1, and returns
// when the API answers and holds the Service default/kubernetes. Both end with
// the test, and even if the test binary is killed. If the test fails, the tails
// of their logs go to its log.
//
// The API server authorizes by RBAC. It admits Pods without ServiceAccount
// controller and Nodes without a not-ready taint, and keeps the endpoints of
// default/kubernetes empty.
//
// The first Start on a machine builds the binaries, which takes minutes; see
// build.sh. With SLUICE_TEST_BINARIES set, it takes them from that folder
// instead, which needs neither the Go toolchain nor the source tree.
//
// The API server gets these flags besides its own.
//
// If the calling goroutine is locked to a thread in another network namespace,
// the servers listen on the loopback device of that one, which the caller has
// brought up. [Cluster.Config] and [Cluster.Kubectl] then reach them from any
// thread; for everybody else it takes a thread or process in that namespace.
// This needs CAP_SYS_ADMIN.
func Start(t testing.TB, flags ...string) *Cluster {
	t.Helper()

	c := &Cluster{
		directory: t.TempDir(),
		flags:     flags,
		binaries:  mustFindBinaries(t),
		namespace: mustCurrentNamespace(t),
		port:      mustReservePort(t),
		etcdURL:   fmt.Sprintf("http://127.0.0.1:%d", mustReservePort(t)),
	}
	c.files = mustWriteCredentials(t, c.directory, c.URL())
	c.config = c.files.config(c.URL())
	if c.namespace.foreign {
		c.config.Dial = c.namespace.dial
	}

	t.Cleanup(func() {
		c.apiServer.kill()
		c.etcd.kill()
		if t.Failed() {
			c.logTails(t)
		}
	})
	c.etcd = c.mustRun(t, "etcd", c.etcdArgs())
	c.mustBecomeReady(t, c.etcd, c.etcdURL+"/readyz")
	c.StartAPIServer(t)

	return c
}

// Config returns how a client reaches the API server as cluster-admin, without
// a limit to its rate. The caller owns it.
func (c *Cluster) Config() *rest.Config {
	return rest.CopyConfig(c.config)
}

// Kubeconfig returns the path of a file that says what [Cluster.Config] says.
// It goes away with the test.
func (c *Cluster) Kubeconfig() string {
	return c.files.kubeconfig
}

// URL returns the API server's base URL, https://127.0.0.1:port. It stays the
// same over an outage.
func (c *Cluster) URL() string {
	return fmt.Sprintf("https://127.0.0.1:%d", c.port)
}

// Binary returns the path of one of the executables that build.sh builds, such as
// kube-proxy.
func (c *Cluster) Binary(name string) string {
	return filepath.Join(c.binaries, name)
}

// Kubectl runs kubectl as cluster-admin and returns what it writes to its
// standard output. The test fails if kubectl does.
func (c *Cluster) Kubectl(t testing.TB, args ...string) string {
	t.Helper()

	return c.KubectlInput(t, "", args...)
}

// KubectlInput is [Cluster.Kubectl] with a standard input, as for
// "apply -f -".
func (c *Cluster) KubectlInput(t testing.TB, input string, args ...string) string {
	t.Helper()

	var stdout, stderr bytes.Buffer
	cmd := exec.Command(c.Binary("kubectl"), args...)
	cmd.Stdin = strings.NewReader(input)
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	// Its home holds a discovery cache, and might hold somebody's preferences.
	cmd.Env = append(os.Environ(), "HOME="+c.directory, "KUBECONFIG="+c.Kubeconfig())

	p, err := c.namespace.start(cmd)
	if err == nil {
		err = p.wait()
	}
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, &stderr)
	}

	return stdout.String()
}

// StopAPIServer begins an outage: it kills the API server and waits for its
// end, without grace. Connections to its port are refused from then on, and
// nobody else gets the port. It does nothing during an outage.
func (c *Cluster) StopAPIServer(t testing.TB) {
	t.Helper()

	c.apiServer.kill()
	c.apiServer = nil
}

// StartAPIServer ends an outage. It returns when the API answers again, at the
// same URL, with the objects that it had. It does nothing if there is no
// outage.
func (c *Cluster) StartAPIServer(t testing.TB) {
	t.Helper()

	if c.apiServer != nil {
		return
	}
	c.apiServer = c.mustRun(t, "kube-apiserver", c.apiServerArgs())
	// Ready does not yet mean that the objects of every cluster are there.
	c.mustBecomeReady(t, c.apiServer, c.URL()+"/readyz")
	c.mustBecomeReady(t, c.apiServer, c.URL()+"/api/v1/namespaces/default/services/kubernetes")
}

func (c *Cluster) etcdArgs() []string {
	return []string{
		"--data-dir=" + filepath.Join(c.directory, "etcd"),
		"--listen-client-urls=" + c.etcdURL,
		"--advertise-client-urls=" + c.etcdURL,
		"--socket-reuse-port", // mustReservePort
		"--listen-peer-urls=http://127.0.0.1:0",
		"--unsafe-no-fsync",
		"--log-level=warn",
	}
}

func (c *Cluster) apiServerArgs() []string {
	return append([]string{
		"--etcd-servers=" + c.etcdURL,

		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", c.port),
		"--permit-port-sharing", // mustReservePort
		"--tls-cert-file=" + c.files.certificate,
		"--tls-private-key-file=" + c.files.key,

		"--token-auth-file=" + c.files.tokens,
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.files.serviceAccountKey,
		"--service-account-signing-key-file=" + c.files.serviceAccountKey,

		"--service-cluster-ip-range=" + ServiceRangeIPv4 + "," + ServiceRangeIPv6,
		// Endpoints on loopback would be refused anyway.
		"--endpoint-reconciler-type=none",

		// These wait for a controller to create, take away or finish something.
		"--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection,TaintNodesByCondition",
		"--allow-privileged",
		"--enable-priority-and-fairness=false",
	}, c.flags...)
}

// mustRun starts one of the binaries, which logs to a file of its name.
func (c *Cluster) mustRun(t testing.TB, name string, args []string) *process {
	t.Helper()

	log, err := os.OpenFile(c.logFile(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatalf("log of %s: %v", name, err)
	}
	defer log.Close()

	cmd := exec.Command(c.Binary(name), args...)
	cmd.Stdout = log
	cmd.Stderr = log
	p, err := c.namespace.start(cmd)
	if err != nil {
		t.Fatalf("start of %s: %v", name, err)
	}

	return p
}

// mustBecomeReady waits until url answers 200.
func (c *Cluster) mustBecomeReady(t testing.TB, p *process, url string) {
	t.Helper()

	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	client, err := rest.HTTPClientFor(c.config)
	if err != nil {
		t.Fatalf("client for %s: %v", url, err)
	}
	defer client.CloseIdleConnections()

	for {
		err := get(ctx, client, url)
		if err == nil {
			return
		}
		select {
		case <-p.exited:
			t.Fatalf("%s ended instead of answering: %v", p.name(), p.err)
		case <-ctx.Done():
			t.Fatalf("%s is not ready after %v: %v", p.name(), readyTimeout, err)
		case <-time.After(pollInterval):
		}
	}
}

func (c *Cluster) logFile(name string) string {
	return filepath.Join(c.directory, name+".log")
}

func (c *Cluster) logTails(t testing.TB) {
	const lines = 40

	for _, name := range []string{"etcd", "kube-apiserver"} {
		log, err := os.ReadFile(c.logFile(name))
		if err != nil {
			continue
		}
		all := strings.Split(strings.TrimSpace(string(log)), "\n")
		t.Logf("the end of the log of %s:\n%s", name, strings.Join(all[max(0, len(all)-lines):], "\n"))
	}
}

// get asks for url once. Any answer but 200 is an error that quotes it.
func get(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()

	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s: %s", url, response.Status, body)
	}

	return nil
}
