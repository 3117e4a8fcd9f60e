package differential

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// side is a lab with one of the proxies on its first node. Clients are there, in
// two pods of that node that only dial, in two that answer too, and outside:
//
//	API server ┄ tunnel ┄ node-1 192.168.50.1 ─┬─ pod-1-0 10.244.1.2  client
//	        client, the proxy    192.168.51.1  ├─ pod-1-1 10.244.1.3  client, servers
//	        servers       lo     192.168.60.6  ├─ pod-1-2 10.244.1.4  client, servers
//	                                           └─ pod-1-3 10.244.1.5  client
//	                      node-2 192.168.50.2 ─┬─ pod-2-0 10.244.2.2  servers
//	        servers              192.168.51.2  ├─ pod-2-1 10.244.2.3  servers
//	                                           └─ pod-2-2 10.244.2.4  client
//	                      client 192.168.50.100  outside
//
// Servers are at serverPorts. Clients outside send what is for Services to
// node-1.
type side struct {
	*lab.Cluster
	name    string
	cgroup  *lab.Cgroup // what hooks see
	callers map[string]*lab.Caller
}

// serverPorts are where each server listens.
var serverPorts = []uint16{8080, 8081}

// Ranges that lead to node-1 from outside, and the address among them that it has
// itself.
var (
	virtualPrefixes = prefixes("10.96.0.0/16", "192.168.60.0/24", "192.168.61.0/24", "fd00:10:96::/112", "fd00:60::/64", "fd00:61::/64")
	boundVIPs       = prefixes("192.168.60.6/32", "fd00:60::6/128")
)

// mustSides builds both labs, and starts the proxies.
func mustSides(t testing.TB, c *cluster.Cluster, reference, candidate settings) [2]*side {
	t.Helper()
	sides := [2]*side{mustSide(t, "kube-proxy"), mustSide(t, "sluice")}
	for _, s := range sides {
		c.MustTunnel(t, s.Nodes[0].Namespace)
	}
	mustRunKubeProxy(t, sides[0], c, reference)
	mustRunSluice(t, sides[1], c, candidate)

	return sides
}

func mustSide(t testing.TB, name string) *side {
	t.Helper()
	s := &side{
		name:    name,
		Cluster: lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: sparePod + 1, Client: true, SecondUplink: true, Attachment: lab.PointToPoint}),
		cgroup:  lab.MustCgroup(t, name),
		callers: make(map[string]*lab.Caller),
	}
	lab.Must(t, s.configure())
	s.mustAnswerElsewhere(t)
	for _, pod := range s.Pods() {
		if pod != s.Nodes[0].Pods[0] && pod != s.Nodes[0].Pods[sparePod] {
			lab.MustServe(t, pod.Namespace, pod.Name, ports(pod.At)...)
		}
	}
	for _, node := range s.Nodes {
		lab.MustServe(t, node.Namespace, node.Name, ports(node.At)...)
	}
	for _, c := range clients {
		cgroup := s.cgroup
		if !c.socket {
			cgroup = nil
		}
		s.callers[c.name] = lab.MustCaller(t, s.at(c), cgroup)
	}

	return s
}

// at is where a client is.
func (s *side) at(c *client) *lab.Namespace {
	switch c.place {
	case onNode:
		return s.Nodes[0].Namespace
	case outside:
		return s.Client.Namespace
	case otherNode:
		return s.Nodes[1].Pods[c.pod].Namespace
	default:
		return s.Nodes[0].Pods[c.pod].Namespace
	}
}

// configure adds addresses and routes, and lifts the limits of ICMP errors.
func (s *side) configure() error {
	node := s.Nodes[0]
	namespaces := []*lab.Namespace{s.Client.Namespace}
	for _, n := range s.Nodes {
		namespaces = append(namespaces, n.Namespace)
	}
	for _, pod := range s.Pods() {
		namespaces = append(namespaces, pod.Namespace)
	}
	var err error
	for _, ns := range namespaces {
		for setting, value := range sysctls {
			err = errors.Join(err, ns.Sysctl(setting, value))
		}
	}
	for _, prefix := range boundVIPs {
		err = errors.Join(err, node.AddAddress("lo", prefix))
	}
	for _, prefix := range virtualPrefixes {
		err = errors.Join(err, s.Client.AddRoute(prefix, ofFamily(prefix.Addr(), node.IPv4, node.IPv6)))
	}

	return errors.Join(err, s.giveSpares())
}

// The kernel's limits would make a refusal look like silence. A redirect would
// show a client a way past the node.
var sysctls = map[string]string{
	"net/ipv4/icmp_ratelimit":             "0",
	"net/ipv4/icmp_msgs_per_sec":          "1000000",
	"net/ipv4/icmp_msgs_burst":            "1000000",
	"net/ipv6/icmp/ratelimit":             "0",
	"net/ipv4/conf/all/send_redirects":    "0",
	"net/ipv4/conf/eth0/send_redirects":   "0",
	"net/ipv4/conf/all/accept_redirects":  "0",
	"net/ipv4/conf/eth0/accept_redirects": "0",
	"net/ipv6/conf/eth0/accept_redirects": "0",
}

// giveSpares gives clients more addresses. A pod's are behind its device, and not
// behind a gateway there, which would be an uplink's.
func (s *side) giveSpares() error {
	var err error
	for i := range outsiders {
		for pod, spares := range map[*lab.Pod][]netip.Prefix{s.Nodes[0].Pods[sparePod]: podSpares, s.Nodes[1].Pods[2]: otherSpares} {
			for _, spare := range addressesOf(spares[i]) {
				err = errors.Join(err, pod.AddAddress("eth0", netip.PrefixFrom(spare, spare.BitLen())))
			}
			err = errors.Join(err, pod.Node.AddDeviceRoute(spares[i], pod.Device))
		}
		for _, spare := range addressesOf(outsiders[i]) {
			err = errors.Join(err, s.Client.AddAddress("eth0", netip.PrefixFrom(spare, spare.BitLen())))
		}
		for _, node := range s.Nodes {
			err = errors.Join(err, node.AddRoute(outsiders[i], ofFamily(outsiders[i].Addr(), s.Client.IPv4, s.Client.IPv6)))
		}
	}

	return err
}

// addLateAddresses gives node-1 addresses that the proxies have not seen at their
// start. They are on the second segment's device, and in the first one's range.
func (s *side) addLateAddresses() error {
	var err error
	for i, address := range lateAddresses {
		one := netip.PrefixFrom(address, address.BitLen())
		via := hostAddresses(1)[i]
		err = errors.Join(err, s.Nodes[0].AddAddress("eth1", one), s.Client.AddRoute(one, via))
	}

	return err
}

// eachSide does something on both sides at once.
func eachSide(sides [2]*side, do func(i int, s *side) error) error {
	var doing errgroup.Group
	for i, s := range sides {
		doing.Go(func() error {
			if err := do(i, s); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			return nil
		})
	}

	return doing.Wait()
}

// ports are addresses at all of serverPorts.
func ports(at func(port uint16) []string) []string {
	var all []string
	for _, port := range serverPorts {
		all = append(all, at(port)...)
	}

	return all
}

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}

	return all
}

// addressesOf are all that a range has.
func addressesOf(p netip.Prefix) []netip.Addr {
	var all []netip.Addr
	for a := p.Addr(); p.Contains(a); a = a.Next() {
		all = append(all, a)
	}

	return all
}

// ofFamily is the one of two addresses that is of a's family.
func ofFamily(a, v4, v6 netip.Addr) netip.Addr {
	if a.Is4() {
		return v4
	}

	return v6
}

// elsewhere is the server that answers by every address that no proxy has
// translated. It is at the default gateway of all: what is untouched is not
// silence.
const (
	elsewhere     = "elsewhere"
	elsewherePort = 7
)

// Its server takes everything to Services that comes to the gateway.
const elsewhereRules = `table inet elsewhere {
	chain prerouting {
		type nat hook prerouting priority dstnat
		iifname "br0" ip daddr { 10.96.0.0/16, 192.168.60.0/24, 192.168.61.0/24 } meta l4proto { tcp, udp } redirect to :%[1]d
		iifname "br0" ip6 daddr { fd00:10:96::/112, fd00:60::/64, fd00:61::/64 } meta l4proto { tcp, udp } redirect to :%[1]d
	}
}
`

// mustAnswerElsewhere starts that server, and shows the gateway the ways back.
func (s *side) mustAnswerElsewhere(t testing.TB) {
	t.Helper()
	lab.Must(t, s.Uplink.Netfilter(fmt.Sprintf(elsewhereRules, elsewherePort)))
	lab.MustServe(t, s.Uplink, elsewhere, fmt.Sprintf("[::]:%d", elsewherePort))
	node := s.Nodes[0]
	for i, via := range hostAddresses(1) {
		lab.Must(t, s.Uplink.AddRoute(node.PodCIDRs[i], via))
	}
	lab.Must(t,
		s.Uplink.AddRoute(outsiders[0], s.Client.IPv4),
		s.Uplink.AddRoute(outsiders[1], s.Client.IPv6))
}

// backend is a possible endpoint: a pod, or a host that serves.
type backend struct {
	name      string
	node      string
	addresses [2]netip.Addr // by family
}

// firstNode is the one with a proxy.
const firstNode = "node-1"

// backends are in all slices; those of the first node come first.
var backends = []backend{
	{"pod-1-1", "node-1", podAddresses(1)},
	{"pod-1-2", "node-1", podAddresses(2)},
	{"node-1", "node-1", hostAddresses(1)},
	{"pod-2-0", "node-2", [2]netip.Addr{netip.MustParseAddr("10.244.2.2"), netip.MustParseAddr("fd00:10:244:2::2")}},
	{"pod-2-1", "node-2", [2]netip.Addr{netip.MustParseAddr("10.244.2.3"), netip.MustParseAddr("fd00:10:244:2::3")}},
	{"node-2", "node-2", hostAddresses(2)},
}

// podAddresses are those of a pod of node-1, in the lab's plan.
func podAddresses(pod int) [2]netip.Addr {
	return [2]netip.Addr{
		netip.MustParseAddr(fmt.Sprintf("10.244.1.%d", pod+2)),
		netip.MustParseAddr(fmt.Sprintf("fd00:10:244:1::%d", pod+2)),
	}
}

// hostAddresses are those of a node on the first segment, which are its node IPs.
func hostAddresses(node int) [2]netip.Addr {
	return [2]netip.Addr{
		netip.MustParseAddr(fmt.Sprintf("192.168.50.%d", node)),
		netip.MustParseAddr(fmt.Sprintf("fd00:50::%d", node)),
	}
}
