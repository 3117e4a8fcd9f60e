// Package cluster is a real Kubernetes API for tests and benchmarks: etcd and a
// kube-apiserver of the versions that binaries/go.mod pins, and kubectl to go
// with them.
//
// It is not a whole cluster. No kubelet runs, and no kube-controller-manager or
// scheduler unless [Config] asks for them, so only the caller writes EndpointSlices,
// Nodes and statuses. Package realcluster adds the nodes.
//
// The core does not use testing.T: [New] returns errors, and what it returns has a
// Close. [Start] and all that takes a testing.TB are the same for tests.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
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

// Config is how a [Cluster] is set up.
type Config struct {
	// Directory gets all files of the cluster. It exists and is empty, and the caller
	// removes it when the cluster is closed.
	Directory string
	// Flags are the API server's besides its own. Of several with the same name
	// it takes the last.
	Flags []string
	// Address is set for a cluster that gets nodes: an address of the servers' network
	// namespace that nodes and pods reach. The API server listens there, the Service
	// default/kubernetes leads there, and a kube-controller-manager and a scheduler
	// run.
	Address netip.Addr
}

// Cluster is a running etcd and kube-apiserver. Its methods may be called from
// any goroutine, but StopAPIServer, StartAPIServer and Close not at the
// same time.
type Cluster struct {
	binaries  string // folder of the executables
	directory string // all files of this cluster
	flags     []string
	reachable netip.Addr // Config.Address
	namespace *namespace

	etcdPort      *port
	apiServerPort *port
	files         credentials
	config        *rest.Config

	etcd      *process
	apiServer *process // nil during an outage

	controllers *process // nil without an Address
	scheduler   *process
}

// New runs etcd and a kube-apiserver on free ports of 127.0.0.1, and returns
// when the API answers and holds the Service default/kubernetes, or with an error
// when ctx ends before. Both end with Close, and even if this process is killed. If
// they do not start, the error quotes the ends of their logs.
//
// The API server authorizes by RBAC. Without controllers, it admits Pods without
// tokens and Nodes without a not-ready taint, and keeps the endpoints of
// default/kubernetes empty.
//
// The first New on a machine builds the binaries, which takes minutes; see
// build.sh. With SLUICE_TEST_BINARIES set, it takes them from that folder
// instead, which needs neither the Go toolchain nor the source tree.
//
// If the calling goroutine is locked to a thread in another network namespace,
// the servers listen on the loopback device of that one, which the caller has
// brought up. [Cluster.Config] and [Cluster.RunKubectl] then reach them from any
// thread; other clients need a thread or process in that namespace.
// This needs CAP_SYS_ADMIN.
func New(ctx context.Context, cfg Config) (*Cluster, error) {
	c := &Cluster{directory: cfg.Directory, flags: cfg.Flags, reachable: cfg.Address}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start of the cluster: %w%s", err, c.logTails()), c.Close())
	}

	return c, nil
}

func (c *Cluster) start(ctx context.Context) (err error) {
	var names []string
	if c.reachable.IsValid() {
		names = ofNodes
	}
	if c.binaries, err = findBinaries(ctx, names...); err != nil {
		return err
	}
	if c.namespace, err = currentNamespace(); err != nil {
		return err
	}
	if c.etcdPort, err = reservePort(); err != nil {
		return err
	}
	if c.apiServerPort, err = reservePort(); err != nil {
		return err
	}
	if c.files, err = writeCredentials(c.directory, c.URL(), c.reachable); err != nil {
		return err
	}
	c.config = c.files.config(c.URL())
	if c.namespace.foreign {
		c.config.Dial = c.namespace.dial
	}
	if c.etcd, err = c.run("etcd", c.etcdArgs()); err != nil {
		return err
	}
	if err := c.awaitReady(ctx, c.etcd, c.etcdURL()+"/readyz"); err != nil {
		return err
	}

	if err := c.startAPIServer(ctx); err != nil || !c.reachable.IsValid() {
		return err
	}
	if c.controllers, err = c.run("kube-controller-manager", c.controllerArgs()); err != nil {
		return err
	}
	c.scheduler, err = c.run("kube-scheduler", c.schedulerArgs())

	return err
}

// Close ends all servers. Closing twice is not an error.
func (c *Cluster) Close() error {
	c.scheduler.kill()
	c.controllers.kill()
	c.stopAPIServer()
	c.etcd.kill()
	c.etcd = nil

	var err error
	for _, p := range []*port{c.etcdPort, c.apiServerPort} {
		if p != nil {
			err = errors.Join(err, p.close())
		}
	}
	if c.namespace != nil {
		err = errors.Join(err, c.namespace.close())
	}

	return err
}

// Config returns how a client reaches the API server as cluster-admin, without
// a limit to its rate. The caller owns it.
func (c *Cluster) Config() *rest.Config {
	return rest.CopyConfig(c.config)
}

// Kubeconfig returns the path of a file with the content of [Cluster.Config].
// It goes away with the cluster's directory.
func (c *Cluster) Kubeconfig() string {
	return c.files.kubeconfig
}

// URL returns the API server's base URL, https://127.0.0.1:port or that of
// [Config.Address]. It stays the same over an outage.
func (c *Cluster) URL() string {
	return "https://" + c.address()
}

// address is where the API server listens.
func (c *Cluster) address() string {
	if c.reachable.IsValid() {
		return fmt.Sprintf("%s:%d", c.reachable, c.apiServerPort.number)
	}

	return fmt.Sprintf("127.0.0.1:%d", c.apiServerPort.number)
}

// Binary returns the path of one of the executables that build.sh builds, such as
// kube-proxy.
func (c *Cluster) Binary(name string) string {
	return filepath.Join(c.binaries, name)
}

// BinaryFolder returns the folder of [Cluster.Binary].
func (c *Cluster) BinaryFolder() string { return c.binaries }
