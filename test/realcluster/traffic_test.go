package realcluster

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// nodePort is that of the Service web.
const nodePort = 30080

// client is a place from which Services are reached.
type client struct {
	*lab.Caller
	addresses []string // of the Service web
}

// mustClients returns a client of each kind: a pod on each node, a process of the first
// node, and a machine outside of the cluster. The process uses the node ports of its own
// node only: by way of another node its packets would not be translated at its socket, and
// a flow there and one that leads directly to the same backend could have the same port of
// the process, which that other node cannot tell apart.
func mustClients(t *testing.T, c *Cluster) map[string]client {
	t.Helper()
	ips := strings.Fields(c.Kubectl(t, "get", "service", "web", "--output=jsonpath={.spec.clusterIPs[*]}"))
	inside := []string{ips[0] + ":80", "[" + ips[1] + "]:80"}
	clients := make(map[string]client)
	var outside []string
	for _, node := range c.Nodes {
		pod := c.Kubectl(t, "get", "pods", "--selector=app=client", "--field-selector=spec.nodeName="+node.Name, "--output=name")
		cmd := c.KubectlCommand("exec", "--stdin", strings.TrimSpace(pod), "--", "pod", "call")
		clients["pod on "+node.Name] = client{mustCallThrough(t, c, cmd), inside}
		outside = append(outside, fmt.Sprintf("%s:%d", node.IPv4, nodePort), fmt.Sprintf("[%s]:%d", node.IPv6, nodePort))
	}
	cgroup, err := c.Nodes[0].cgroup.Child("process")
	lab.Must(t, err)
	clients["process of "+c.Nodes[0].Name] = client{
		lab.MustCaller(t, c.Nodes[0].Namespace, cgroup), append(slices.Clone(inside), outside[:2]...),
	}
	clients["outside"] = client{lab.MustCaller(t, c.Client.Namespace, nil), outside}

	return clients
}

func mustCallThrough(t *testing.T, c *Cluster, cmd *exec.Cmd) *lab.Caller {
	t.Helper()
	var caller *lab.Caller
	err := c.lab.Uplink.Do(func() (err error) {
		caller, err = lab.CallThrough(cmd)

		return err
	})
	lab.Must(t, err)
	t.Cleanup(func() { _ = caller.Close() }) // kubectl is killed

	return caller
}

// traffic is loads under way.
type traffic map[string]*lab.RunningLoad

// kept also has connections that stay open all the time, which ends of backends would
// end.
const kept = true

// mustTraffic starts loads from all clients to all addresses that these reach: new TCP
// connections, UDP sockets, and connections that are kept.
func mustTraffic(t *testing.T, clients map[string]client, kept bool) traffic {
	t.Helper()
	running := make(traffic)
	for name, from := range clients {
		for _, address := range from.addresses {
			for what, load := range map[string]lab.Load{
				"TCP":      {Exchange: lab.Exchange{Network: "tcp"}, Rate: 25},
				"UDP":      {Exchange: lab.Exchange{Network: "udp"}, Rate: 10},
				"kept TCP": {Exchange: lab.Exchange{Network: "tcp"}, Rate: 10, Keep: 5},
			} {
				if load.Keep > 0 && !kept {
					continue
				}
				load.Address, load.Timeout = address, 10*time.Second // the machine may be busy
				run, err := from.StartLoad(load)
				lab.Must(t, err)
				running[fmt.Sprintf("%s from %s to %s", what, name, address)] = run
			}
		}
	}

	return running
}

// mustSucceed ends the loads, of which nothing may have failed. It reports some of
// those that have.
func (l traffic) mustSucceed(t *testing.T) {
	t.Helper()
	var exchanges int
	var longest time.Duration
	var slowest string
	var failed []string
	for name, run := range l {
		report, err := run.Stop()
		lab.Must(t, err)
		if report.Succeeded == 0 {
			t.Errorf("%s: nothing was sent", name)
		}
		if failures := len(report.Failures); failures > 0 {
			failed = append(failed, fmt.Sprintf("%s: %d of %d failed, first: %s", name, failures, report.Started, report.Failures[0]))
		}
		exchanges += report.Started
		if report.Longest > longest {
			longest, slowest = report.Longest, name
		}
	}
	if len(failed) > 0 {
		t.Errorf("%d of %d loads failed, such as:\n%s", len(failed), len(l), strings.Join(failed[:min(len(failed), 5)], "\n"))
	}
	t.Logf("%d connections and questions, the longest took %v: %s", exchanges, longest.Round(time.Millisecond), slowest)
}
