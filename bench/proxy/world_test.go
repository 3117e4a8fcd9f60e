package proxy

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	cluster.Run(m)
}

// world is a lab with a proxy's place on its first node, an API server that is
// filled, and a client whose sockets Sluice's hooks see.
//
//	API server ┄ tunnel ┄ node-1 192.168.50.1 ─┬─ pod-1-0  client
//	                        the proxy          └─ pod-1-1  server of 100.64.0.0/12
//	                      node-2 192.168.50.2 ──── pod-2-0  server of 100.80.0.0/12
type world struct {
	*lab.Cluster
	api    *cluster.Cluster
	plan   objects.Plan
	cgroup *lab.Cgroup
	client *lab.Caller
}

func mustWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		Cluster: lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 2, Attachment: lab.PointToPoint}),
		cgroup:  lab.MustCgroup(t, "proxy"),
		plan:    objects.Plan{Services: 20, Endpoints: 2},
	}
	near, far := w.Nodes[0], w.Nodes[1]
	local, remote := near.Pods[1], far.Pods[0]
	w.plan.Local = objects.Place{Node: near.Name, Address: near.IPv4, Pod: local.IPv4}
	w.plan.Remote = objects.Place{Node: far.Name, Address: far.IPv4, Pod: remote.IPv4}
	lab.Must(t,
		load.Own(local.Namespace, objects.LocalPrefix),
		load.Own(remote.Namespace, objects.RemotePrefix),
		near.AddRoute(objects.LocalPrefix, local.IPv4),
		near.AddRoute(objects.RemotePrefix, far.IPv4),
		far.AddRoute(objects.RemotePrefix, remote.IPv4),
	)
	for _, pod := range []*lab.Pod{local, remote} {
		lab.MustServe(t, pod.Namespace, pod.Name, "0.0.0.0:8080")
	}
	w.client = lab.MustCaller(t, near.Pods[0].Namespace, w.cgroup)
	w.api = mustFilled(t, w.plan)
	w.api.MustTunnel(t, near.Namespace)

	return w
}

// filled is the one API server of all tests, once there is one.
var filled *cluster.Cluster

// mustFilled fills an API server with the first test's plan, which is that of all.
func mustFilled(t *testing.T, plan objects.Plan) *cluster.Cluster {
	t.Helper()
	if filled == nil {
		api := cluster.Start(cluster.Lasting(t), "--service-cluster-ip-range="+objects.ServiceRange)
		writer, err := objects.NewWriter(api.Config())
		lab.Must(t, err)
		lab.Must(t, writer.Fill(t.Context(), plan, nil))
		filled = api
	}

	return filled
}

// config is that of a proxy on the first node.
func (w *world) config(t *testing.T, kind Kind) Config {
	t.Helper()
	binary := w.api.Binary("kube-proxy")
	if kind == Sluice {
		binary = sluice.MustBinary(t)
	}

	return Config{
		Kind:       kind,
		Namespace:  w.Nodes[0].Namespace,
		Cgroup:     w.cgroup,
		NodeName:   w.Nodes[0].Name,
		Kubeconfig: w.api.Kubeconfig(),
		Binary:     binary,
		Directory:  t.TempDir(),
	}
}

// answers returns an error unless a Service answers, with one of its endpoints.
func (w *world) answers(i int, network string, port uint16) error {
	reply, err := w.client.Request(network, netip.AddrPortFrom(w.plan.ClusterIP(i), port).String())
	if err != nil {
		return err
	}
	answer, err := lab.ParseAnswer(reply.Text)
	if err != nil {
		return err
	}
	for e := range w.plan.Endpoints {
		if answer.Local.Addr() == w.plan.EndpointAddress(i, e, 0) {
			return nil
		}
	}

	return errors.New("the answer is not from an endpoint of the Service: " + answer.String())
}

func mustSync(t *testing.T, p *Proxy) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	lab.Must(t, p.Synced(ctx))
}

func exists(path string) bool {
	_, err := os.Stat(path)

	return err == nil
}
