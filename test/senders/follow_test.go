package senders

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/sluice"
)

const (
	port    = 514
	podPort = 5514
)

// clusterIPs are those of the Service.
var clusterIPs = []string{"10.96.0.1", "fd00:96::1"}

// network is a node with an agent, the programs, and the backends.
//
//	node-1 ─┬─ pod-1-0, the programs          node-2 ─┬─ pod-2-0, a backend
//	        └─ pod-1-1, a backend                     └─ pod-2-1, a backend
type network struct {
	*lab.Cluster
	cgroup    *lab.Cgroup
	manifests string
	servers   servers
	senders   []*sender
}

func mustNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{
		// Not behind one bridge, which takes frames from pod to pod by itself.
		Cluster:   lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 2, Attachment: lab.Routed}),
		cgroup:    lab.MustCgroup(t, "senders"),
		manifests: t.TempDir(),
		servers:   servers{received: make(map[string][]string)},
	}
	t.Cleanup(func() {
		if t.Failed() {
			lab.KeepLog(t, "senders", n.printed())
		}
	})
	for _, pod := range n.Pods()[1:] {
		n.servers.mustServe(t, pod, podPort)
	}
	n.publish(t)
	sluice.MustNode(t, sluice.Config{Namespace: n.Nodes[0].Namespace, Cgroup: n.cgroup, Manifests: n.manifests})

	return n
}

// printed returns what all programs have printed.
func (n *network) printed() string {
	var text strings.Builder
	for _, s := range n.senders {
		fmt.Fprintf(&text, "%s:\n%s", s.name, s.printed)
	}

	return text.String()
}

// publish makes these all objects of the cluster, beside the ServiceCIDR.
func (n *network) publish(t *testing.T, objects ...runtime.Object) {
	t.Helper()
	text, err := object.Manifest(append(objects, object.ServiceCIDR("kubernetes", "10.96.0.0/16", "fd00:96::/108"))...)
	lab.Must(t, err)
	// In one step, or an agent might see half of it.
	draft := filepath.Join(n.manifests, ".cluster.yaml")
	lab.Must(t, os.WriteFile(draft, text, 0o644), os.Rename(draft, filepath.Join(n.manifests, "cluster.yaml")))
}

// service returns the Service with these backends.
func service(backends ...*lab.Pod) []runtime.Object {
	objects := []runtime.Object{object.Service("lab", "logs", clusterIPs, corev1.ServicePort{
		Name: "syslog", Protocol: corev1.ProtocolUDP, Port: port, TargetPort: intstr.FromInt32(podPort),
	})}
	for f, family := range object.Families {
		slice := object.Slice("lab", fmt.Sprintf("logs-%d", f), "logs", family, object.EndpointPort("syslog", corev1.ProtocolUDP, podPort))
		for _, pod := range backends {
			slice.Endpoints = append(slice.Endpoints, object.Endpoint([]netip.Addr{pod.IPv4, pod.IPv6}[f], pod.Node.Name))
		}
		objects = append(objects, slice)
	}

	return objects
}

// start starts each program in the pod and on the node, each of which sends to another family.
func (n *network) start(t *testing.T, when string, programs []program, fromPod, fromNode string) {
	t.Helper()
	for _, p := range programs {
		for where, ns := range map[string]*lab.Namespace{"the pod": n.Nodes[0].Pods[0].Namespace, "the node": n.Nodes[0].Namespace} {
			ip := fromPod
			if where == "the node" {
				ip = fromNode
			}
			name := fmt.Sprintf("%s of %s to %s, which has connected %s", p.name, where, ip, when)
			n.senders = append(n.senders, mustStart(t, p, ns, n.cgroup, name, netip.AddrPortFrom(netip.MustParseAddr(ip), port)))
		}
	}
}

// reach waits until a line of each program is received by a backend, and has each send two more lines, which have to be
// received there, and nowhere else.
func (n *network) reach(t *testing.T, backend *lab.Pod) {
	t.Helper()
	for _, s := range n.senders {
		received := func(text string) error {
			if by := n.servers.by(text); !slices.Equal(by, []string{backend.Name}) {
				return fmt.Errorf("%s is received by %v, want %s", text, by, backend.Name)
			}
			if answer := answerOf(backend.Name, text); s.answers && !strings.Contains(s.printed.String(), answer) {
				return fmt.Errorf("it has not received %q", answer)
			}
			return nil
		}
		lab.Eventually(t, s.name, func() error {
			text := s.send(t)
			var err error
			for deadline := time.Now().Add(200 * time.Millisecond); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
				if err = received(text); err == nil {
					break
				}
			}
			return err
		})
		for range 2 {
			text := s.send(t)
			lab.Eventually(t, s.name, func() error { return received(text) })
		}
	}
}

// lose waits until no line of the programs is received, and has each send two more lines, which must not be.
func (n *network) lose(t *testing.T) {
	t.Helper()
	received := func() error {
		var texts []string
		for _, s := range n.senders {
			texts = append(texts, s.send(t))
		}
		time.Sleep(200 * time.Millisecond)
		for _, text := range texts {
			if by := n.servers.by(text); len(by) > 0 {
				return fmt.Errorf("%s is received by %v, want none", text, by)
			}
		}
		return nil
	}
	lab.Eventually(t, "no line is received", received)
	for range 2 {
		lab.Must(t, received())
	}
}

// mustHaveSockets fails the test unless each program has the UDP sockets that it began with, and no others.
func (n *network) mustHaveSockets(t *testing.T) {
	t.Helper()
	for _, s := range n.senders {
		if sockets, err := udpSockets(s.pid); err != nil || !slices.Equal(sockets, s.sockets) {
			t.Errorf("%s has the sockets %q, %v; began with %q", s.name, sockets, err, s.sockets)
		}
	}
}

// TestSendersFollow has a Service come, get and lose backends, and go under programs that have connected before it existed
// or after. Their lines reach the backend that the Service has, or none, and no program opens another socket.
func TestSendersFollow(t *testing.T) {
	programs := mustPrograms(t)
	n := mustNetwork(t)
	here, first, second := n.Nodes[0].Pods[1], n.Nodes[1].Pods[0], n.Nodes[1].Pods[1]

	n.start(t, "before the Service existed", programs, clusterIPs[0], clusterIPs[1])
	n.lose(t)
	n.publish(t, service(first)...)
	n.reach(t, first)
	n.start(t, "while the Service had a backend", programs, clusterIPs[1], clusterIPs[0])
	n.reach(t, first)
	for _, next := range []*lab.Pod{second, here, first} {
		n.publish(t, service(next)...)
		n.reach(t, next)
	}
	n.mustHaveSockets(t)
	// Beside any proxy: a datagram to a Service without a backend is refused.
	n.senders = slices.DeleteFunc(n.senders, func(s *sender) bool { return s.ends })
	n.publish(t, service()...)
	n.lose(t)
	n.publish(t, service(here)...)
	n.reach(t, here)
	n.publish(t)
	n.lose(t)
	n.publish(t, service(second)...)
	n.reach(t, second)
	n.senders = slices.DeleteFunc(n.senders, func(s *sender) bool { return s.reopens })
	n.mustHaveSockets(t)
}
