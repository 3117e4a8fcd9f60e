package model

import (
	"net/netip"
	"slices"
)

// Where Sluice differs from CONTRACT.md on purpose: all of it is in this file.
// (What comes at once instead of with the next full sync is noted in cluster_test.go;
// which of two claims to one address wins, at owner in decide_test.go.)

// answer is what the maps must answer for a packet.
type answer struct {
	verdict   verdict
	port      string // of a Service, that balances
	targets   []target
	affinity  int32
	algorithm string
}

// target is a backend as a packet reaches it.
type target struct {
	at                             netip.AddrPort
	local, terminating, masquerade bool
}

// expect is what Sluice must answer.
func (c *cluster) expect(p packet) answer {
	d := c.decideAsSluice(p)
	if d.verdict != balance {
		return answer{verdict: d.verdict}
	}
	want := answer{verdict: balance, port: d.sp.text, affinity: d.sp.affinity, algorithm: d.sp.algorithm}
	for _, e := range d.eps {
		want.targets = append(want.targets, target{e.at, e.local, e.terminating, c.masqueradesAsSluice(d, p, e)})
	}
	slices.SortFunc(want.targets, target.compare)
	return want
}

func (t target) compare(u target) int { return t.at.Compare(u.at) }

// decideAsSluice is decide with other facts.
func (c *cluster) decideAsSluice(p packet) decision {
	f := c.factsOf(p)
	switch {
	case p.path == nodeSocket && p.dst.IsLoopback() && c.options.loopbackNodePorts:
		// DESIGN.md 6.3: NodePorts answer on all of loopback for host processes, whatever
		// addresses were selected.
		if sp := c.nodePort(p); sp != nil {
			c.note(differsLoopback)
			return c.external(sp, f)
		}
	case p.path == podSocket:
		// DESIGN.md 2.2: a socket of a pod of this node is known as such, also where
		// there is no detector for its family or its address is in no pod CIDR.
		c.noteIf(differsPodSocket, !f.localPod)
		f.localPod = true
		// A socket is asked before the packet has a way: an address of this node that
		// is also a ClusterIP, or in a ServiceCIDR, is refused like any other.
		c.noteIf(differsInputAtSocket, f.input && (c.isClusterIP(p.dst) || c.isServiceCIDR(p.dst)))
		f.input = false
	case p.path == podDevice, p.path == uplink:
		// DESIGN.md 2.2: what comes by an uplink is from no pod of this node, also
		// where its address is one of the cluster's pods.
		c.noteIf(differsPodElsewhere, p.path == uplink && f.localPod)
		f.localPod = f.localPod && p.path == podDevice
		// docs/decisions: what this node sends starts in sockets. What comes by a
		// device with an address of the node is no exception.
		c.noteIf(differsNodeAtDevice, f.ofNode)
		f.ofNode = false
		// docs/decisions, 2: no first packet comes from a Service.
		d := c.decide(p, f)
		if d.verdict != untouched && c.isClusterIP(p.src) && !c.isOfNode(p.src) {
			c.noteIf(differsServiceAsSource, d.verdict != drop)
			return decision{verdict: drop}
		}
		return d
	}
	return c.decide(p, f)
}

// isLeftAlone reports whether packets to an address in a ServiceCIDR pass, although no Service has it
// here. kube-proxy drops them once another proxy had its turn; Sluice would drop them before, so that of
// a Service of another proxy is left to it (docs/kube-proxy.md, "Services of other proxies"). A
// ServiceCIDR of a single address drops nothing (SetServiceCIDRs in pkg/reconcile).
func (c *cluster) isLeftAlone(ip netip.Addr) bool {
	if slices.Contains(c.otherProxies, ip) {
		c.note(differsOtherProxy)
		return true
	}
	single := !slices.ContainsFunc(c.serviceCIDRs, func(p netip.Prefix) bool { return !p.IsSingleIP() && p.Contains(ip) })
	c.noteIf(differsSingleAddress, single)
	return single
}

// masqueradesAsSluice reports whether a backend sees this node's address.
func (c *cluster) masqueradesAsSluice(d decision, p packet, e endpoint) bool {
	kubeProxy := c.masquerades(d, p, e)
	switch {
	case c.isOfNode(e.at.Addr()):
		return kubeProxy // never: G
	case p.path == nodeSocket, p.path == podSocket:
		// DESIGN.md 1: the kernel chooses the source of a socket's connection, towards
		// the backend: a pod keeps its own address, this node gets what a masquerade
		// would give it.
		c.noteIf(differsSocketSource, kubeProxy)
		return false
	case e.at.Addr() == p.src:
		return true // F, and if the backend is on another node the reply would miss us
	case c.options.masqueradeAll && kubeProxy:
		return true // DESIGN.md 6.1: "masqueradeAll restores kube-proxy's behaviour"
	case p.path == podDevice:
		c.noteIf(differsClientHere, kubeProxy) // DESIGN.md 6.1
		return false
	case e.local:
		c.noteIf(differsBackendHere, kubeProxy) // DESIGN.md 6.1
		return false
	}
	// DESIGN.md 2.2: the reply would miss this node, also where the client is a pod
	// of another node, or unknown.
	c.noteIf(differsReplyMisses, !kubeProxy)
	return true
}

func (a answer) equal(b answer) bool {
	return a.verdict == b.verdict && a.port == b.port && a.affinity == b.affinity &&
		a.algorithm == b.algorithm && slices.Equal(a.targets, b.targets)
}
