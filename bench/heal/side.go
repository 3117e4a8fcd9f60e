package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	clientPods      = 4 // on the node with the proxy
	backendNodes    = 5
	backendsPerNode = 2

	// backendPort is where backends listen, TCP and UDP.
	backendPort = 8080
	// servicePort is that of Services at their ClusterIPs, TCP and UDP.
	servicePort = 80
)

// clusterIP and nodePort lead to a Service. Each measurement has a Service of its own, of which a
// proxy has learned nothing in the episodes before. All have the same backends.
func clusterIP(service int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 96, 1 + byte(service>>8), byte(service)})
}

func nodePort(service int) uint16 { return uint16(30000 + service) }

// maxServices is how many there is room for.
const maxServices = 2000

// sources are addresses of the client outside, so many clients for all that goes by addresses.
var sources = netip.MustParsePrefix("198.18.0.0/28")

// side is the cluster of one proxy. All sides are alike, and share nothing but the API server.
//
//	┌ node-1: the proxy ──────────┐  ┌ node-2 … node-6: no proxy ┐
//	│ pod-1-0 … pod-1-3: clients  │  │ two backends on each      │
//	└──┬──────────────────────────┘  └──┬────────────────────────┘
//	   ┊ the tap                        ┊
//	───┴──────────── uplink ────────────┴──┬─────────────────────────
//	                                       ┊ 198.18.0.0/28
//	                                client: outside
type side struct {
	*lab.Cluster
	kind    string
	cgroup  *lab.Cgroup // of the clients in pods: Sluice attaches to it
	tunnel  *cluster.Tunnel
	servers map[*lab.Pod]*lab.Server
	proxy   proxy.Proxy // nil: none runs
	folder  string      // of its files
}

// newSide builds a side with backends that answer, from whose node with the proxy the API server
// is reached. The caller closes it.
func newSide(kind string, api *cluster.Cluster) (*side, error) {
	s := &side{kind: kind, servers: make(map[*lab.Pod]*lab.Server)}
	if err := s.build(api); err != nil {
		return nil, errors.Join(fmt.Errorf("cluster of %s: %w", kind, err), s.Close())
	}

	return s, nil
}

func (s *side) build(api *cluster.Cluster) (err error) {
	if s.cgroup, err = lab.NewCgroup("heal"); err != nil {
		return err
	}
	if s.Cluster, err = lab.New(lab.Config{Nodes: 1 + backendNodes, Client: true, Attachment: lab.PointToPoint}); err != nil {
		return err
	}
	err = load.Own(s.Client.Namespace, sources)
	for number, node := range s.Nodes {
		pods := backendsPerNode
		if number == 0 {
			pods = clientPods
		}
		for range pods {
			if _, failed := node.AddPod(); failed != nil {
				return failed
			}
		}
		err = errors.Join(err, node.AddRoute(sources, s.Client.IPv4))
	}
	for _, pod := range s.backends() {
		err = errors.Join(err, pod.Sysctl("net/core/somaxconn", "4096"), s.serve(pod))
	}
	if err != nil {
		return err
	}
	s.tunnel, err = api.Tunnel(s.node().Namespace)

	return err
}

// node is the one with the proxy, and the one that clients outside dial.
func (s *side) node() *lab.Node { return s.Nodes[0] }

// backends are the pods behind the Service, node by node.
func (s *side) backends() []*lab.Pod { return s.Pods()[clientPods:] }

// victim is the node to which something happens.
func (s *side) victim() *lab.Node { return s.Nodes[backendNodes] }

// serve makes a backend answer. [side.kill] ends that.
func (s *side) serve(pod *lab.Pod) error {
	server, err := lab.Serve(pod.Namespace, pod.Name, netip.AddrPortFrom(pod.IPv4, backendPort).String())
	if err == nil {
		s.servers[pod] = server
	}

	return err
}

// kill ends the process of a backend: the kernel of its pod refuses what comes from then on.
func (s *side) kill(pod *lab.Pod) error { return s.servers[pod].Stop() }

// Close removes everything.
func (s *side) Close() error {
	var errs []error
	if s.proxy != nil {
		errs = append(errs, s.proxy.Close())
	}
	errs = append(errs, os.RemoveAll(s.folder))
	if s.tunnel != nil {
		s.tunnel.Cut()
	}
	for _, server := range s.servers {
		errs = append(errs, server.Stop())
	}
	if s.Cluster != nil {
		errs = append(errs, s.Cluster.Close())
	}
	if s.cgroup != nil {
		errs = append(errs, s.cgroup.Close())
	}

	return errors.Join(errs...)
}

// start starts the side's proxy and returns when it has programmed all Services.
func (s *side) start(ctx context.Context, api *cluster.Cluster, binary string) (err error) {
	if s.folder, err = os.MkdirTemp("", "sluice-heal-"); err != nil {
		return err
	}
	cfg := proxy.Config{
		Kind: proxy.NFTables, Namespace: s.node().Namespace, Cgroup: s.cgroup, NodeName: s.node().Name,
		Kubeconfig: api.Kubeconfig(), Binary: api.Binary("kube-proxy"), Directory: s.folder,
		ResyncPeriod: time.Hour, // a resync would disturb the measurements of other sides
	}
	if mode, ok := strings.CutPrefix(s.kind, "sluice-"); ok {
		cfg.Kind, cfg.Binary, cfg.Args = proxy.Sluice, binary, []string{"--heal", mode}
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if s.proxy, err = proxy.Start(cfg); err == nil {
		err = s.proxy.Synced(ctx)
	}

	return err
}

// startTimeout is how long a start may take: the kernel verifies programs for seconds, on a busy
// machine for minutes.
const startTimeout = 4 * time.Minute

// writeObjects puts the Nodes, so many Services and their endpoints into an API server. Nothing writes
// to it later: the control plane does not notice what happens to backends.
func writeObjects(api *cluster.Cluster, s *side, services int) error {
	if services > maxServices {
		return fmt.Errorf("%d measurements of a side: there is room for %d", services, maxServices)
	}
	var text strings.Builder
	for _, node := range s.Nodes {
		fmt.Fprintf(&text, `---
apiVersion: v1
kind: Node
metadata: {name: %s}
status: {addresses: [{type: InternalIP, address: %s}]}
`, node.Name, node.IPv4)
	}
	for service := range services {
		endpoints := ""
		for _, pod := range s.backends() {
			endpoints += fmt.Sprintf("- {addresses: [%s], nodeName: %s, conditions: {ready: true}}\n", pod.IPv4, pod.Node.Name)
		}
		fmt.Fprintf(&text, `---
apiVersion: v1
kind: Service
metadata: {name: service-%d, namespace: default}
spec:
  type: NodePort
  clusterIP: %s
  ports:
  - {name: http, protocol: TCP, port: %d, targetPort: %d, nodePort: %d}
  - {name: dns, protocol: UDP, port: %[3]d, targetPort: %[4]d, nodePort: %[5]d}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: service-%[1]d, namespace: default, labels: {kubernetes.io/service-name: service-%[1]d}}
addressType: IPv4
ports:
- {name: http, protocol: TCP, port: %[4]d}
- {name: dns, protocol: UDP, port: %[4]d}
endpoints:
%[6]s`, service, clusterIP(service), servicePort, backendPort, nodePort(service), endpoints)
	}
	_, err := api.RunKubectl(text.String(), "create", "--validate=false", "-f", "-")

	return err
}

// dial makes connections to a Service by a path, at a rate of all clients together.
func (s *side) dial(ctx context.Context, service int, p path, d load.Dials) ([]load.Dial, error) {
	d.Network, d.Timeout = p.network, timeout
	if p.outside {
		d.Target = netip.AddrPortFrom(s.node().IPv4, nodePort(service))
		for source := sources.Addr().Next(); sources.Contains(source); source = source.Next() {
			d.Sources = append(d.Sources, source)
		}

		return d.Run(ctx, s.Client.Namespace, nil)
	}
	d.Target = netip.AddrPortFrom(clusterIP(service), servicePort)
	d.Rate /= clientPods
	pods := s.node().Pods
	made := make([][]load.Dial, len(pods))
	var clients errgroup.Group
	for i, pod := range pods {
		clients.Go(func() (err error) {
			made[i], err = d.Run(ctx, pod.Namespace, s.cgroup)

			return err
		})
	}
	err := clients.Wait()
	dials := slices.Concat(made...)
	slices.SortFunc(dials, func(a, b load.Dial) int { return int(a.Began - b.Began) })

	return dials, err
}
