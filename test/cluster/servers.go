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
	"time"

	"k8s.io/client-go/rest"
)

func (c *Cluster) etcdURL() string {
	return fmt.Sprintf("http://127.0.0.1:%d", c.etcdPort.number)
}

func (c *Cluster) etcdArgs() []string {
	return []string{
		"--data-dir=" + filepath.Join(c.directory, "etcd"),
		"--listen-client-urls=" + c.etcdURL(),
		"--advertise-client-urls=" + c.etcdURL(),
		"--socket-reuse-port", // reservePort
		"--listen-peer-urls=http://127.0.0.1:0",
		"--unsafe-no-fsync",
		"--log-level=warn",
	}
}

func (c *Cluster) apiServerArgs() []string {
	args := []string{
		"--etcd-servers=" + c.etcdURL(),

		fmt.Sprintf("--secure-port=%d", c.apiServerPort.number),
		"--permit-port-sharing", // reservePort
		"--tls-cert-file=" + c.files.certificate,
		"--tls-private-key-file=" + c.files.key,

		"--token-auth-file=" + c.files.tokens,
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.files.serviceAccountKey,
		"--service-account-signing-key-file=" + c.files.serviceAccountKey,

		"--service-cluster-ip-range=" + ServiceRangeIPv4 + "," + ServiceRangeIPv6,
		"--allow-privileged",
		"--enable-priority-and-fairness=false",
	}
	if c.reachable.IsValid() {
		args = append(args,
			"--bind-address=0.0.0.0", // kubeconfigs of people have 127.0.0.1
			"--advertise-address="+c.reachable.String(),
			"--kubelet-preferred-address-types=InternalIP",
		)
	} else {
		args = append(args,
			"--bind-address=127.0.0.1",
			"--advertise-address=127.0.0.1",
			// Endpoints on loopback would be refused anyway.
			"--endpoint-reconciler-type=none",
			// These wait for a controller to create, take away or finish something.
			"--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection,TaintNodesByCondition",
		)
	}

	return append(args, c.flags...)
}

func (c *Cluster) controllerArgs() []string {
	return []string{
		"--kubeconfig=" + c.files.kubeconfig,
		"--root-ca-file=" + c.files.certificate,
		"--service-account-private-key-file=" + c.files.serviceAccountKey,
		"--leader-elect=false",
		"--secure-port=0", // serves nothing
	}
}

func (c *Cluster) schedulerArgs() []string {
	return []string{"--kubeconfig=" + c.files.kubeconfig, "--leader-elect=false", "--secure-port=0"}
}

// startAPIServer returns when the API answers. It does nothing if the API server
// runs.
func (c *Cluster) startAPIServer(ctx context.Context) error {
	if c.apiServer != nil {
		return nil
	}
	server, err := c.run("kube-apiserver", c.apiServerArgs())
	if err != nil {
		return err
	}
	c.apiServer = server
	// Ready does not yet mean that the objects of every cluster are there.
	if err := c.awaitReady(ctx, server, c.URL()+"/readyz"); err != nil {
		return err
	}

	return c.awaitReady(ctx, server, c.URL()+"/api/v1/namespaces/default/services/kubernetes")
}

// stopAPIServer kills it, without grace.
func (c *Cluster) stopAPIServer() {
	c.apiServer.kill()
	c.apiServer = nil
}

// run starts one of the binaries, which logs to a file of its name.
func (c *Cluster) run(name string, args []string) (*process, error) {
	log, err := os.OpenFile(c.logFile(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", name, err)
	}
	defer log.Close()

	cmd := exec.Command(c.Binary(name), args...)
	cmd.Stdout = log
	cmd.Stderr = log
	p, err := c.namespace.start(cmd)
	if err != nil {
		return nil, fmt.Errorf("start of %s: %w", name, err)
	}

	return p, nil
}

// awaitReady waits until url answers 200.
func (c *Cluster) awaitReady(ctx context.Context, p *process, url string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client, err := rest.HTTPClientFor(c.config)
	if err != nil {
		return fmt.Errorf("client for %s: %w", url, err)
	}
	defer client.CloseIdleConnections()

	for {
		err := get(ctx, client, url)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended instead of answering: %w", p.name(), p.err)
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %w", p.name(), ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}

func (c *Cluster) logFile(name string) string {
	return filepath.Join(c.directory, name+".log")
}

// logTails returns the last lines of the servers' logs, as far as there are any.
func (c *Cluster) logTails() string {
	const lines = 40

	var tails strings.Builder
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		log, err := os.ReadFile(c.logFile(name))
		if err != nil {
			continue
		}
		all := strings.Split(strings.TrimSpace(string(log)), "\n")
		fmt.Fprintf(&tails, "\nthe end of the log of %s:\n%s", name, strings.Join(all[max(0, len(all)-lines):], "\n"))
	}

	return tails.String()
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

// RunKubectl runs kubectl as cluster-admin and returns what it writes to its
// standard output. Input is its standard input, as for "apply -f -". The error of
// one that fails includes what it printed.
func (c *Cluster) RunKubectl(input string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := c.KubectlCommand(args...)
	cmd.Stdin = strings.NewReader(input)
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr

	p, err := c.namespace.start(cmd)
	if err == nil {
		err = p.wait()
	}
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, &stderr)
	}

	return stdout.String(), nil
}

// KubectlCommand returns a command that is kubectl as cluster-admin, to be started in the
// servers' network namespace.
func (c *Cluster) KubectlCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(c.Binary("kubectl"), args...)
	// Its home holds a discovery cache, and might hold a user's preferences.
	cmd.Env = append(os.Environ(), "HOME="+c.directory, "KUBECONFIG="+c.Kubeconfig())

	return cmd
}
