package realcluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestCluster is a day of a cluster of two nodes, in which all connections succeed. The
// parts follow each other.
func TestCluster(t *testing.T) {
	skipUnlessAsked(t)
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 3*startTimeout)
	defer cancel()
	c, err := New(ctx, Config{Source: "../..", Nodes: 2, Progress: func(text string) {
		t.Logf("%4.0f s  %s", time.Since(start).Seconds(), text)
	}})
	lab.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			lab.KeepLog(t, "nodes", c.Logs())
			out, err := c.RunKubectl("", "logs", "--namespace=kube-system", "--selector=k8s-app=sluice", "--prefix", "--tail=-1")
			lab.KeepLog(t, "agents", fmt.Sprint(out, err))
		}
		lab.Must(t, c.Close())
		if left := remains(t, os.Getpid(), "processes", "namespaces", "cgroups", "cgroups of v1", "files"); len(left) > 0 {
			t.Errorf("left after the end: %v", left)
		}
	})
	clients := mustClients(t, c)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *Cluster, map[string]client)
	}{
		{"nothing but Sluice translates", testAlone},
		{"Services are reached by address", testAddresses},
		{"Services are reached by name", testNames},
		{"the agents are replaced by another build", testUpgrade},
		{"the agents are killed", testKill},
		{"the backends are replaced", testRollout},
		{"a node is drained", testDrain},
	} {
		t.Run(part.name, func(t *testing.T) {
			part.run(t, c, clients)
			mustBeWell(t, c)
		})
	}
}

// mustBeWell asks each agent, as an operator does.
func mustBeWell(t *testing.T, c *Cluster) {
	t.Helper()
	for _, pod := range agents(t, c) {
		for _, verb := range []string{"status", "verify"} {
			lab.EventuallyIn(t, startTimeout, "sluice "+verb+" in "+pod, func() error {
				_, err := c.RunKubectl("", "exec", "--namespace=kube-system", pod, "--", "sluice", verb)

				return err
			})
		}
	}
}

// agents returns the names of the agents' pods.
func agents(t *testing.T, c *Cluster) []string {
	t.Helper()
	pods := strings.Fields(c.Kubectl(t, "get", "pods", "--namespace=kube-system", "--selector=k8s-app=sluice", "--output=name"))
	if len(pods) != len(c.Nodes) {
		t.Fatalf("the agents are %v, want one on each of %d nodes", pods, len(c.Nodes))
	}

	return pods
}

// mustBeReady waits until all pods are what is wanted.
func mustBeReady(t *testing.T, c *Cluster) {
	t.Helper()
	lab.Must(t, c.AwaitPods(t.Context()))
}

// testAlone: no other proxy is there, which would hide what Sluice does not do.
func testAlone(t *testing.T, c *Cluster, _ map[string]client) {
	for _, node := range c.Nodes {
		pids, err := node.Processes("kube-proxy")
		lab.Must(t, err)
		if len(pids) > 0 {
			t.Errorf("%s has kube-proxy", node.Name)
		}
		for _, list := range []string{"iptables-save", "ip6tables-save"} {
			rules, err := lab.Output(node.Namespace, nil, list)
			lab.Must(t, err)
			if strings.Contains(rules, "KUBE-SVC") || strings.Contains(rules, "KUBE-SERVICES") {
				t.Errorf("%s has rules of kube-proxy:\n%s", node.Name, rules)
			}
		}
		if pids, err = node.Processes("sluice"); err != nil || len(pids) != 1 {
			t.Errorf("%s has the agents %v, %v, want one", node.Name, pids, err)
		}
	}
}

// testAddresses: each client reaches each backend at each address.
func testAddresses(t *testing.T, c *Cluster, clients map[string]client) {
	want := strings.Fields(c.Kubectl(t, "get", "pods", "--selector=app=web", "--output=jsonpath={.items[*].metadata.name}"))
	slices.Sort(want)
	for name, from := range clients {
		for _, address := range from.addresses {
			for _, network := range []string{"tcp", "udp"} {
				var reached []string
				lab.Eventually(t, fmt.Sprintf("%s reaches all of %v by %s at %s", name, want, network, address), func() error {
					reply, err := from.Request(network, address)
					if err != nil {
						return err
					}
					answer, err := lab.ParseAnswer(reply.Text)
					if err == nil && !slices.Contains(reached, answer.Name) {
						reached = append(reached, answer.Name)
						slices.Sort(reached)
					}
					if !slices.Equal(reached, want) {
						return errors.Join(fmt.Errorf("reached: %v", reached), err)
					}

					return nil
				})
			}
		}
	}
}

// testNames: pods resolve names by way of the ClusterIP of CoreDNS, and those of CoreDNS
// itself have reached the API server by way of its ClusterIP.
func testNames(t *testing.T, c *Cluster, _ map[string]client) {
	pods := strings.Fields(c.Kubectl(t, "get", "pods", "--selector=app=client", "--output=name"))
	for _, pod := range pods {
		for name, service := range map[string]string{"web": "default/web", "kube-dns.kube-system.svc.cluster.local": "kube-system/kube-dns"} {
			namespace, object, _ := strings.Cut(service, "/")
			want := strings.Fields(c.Kubectl(t, "get", "service", object, "--namespace="+namespace, "--output=jsonpath={.spec.clusterIPs[*]}"))
			got := strings.Fields(c.Kubectl(t, "exec", pod, "--", "pod", "lookup", name))
			if !slices.Equal(sortedAddresses(t, got), sortedAddresses(t, want)) {
				t.Errorf("%s finds %v for %s, want %v", pod, got, name, want)
			}
		}
	}
}

func sortedAddresses(t *testing.T, texts []string) (addresses []netip.Addr) {
	t.Helper()
	for _, text := range texts {
		address, err := netip.ParseAddr(text)
		lab.Must(t, err)
		addresses = append(addresses, address)
	}
	slices.SortFunc(addresses, netip.Addr.Compare)

	return addresses
}

// testUpgrade: the DaemonSet gets the image of another build, and replaces its pods node by
// node.
func testUpgrade(t *testing.T, c *Cluster, clients map[string]client) {
	before := agents(t, c)
	load := mustTraffic(t, clients, kept)
	c.Kubectl(t, "set", "image", "--namespace=kube-system", "daemonset/sluice", "sluice="+otherImage)
	mustBeReady(t, c)
	load.mustSucceed(t)
	for _, pod := range agents(t, c) {
		version := c.Kubectl(t, "exec", "--namespace=kube-system", pod, "--", "sluice", "version")
		if slices.Contains(before, pod) || !strings.Contains(version, "other") {
			t.Errorf("%s runs %s, want new pods with the other version", pod, version)
		}
	}
}

// testKill: the kernel ends each agent, without a chance to do anything, and its kubelet
// starts it again.
func testKill(t *testing.T, c *Cluster, clients map[string]client) {
	restarts := func(pod string) int {
		text := c.Kubectl(t, "get", "--namespace=kube-system", pod, "--output=jsonpath={.status.containerStatuses[0].restartCount}")
		count, err := strconv.Atoi(text)
		lab.Must(t, err)

		return count
	}
	load := mustTraffic(t, clients, kept)
	for _, node := range c.Nodes {
		pids, err := node.Processes("sluice")
		lab.Must(t, err)
		if len(pids) != 1 {
			t.Fatalf("%s has the agents %v, want one", node.Name, pids)
		}
		lab.Must(t, unix.Kill(pids[0], unix.SIGKILL))
	}
	for _, pod := range agents(t, c) {
		lab.EventuallyIn(t, startTimeout, pod+" is started again", func() bool { return restarts(pod) == 1 })
	}
	mustBeReady(t, c)
	load.mustSucceed(t)
}

// testRollout: all pods of a Deployment are replaced while clients connect to them.
func testRollout(t *testing.T, c *Cluster, clients map[string]client) {
	load := mustTraffic(t, clients, !kept)
	c.Kubectl(t, "rollout", "restart", "deployment/web")
	mustBeReady(t, c)
	load.mustSucceed(t)
}

// testDrain: the pods of a node move to the other one, its addresses go on to lead to
// them, and the node comes back.
func testDrain(t *testing.T, c *Cluster, clients map[string]client) {
	node := c.Nodes[len(c.Nodes)-1].Name
	load := mustTraffic(t, clients, !kept)
	c.Kubectl(t, "drain", node, "--ignore-daemonsets", "--timeout="+startTimeout.String())
	mustBeReady(t, c)
	load.mustSucceed(t)
	for _, app := range []string{"app=web", "k8s-app=kube-dns"} {
		left := c.Kubectl(t, "get", "pods", "--all-namespaces", "--selector="+app, "--field-selector=spec.nodeName="+node, "--output=name")
		if left != "" {
			t.Errorf("after the drain %s has the pods %s", node, left)
		}
	}
	c.Kubectl(t, "uncordon", node)
}
