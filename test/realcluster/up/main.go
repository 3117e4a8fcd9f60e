// Up brings a cluster up, prints how to use it, and removes it at Ctrl-C or when it
// is ended otherwise. It is `make cluster`, and with --down `make cluster-down`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realcluster"
)

func main() {
	realcluster.Main()
	lab.Main()
	nodes := flag.Int("nodes", 2, "how many nodes")
	down := flag.Bool("down", false, "end the clusters that this program has brought up")
	flag.Parse()
	if *down {
		endAll()
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, *nodes); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

// endAll ends every run of this program, and waits until it has removed its cluster.
func endAll() {
	for folder, owner := range realcluster.Owners() {
		proc := fmt.Sprintf("/proc/%d/comm", owner)
		if comm, err := os.ReadFile(proc); err != nil || strings.TrimSpace(string(comm)) != "sluice-cluster" {
			continue // a test, or it has ended
		}
		fmt.Println("ending", folder)
		for err := unix.Kill(owner, unix.SIGTERM); err == nil; err = unix.Kill(owner, 0) {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

func run(ctx context.Context, nodes int) (err error) {
	start := time.Now()
	progress := func(text string) { fmt.Printf("%4.0f s  %s\n", time.Since(start).Seconds(), text) }
	c, err := realcluster.New(ctx, realcluster.Config{Source: ".", Nodes: nodes, Progress: progress})
	if err != nil {
		return err
	}
	defer func() {
		progress("all of it is removed")
		err = errors.Join(err, c.Close())
	}()
	kubeconfig, err := c.HostKubeconfig()
	if err != nil {
		return err
	}
	progress("ready")
	fmt.Printf(`
  export KUBECONFIG=%s PATH=%s:$PATH
  kubectl get nodes,pods,services -A -o wide
  kubectl -n kube-system exec daemonset/sluice -- sluice status
  kubectl exec daemonset/client -- pod lookup web.default.svc.cluster.local

From outside of the cluster, a NodePort:

  nsenter --net=%s bash -c 'exec 3<>/dev/tcp/%s/30080; echo who >&3; head -n 1 <&3'

Logs of the nodes are in %s.
Ctrl-C or make cluster-down ends and removes all of it.
`, kubeconfig, c.BinaryFolder(), c.Client.Path(), c.Nodes[0].IPv4, c.Folder())

	return c.Wait(ctx)
}
