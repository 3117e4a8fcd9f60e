// Package devices shows that Sluice's device hooks work on a network as nodes
// have it: VXLAN between the nodes, pods behind bridges and behind veths of their
// own, a firewall that drops what it finds invalid, and clients that no socket
// hook saw. Everything is real traffic through real agents.
package devices

import (
	"context"
	"os"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// world is two nodes with an agent each, and a client that is no part of the
// cluster. It has routes to Services by node-1.
//
//	┌ node-1 ─────────────────┐  192.168.50.0/24 ┌ node-2 ─────────────────┐
//	│ pod-1-0 ─┐    ┌ filter ┐├ eth0 ─────┬──────┤ eth0 …        ┌─ pod-2-0 │
//	│ pod-1-1 ─┴ br0 or veth  │           │      │               └─ pod-2-1 │
//	│         vxlan0╌╌╌╌╌╌╌╌╌╌╌╌ 1450 ╌╌╌╌┼╌╌╌╌╌╌╌╌╌╌vxlan0                 │
//	└─────────────────────────┘           │      └─────────────────────────┘
//	                                   eth0 192.168.50.100
//	                                    client
//
// Addresses are those of [lab.Cluster]. Every node has the filter that the test
// chose, and no packet may have run against it when the test ends.
type world struct {
	*lab.Cluster
	cgroups []*lab.Cgroup // what the agents hook, by node
	agents  []*sluice.Node
	servers map[string]*lab.Server // by name of the node or the pod

	setting   setting
	manifests string
}

// setting is what a test may choose.
type setting struct {
	lab.Config
	filter string // of every node, "" for none: not even connections are tracked
	agent  []string
}

const podPort = 8080

// mustWorld builds nodes and pods that all answer on podPort. Agents
// are yet to be started.
func mustWorld(t *testing.T, s setting) *world {
	t.Helper()
	s.Nodes, s.Client = 2, true
	if s.PodsPerNode == 0 {
		s.PodsPerNode = 2
	}
	w := &world{
		Cluster:   lab.MustNew(t, s.Config),
		servers:   make(map[string]*lab.Server),
		setting:   s,
		manifests: t.TempDir(),
	}
	for _, node := range w.Nodes {
		w.cgroups = append(w.cgroups, lab.MustCgroup(t, node.Name))
		w.servers[node.Name] = lab.MustServe(t, node.Namespace, node.Name, node.At(podPort)...)
		for _, pod := range node.Pods {
			w.servers[pod.Name] = lab.MustServe(t, pod.Namespace, pod.Name, pod.At(podPort)...)
		}
	}
	w.leadTo(t, w.Nodes[0])
	for _, node := range w.Nodes {
		lab.Must(t, node.Netfilter(s.filter))
	}

	return w
}

// leadTo makes the client route virtual addresses to a node.
func (w *world) leadTo(t *testing.T, node *lab.Node) {
	t.Helper()
	for _, prefix := range virtualPrefixes {
		via := node.IPv4
		if prefix.Addr().Is6() {
			via = node.IPv6
		}
		lab.Must(t, w.Client.AddRoute(prefix, via))
	}
}

// start publishes services and starts an agent on every node.
func (w *world) start(t *testing.T, services ...service) {
	t.Helper()
	w.startOn(t, len(w.Nodes), services...)
}

// startOn is start for the first nodes only.
func (w *world) startOn(t *testing.T, nodes int, services ...service) {
	t.Helper()
	w.publish(t, services...)
	w.agents = make([]*sluice.Node, nodes)
	for i, node := range w.Nodes[:nodes] {
		agent, err := sluice.NewNode(sluice.Config{
			Binary:    sluice.MustBinary(t),
			Namespace: node.Namespace,
			Cgroup:    w.cgroups[i],
			NodeName:  node.Name,
			Manifests: w.manifests,
			Args:      w.args(w.setting.agent...),
		})
		lab.Must(t, err)
		w.agents[i] = agent
		t.Cleanup(func() {
			if err := agent.Close(); err != nil {
				t.Error(err)
			}
			if t.Failed() {
				lab.KeepLog(t, node.Name, agent.Log())
			}
		})
	}
	w.restart(t)
	if w.setting.filter != "" {
		// Before the agents end: without them nothing is translated.
		t.Cleanup(func() { w.mustHaveCountedNothing(t) })
	}
}

// args are the flags of an agent, with these.
func (w *world) args(more ...string) []string {
	return append([]string{"--nodeport-addresses", "192.168.0.0/16,fd00:50::/31"}, more...)
}

// restart starts the agents and waits until they are ready.
func (w *world) restart(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // an emulated kernel verifies for long
	defer cancel()
	var starting errgroup.Group
	for _, agent := range w.agents {
		starting.Go(func() error {
			if err := agent.Start(); err != nil {
				return err
			}
			return agent.Wait(ctx)
		})
	}
	lab.Must(t, starting.Wait())
}

// outside starts a program on the client's machine.
func (w *world) outside(t *testing.T) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, w.Client.Namespace, nil)
}

// optedOut starts a program in a pod that no socket hook sees.
func (w *world) optedOut(t *testing.T, pod *lab.Pod) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, pod.Namespace, nil)
}

func TestMain(m *testing.M) {
	playRole()
	lab.Main()
	lab.UseProfile("hardened")
	os.Exit(m.Run())
}

// mustOffload switches an offload on or off for every device that packets start
// from.
func (w *world) mustOffload(t *testing.T, offload lab.Offload, on bool) {
	t.Helper()
	set := func(ns *lab.Namespace, device string) {
		lab.Must(t, ns.SetOffload(device, offload, on))
	}
	set(w.Client.Namespace, "eth0")
	for _, node := range w.Nodes {
		set(node.Namespace, "eth0")
	}
	for _, pod := range w.Pods() {
		set(pod.Namespace, "eth0")
		set(pod.Node.Namespace, pod.Device)
	}
}
