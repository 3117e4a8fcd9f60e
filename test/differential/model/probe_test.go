package model

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// prober asks the model and the maps the same questions.
type prober struct {
	*rand.Rand
	all bool // clients, and not a few for each destination
}

// few clients are asked about where a Service is, and one at every third place
// where there is none.
const few = 4

// ports that are asked about: those of Services, NodePorts and one that no Service has.
var probedPorts = []int32{80, 443, 53, 30080, 30053, 9}

var probedProtocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP, icmp}

// destinations are all that generators name, and others.
var destinations = unique(parseAll(slices.Concat(clusterIPs4, clusterIPs6, vips4, vips6, nodeIPs4, nodeIPs6, others,
	[]string{pods4[0], pods6[0]})))

func unique(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// compare returns what the maps answer otherwise than they must, "" if nothing.
func (p *prober) compare(c *cluster, s *subject) string {
	m := openPrograms(s.fakes, c.options)
	from := map[corev1.IPFamily][]packet{
		corev1.IPv4Protocol: c.clients(corev1.IPv4Protocol),
		corev1.IPv6Protocol: c.clients(corev1.IPv6Protocol),
	}
	for _, dst := range destinations {
		clients := from[familyOf(dst)]
		for _, protocol := range probedProtocols {
			for _, port := range probedPorts {
				if protocol == icmp {
					port = 0
				}
				if what := p.ask(c, m, packet{dst: dst, protocol: protocol, port: port}, clients); what != "" {
					return what
				}
			}
		}
	}
	return c.compareHealth(s)
}

// ask returns the outcomes of packets of some clients.
func (p *prober) ask(c *cluster, m *programs, to packet, clients []packet) string {
	n := 0
	switch sp, _ := c.owner(to); {
	case p.all:
		n = len(clients)
	case sp != nil, c.nodePort(to) != nil && (c.isNodePortAddress(to.dst) || to.dst.IsLoopback()):
		n = few
	case p.IntN(3) == 0:
		n = 1
	}
	for i := range n {
		client := clients[i]
		if !p.all {
			client = clients[p.IntN(len(clients))]
		}
		to.path, to.src, to.unbound = client.path, client.src, client.unbound
		if to.path == nodeSocket || to.path == podSocket {
			if to.protocol == corev1.ProtocolSCTP || to.protocol == icmp {
				continue // the hooks do not see it
			}
		}
		if want, have := c.expect(to), m.answer(to); !want.equal(have) {
			return fmt.Sprintf("%s: the maps answer %s, and must %s", to, have, want)
		}
	}
	return ""
}

// clients are all ways and addresses that packets come from.
func (c *cluster) clients(family corev1.IPFamily) []packet {
	v4 := family == corev1.IPv4Protocol
	of := func(a, b []string) []netip.Addr {
		if v4 {
			return parseAll(a)
		}
		return parseAll(b)
	}
	clients := []packet{{path: nodeSocket, src: c.nodeIP(family), unbound: true}}
	for _, src := range c.addrs {
		if familyOf(src) == family && !src.IsLoopback() {
			clients = append(clients, packet{path: nodeSocket, src: src})
		}
	}
	for _, src := range of([]string{pods4[0], pods4[1], "10.9.9.9"}, []string{pods6[0], "fd00:9::9"}) {
		clients = append(clients, packet{path: podSocket, src: src}, packet{path: podDevice, src: src})
	}
	for _, src := range of(append([]string{pods4[2], "192.168.0.3", "5.6.7.8", "1.2.3.4"}, outside4...), append([]string{pods6[1], "2001:db8::4"}, outside6...)) {
		clients = append(clients, packet{path: uplink, src: src})
	}
	return clients
}

// compareHealth compares the counts of health check node ports.
func (c *cluster) compareHealth(s *subject) string {
	for key, svc := range c.services {
		if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || c.externalPolicy(svc) != corev1.ServiceExternalTrafficPolicyLocal {
			continue
		}
		res, _ := s.agent.Resolve(lb.ServiceName{Namespace: key.namespace, Name: key.name})
		for family, of := range map[corev1.IPFamily]lb.Family{corev1.IPv4Protocol: lb.IPv4, corev1.IPv6Protocol: lb.IPv6} {
			if !slices.ContainsFunc(c.ports, func(sp *servicePort) bool { return sp.service == svc && sp.family == family }) {
				continue
			}
			if want, have := c.localReady(svc, family), res.LocalReady(of); want != have {
				return fmt.Sprintf("Service %s/%s has %d local ready endpoints of %s, and must have %d", key.namespace, key.name, have, family, want)
			}
		}
	}
	return ""
}

var pathText = [...]string{nodeSocket: "socket of the node", podSocket: "socket of a pod", podDevice: "packet of a pod", uplink: "packet from outside"}

func (p packet) String() string {
	src := p.src.String()
	if p.unbound {
		src += " (unbound)"
	}
	return fmt.Sprintf("%s, %s -> %s port %d %s", pathText[p.path], src, p.dst, p.port, p.protocol)
}

func (a answer) String() string {
	if a.verdict != balance {
		return string(a.verdict)
	}
	parts := []string{a.port, a.algorithm}
	if a.affinity != 0 {
		parts = append(parts, fmt.Sprintf("affinity %d s", a.affinity))
	}
	for _, t := range a.targets {
		text := t.at.String()
		for _, flag := range []struct {
			set  bool
			text string
		}{{t.local, "local"}, {t.terminating, "terminating"}, {t.masquerade, "masqueraded"}} {
			if flag.set {
				text += " " + flag.text
			}
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}
