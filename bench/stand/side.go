// Package stand builds the networks in which traffic is measured: for each proxy a cluster of its
// own, out of network namespaces, so that the proxies can be measured in turns.
//
//	┌ node-1: the proxy ───────────────┐      ┌ node-2: no proxy ──────┐
//	│ pod-1-0      pod-1-1             │      │ pod-2-0                │
//	│ the client   server              │      │ server                 │
//	│              100.64.0.0/12       │      │ 100.80.0.0/12          │
//	│ 192.168.50.1                     │      │ 192.168.50.2           │
//	└──┬───────────────────────────────┘      └──┬─────────────────────┘
//	   ┊                                         ┊
//	───┴───────────────── uplink ────────────────┴───┬──────────────────
//	                                                 ┊
//	                             client 192.168.50.100: outside
//
// Servers answer for whole ranges of addresses, so each of a million endpoints has
// one of its own, and a process behind it.
//
// It measures nothing and starts no proxy.
package stand

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/test/lab"
)

// Sources are further addresses of the client outside: many clients, for all that goes by
// addresses.
var Sources = netip.MustParsePrefix("198.18.0.0/25")

// Side is the cluster of one proxy.
type Side struct {
	*lab.Cluster

	// Cgroup is that of the client in the pod: Sluice attaches to it. Every side
	// has one.
	Cgroup *lab.Cgroup

	servers []*load.Server
	closers []io.Closer
}

// New builds a side, with servers that answer. The caller closes it.
func New() (*Side, error) {
	s := new(Side)
	if err := s.build(); err != nil {
		return nil, errors.Join(err, s.Close())
	}

	return s, nil
}

func (s *Side) build() (err error) {
	if s.Cgroup, err = lab.NewCgroup("bench"); err != nil {
		return err
	}
	s.closers = append(s.closers, s.Cgroup)
	s.Cluster, err = lab.New(lab.Config{Nodes: 2, PodsPerNode: 2, Client: true, Attachment: lab.PointToPoint})
	if err != nil {
		return err
	}
	s.closers = append(s.closers, s.Cluster)
	// The ranges of endpoints are routed to the pods that have them.
	near, far := s.Nodes[0], s.Nodes[1]
	err = errors.Join(
		load.Own(s.Near().Namespace, objects.LocalPrefix),
		load.Own(s.Far().Namespace, objects.RemotePrefix),
		load.Own(s.Client.Namespace, Sources),
		near.AddRoute(Sources, s.Client.IPv4),
		far.AddRoute(Sources, s.Client.IPv4),
		near.AddRoute(objects.LocalPrefix, s.Near().IPv4),
		near.AddRoute(objects.RemotePrefix, far.IPv4),
		far.AddRoute(objects.RemotePrefix, s.Far().IPv4),
		far.AddRoute(objects.LocalPrefix, near.IPv4),
		s.Client.AddRoute(netip.PrefixFrom(s.Near().IPv4, 32), near.IPv4),
		s.Client.AddRoute(netip.PrefixFrom(s.Far().IPv4, 32), far.IPv4),
		s.Client.AddRoute(objects.RemotePrefix, near.IPv4), // through the node with the proxy
		// A ClusterIP that no proxy translates is refused at once, and does not time out.
		refuse(near.Namespace, objects.ServiceRange),
		// These limits are reached by tens of thousands of connections a second between a few
		// addresses, and not by the traffic of a real cluster between many addresses.
		near.Sysctl("net/ipv4/icmp_ratelimit", "0"),
		s.Near().Sysctl("net/core/somaxconn", "4096"),
		s.Far().Sysctl("net/core/somaxconn", "4096"),
	)
	if err != nil {
		return err
	}
	for _, pod := range []*lab.Pod{s.Near(), s.Far()} {
		server, err := load.Serve(pod.Namespace, objects.BackendPort)
		if err != nil {
			return fmt.Errorf("server in %s: %w", pod.Name, err)
		}
		s.servers = append(s.servers, server)
		s.closers = append(s.closers, server)
		bulk, err := load.ServeBulk(pod.Namespace, objects.BulkPort)
		if err != nil {
			return fmt.Errorf("iperf3 in %s: %w", pod.Name, err)
		}
		s.closers = append(s.closers, bulk)
	}

	return nil
}

// refuse makes the namespace answer a range with ICMP unreachable.
func refuse(ns *lab.Namespace, prefix string) error {
	to, err := netlink.ParseIPNet(prefix)
	if err == nil {
		err = ns.Netlink().RouteReplace(&netlink.Route{Dst: to, Type: unix.RTN_UNREACHABLE})
	}
	if err != nil {
		return fmt.Errorf("route to %s in %s: %w", prefix, ns.Name(), err)
	}

	return nil
}

// Pause makes the servers stand still: they cost the side that is measured something,
// also with nothing to do. A side begins with servers that run.
func (s *Side) Pause() error { return s.toServers((*load.Server).Pause) }

// Resume lets the servers go on.
func (s *Side) Resume() error { return s.toServers((*load.Server).Resume) }

func (s *Side) toServers(do func(*load.Server) error) error {
	var errs []error
	for _, server := range s.servers {
		errs = append(errs, do(server))
	}

	return errors.Join(errs...)
}

// Places are where the endpoints of a [objects.Plan] are: here, and on the other
// node. They are the same on all sides.
func (s *Side) Places() (local, remote objects.Place) {
	place := func(n *lab.Node, pod *lab.Pod) objects.Place {
		return objects.Place{Node: n.Name, Address: n.IPv4, Pod: pod.IPv4}
	}

	return place(s.Nodes[0], s.Near()), place(s.Nodes[1], s.Far())
}

// Node is the node with the proxy.
func (s *Side) Node() *lab.Node { return s.Nodes[0] }

// Pod is the client in the cluster.
func (s *Side) Pod() *lab.Pod { return s.Nodes[0].Pods[0] }

// Near is the pod of the servers on the client's node.
func (s *Side) Near() *lab.Pod { return s.Nodes[0].Pods[1] }

// Far is the pod of the servers on the other node.
func (s *Side) Far() *lab.Pod { return s.Nodes[1].Pods[0] }

// ForgetSoon lets the node's netfilter forget connections and datagrams soon after
// their end: with its own limits, its table would be full after seconds of such
// traffic. A node without connection tracking is left alone.
func (s *Side) ForgetSoon() error {
	for name, seconds := range map[string]string{
		"nf_conntrack_tcp_timeout_time_wait": "1",
		"nf_conntrack_tcp_timeout_close":     "1",
		"nf_conntrack_udp_timeout":           "5", // answers may be late on a busy machine
		"nf_conntrack_udp_timeout_stream":    "5",
	} {
		if err := s.Node().Sysctl("net/netfilter/"+name, seconds); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}

	return nil
}

// Close removes everything. Closing twice is not an error.
func (s *Side) Close() error {
	var err error
	for _, c := range slices.Backward(s.closers) {
		err = errors.Join(err, c.Close())
	}

	return err
}
