// Package realcluster is a whole Kubernetes cluster on one machine: a control plane,
// and nodes with containerd and a kubelet that run pods from images. Sluice is
// installed from deploy/ with kubectl, as the DaemonSet that it is; there is no
// kube-proxy. CoreDNS answers behind its ClusterIP.
//
// The network is that of package lab:
//
//	┌ node-1 ──────────────────────┐   ┌ node-2 ──────────────────────┐
//	│ pods 10.244.1.x              │   │ pods 10.244.2.x              │
//	│  ┊ veth, by CNI's bridge     │   │  ┊                           │
//	│ br0 10.244.1.1/24            │   │ br0 10.244.2.1/24            │
//	│ kubelet, containerd, sluice  │   │ kubelet, containerd, sluice  │
//	│ eth0 192.168.50.1            │   │ eth0 192.168.50.2            │
//	└──┬───────────────────────────┘   └──┬───────────────────────────┘
//	┌──┴─────────── uplink ───────────────┴───────────────────────────┐
//	│ 192.168.50.254: etcd, API server, controllers, scheduler        │
//	└──┬──────────────────────────────────────────────────────────────┘
//	  client 192.168.50.100, outside of the cluster
//
// A node is not a virtual machine: it has the machine's kernel, and the machine's files
// but for those that a node writes. It cannot change settings of the kernel that are
// not its network's, and its pods' limits of memory and CPU are not those of a node.
package realcluster

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// podImage has what pods run, and pauses as their sandbox; see pod/main.go.
const podImage = "localhost/pod:cluster"

// otherImage is another build of Sluice, of the version "other".
const otherImage = "localhost/sluice:other"

// dnsAddress is the ClusterIP of CoreDNS.
const dnsAddress = "10.96.0.10"

// controlPlane is the address of the uplink segment itself.
var controlPlane = netip.MustParseAddr("192.168.50.254")

//go:embed manifests
var manifests embed.FS

// Config is how a [Cluster] is set up.
type Config struct {
	// Source is the root of the source tree, with the image that `make image` writes.
	Source string
	// Nodes is how many nodes there are.
	Nodes int
	// Progress is called with what is done next; nil reports nothing.
	Progress func(text string)
}

// Cluster is a running cluster.
type Cluster struct {
	*cluster.Cluster // the control plane
	Nodes            []*Node
	Client           *lab.Host // a machine outside of the cluster

	cfg    Config
	folder string // all files of the cluster
	lab    *lab.Cluster
	tunnel *cluster.Tunnel
	ended  chan string // names of nodes that have ended, room for all
}

// New brings a cluster up, and returns when all its pods are ready, or with an error when
// ctx ends before. The caller closes it; should this process be killed, all
// processes, namespaces and cgroups of the cluster end as well, and what is left of files
// goes with the next New.
//
// The first New on a machine builds Kubernetes and containerd, which takes minutes.
func New(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	c := &Cluster{cfg: cfg, ended: make(chan string, cfg.Nodes)}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start of the cluster: %w%s", err, c.Logs()), c.Close())
	}

	return c, nil
}

func (c *Cluster) start(ctx context.Context) (err error) {
	if err := sweep(); err != nil {
		return fmt.Errorf("remains of earlier runs: %w", err)
	}
	if c.cfg.Source, err = filepath.Abs(c.cfg.Source); err != nil {
		return err
	}
	image, err := c.findImage()
	if err != nil {
		return err
	}
	if c.folder, err = os.MkdirTemp("", fmt.Sprintf("%s%d-", folderPrefix, os.Getpid())); err != nil {
		return err
	}
	if c.lab, err = lab.New(lab.Config{Nodes: c.cfg.Nodes, Client: true}); err != nil {
		return err
	}
	c.Client = c.lab.Client

	c.cfg.Progress("the control plane starts")
	files := filepath.Join(c.folder, "control-plane")
	if err := os.Mkdir(files, 0o755); err != nil {
		return err
	}
	err = c.lab.Uplink.Do(func() (err error) {
		c.Cluster, err = cluster.New(ctx, cluster.Config{Directory: files, Address: controlPlane})

		return err
	})
	if err != nil {
		return err
	}
	if c.tunnel, err = c.Tunnel(loopback{}); err != nil {
		return err
	}

	c.cfg.Progress("the nodes start")
	if err := c.startNodes(ctx); err != nil {
		return err
	}
	err = c.await(ctx, "all nodes have registered", func() error {
		out, err := c.RunKubectl("", "get", "nodes", "--output=name")
		if err == nil && strings.Count(out, "\n") < c.cfg.Nodes {
			err = fmt.Errorf("there are %q", out)
		}

		return err
	})
	if err != nil {
		return err
	}
	c.cfg.Progress("Sluice is installed")
	if err := c.install(image); err != nil {
		return err
	}
	c.cfg.Progress("pods start")

	return c.AwaitPods(ctx)
}

// AwaitPods returns when all pods are there, ready, and as their objects want them, and
// those that they have replaced are gone.
func (c *Cluster) AwaitPods(ctx context.Context) error {
	for _, what := range []string{"kube-system/daemonset/sluice", "kube-system/deployment/coredns", "default/deployment/web", "default/daemonset/client"} {
		namespace, object, _ := strings.Cut(what, "/")
		err := c.await(ctx, what+" is ready", func() error {
			return c.kubectl("rollout", "status", "--timeout=5s", "--namespace="+namespace, object)
		})
		if err != nil {
			return err
		}
	}

	return c.await(ctx, "replaced pods are gone", func() error {
		out, err := c.RunKubectl("", "get", "pods", "--all-namespaces", "--output=jsonpath={.items[*].metadata.deletionTimestamp}")
		if err == nil && out != "" {
			err = fmt.Errorf("pods are deleted since %s", out)
		}

		return err
	})
}

// await tries until there is no error, while ctx lasts and no node ends.
func (c *Cluster) await(ctx context.Context, what string, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for err := try(); err != nil; err = try() {
		pause, stop := context.WithTimeout(ctx, 200*time.Millisecond)
		ended := c.Wait(pause)
		stop()
		if ended = errors.Join(ended, ctx.Err()); ended != nil {
			return fmt.Errorf("not so: %s: %w: %w", what, ended, err)
		}
	}

	return nil
}

// startNodes starts all nodes with the images, and routes to their pods.
func (c *Cluster) startNodes(ctx context.Context) error {
	folder := c.BinaryFolder()
	script := exec.CommandContext(ctx, filepath.Join(c.cfg.Source, "test/realcluster/images.sh"), c.folder, folder)
	if out, err := script.CombinedOutput(); err != nil {
		return fmt.Errorf("images of the pods: %w: %s", err, out)
	}
	for _, node := range c.lab.Nodes {
		err := errors.Join(
			c.lab.Uplink.AddRoute(node.PodCIDRs[0], node.IPv4),
			c.lab.Uplink.AddRoute(node.PodCIDRs[1], node.IPv6),
		)
		if err != nil {
			return err
		}
		n, err := startNode(node, inside{
			Files:      filepath.Join(c.folder, node.Name),
			Binaries:   folder,
			Kubeconfig: c.Cluster.Kubeconfig(),
			Images: []string{
				filepath.Join(c.folder, "pod.tar"), filepath.Join(c.folder, "coredns.tar"),
				filepath.Join(c.folder, "sluice.tar"), filepath.Join(c.cfg.Source, "bin/image.tar"),
			},
		})
		if err != nil {
			return fmt.Errorf("%s: %w", node.Name, err)
		}
		c.Nodes = append(c.Nodes, n)
		go func() {
			<-n.ended
			c.ended <- n.Name
		}()
	}

	return nil
}

// install applies the manifests with this image of Sluice, and with what is this cluster's
// own.
func (c *Cluster) install(image string) error {
	folder := filepath.Join(c.folder, "manifests")
	deploy, err := filepath.Rel(filepath.Join(folder, "sluice"), filepath.Join(c.cfg.Source, "deploy"))
	if err != nil {
		return err
	}
	name, tag, _ := strings.Cut(image, ":")
	err = writeFiles(manifests, "manifests", folder, map[string]string{
		"DEPLOY": deploy, "IMAGE": name, "TAG": tag,
		"API_SERVER": c.URL(), "POD_IMAGE": podImage, "DNS": dnsAddress,
	})
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"-k", filepath.Join(folder, "sluice")},
		{"-f", filepath.Join(folder, "coredns.yaml"), "-f", filepath.Join(folder, "web.yaml")},
	} {
		if err := c.kubectl(append([]string{"apply"}, args...)...); err != nil {
			return err
		}
	}

	return nil
}

func (c *Cluster) kubectl(args ...string) error {
	_, err := c.RunKubectl("", args...)

	return err
}

// findImage returns the name of the image that `make image` has written.
func (c *Cluster) findImage() (string, error) {
	path := filepath.Join(c.cfg.Source, "bin/image")
	root, err := layout.ImageIndexFromPath(path)
	if err != nil {
		return "", fmt.Errorf("make image first: %w", err)
	}
	manifest, err := root.IndexManifest()
	if err != nil {
		return "", err
	}
	for _, one := range manifest.Manifests {
		if name := one.Annotations["org.opencontainers.image.ref.name"]; name != "" {
			return name, nil
		}
	}

	return "", fmt.Errorf("%s: its image has no name", path)
}

// HostKubeconfig writes a kubeconfig for people, who are not in the cluster's network.
func (c *Cluster) HostKubeconfig() (path string, err error) {
	text, err := os.ReadFile(c.Cluster.Kubeconfig())
	if err != nil {
		return "", err
	}
	path = filepath.Join(c.folder, "kubeconfig")
	text = []byte(strings.ReplaceAll(string(text), c.URL(), "https://"+c.tunnel.Addr().String()))

	return path, os.WriteFile(path, text, 0o600)
}

// Folder holds the files of the cluster, among them logs.
func (c *Cluster) Folder() string { return c.folder }

// Logs returns the last lines of what the nodes have logged.
func (c *Cluster) Logs() string {
	const lines = 30

	var tails strings.Builder
	for _, name := range []string{"containerd", "kubelet", "ctr"} {
		paths, _ := filepath.Glob(filepath.Join(c.folder, "node-*", name+".log"))
		for _, path := range paths {
			log, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			all := strings.Split(strings.TrimSpace(string(log)), "\n")
			fmt.Fprintf(&tails, "\nthe end of %s:\n%s", path, strings.Join(all[max(0, len(all)-lines):], "\n"))
		}
	}

	return tails.String()
}

// Close ends and removes everything. Closing twice is not an error.
func (c *Cluster) Close() error {
	var group errgroup.Group
	for _, node := range c.Nodes {
		group.Go(node.Close)
	}
	err := group.Wait()
	c.Nodes = nil
	if c.tunnel != nil {
		c.tunnel.Cut()
	}
	if c.Cluster != nil {
		err = errors.Join(err, c.Cluster.Close())
	}
	if c.lab != nil {
		err = errors.Join(err, c.lab.Close())
	}

	return errors.Join(err, os.RemoveAll(c.folder))
}

// folderPrefix and the process ID begin the names of clusters' folders.
const folderPrefix = "sluice-realcluster-"

// Owners returns the processes that have made clusters, by the folders of these. Some
// of the processes may have ended.
func Owners() map[string]int {
	owners := make(map[string]int)
	folders, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPrefix+"*"))
	for _, folder := range folders {
		var owner int
		if _, err := fmt.Sscanf(filepath.Base(folder), folderPrefix+"%d-", &owner); err == nil {
			owners[folder] = owner
		}
	}

	return owners
}

// sweep removes what clusters of killed processes have left, beside what the lab
// removes by itself: files.
func sweep() (err error) {
	for folder, owner := range Owners() {
		if errors.Is(unix.Kill(owner, 0), unix.ESRCH) {
			err = errors.Join(err, os.RemoveAll(folder))
		}
	}

	return err
}

// loopback listens on the machine's own loopback device.
type loopback struct{}

func (loopback) Listen(network, _ string) (net.Listener, error) {
	return net.Listen(network, "127.0.0.1:0")
}

// Wait returns an error when a node has ended, or nil when ctx has.
func (c *Cluster) Wait(ctx context.Context) error {
	select {
	case name := <-c.ended:
		return fmt.Errorf("%s has ended", name)
	case <-ctx.Done():
		return nil
	}
}
