package model

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// packet is the first one of a flow: CONTRACT part 0 defines its outcome.
type packet struct {
	path     path
	src, dst netip.Addr
	protocol corev1.Protocol // or ICMP, which has no port
	port     int32
	unbound  bool // a socket that has not chosen src yet
}

// path is where Sluice sees a packet, or the socket that would send it.
type path int

const (
	nodeSocket path = iota
	podSocket       // of this node
	podDevice       // of this node, past the socket hooks
	uplink          // all other clients
)

// facts are what part 0 asks of a packet beside its addresses.
type facts struct {
	detector bool // there is one for the family
	localPod bool // and it calls this "local pod traffic"
	ofNode   bool // src is an address of this node
	input    bool // the packet is to this node itself
}

// factsOf: CONTRACT 1.5.1, 1.5.2 and the notes of part 0. Sluice's own way to
// recognize pods, by device, is kube-proxy's by interface.
func (c *cluster) factsOf(p packet) facts {
	f := facts{
		ofNode: c.isOfNode(p.src) || p.path == nodeSocket,
		input:  c.isOfNode(p.dst) && p.path != nodeSocket,
	}
	switch c.options.detect {
	case byDevice:
		f.detector, f.localPod = true, p.path == podSocket || p.path == podDevice
	default:
		cidr := c.localCIDR(familyOf(p.src))
		f.detector, f.localPod = cidr.IsValid(), cidr.IsValid() && cidr.Contains(p.src)
	}
	return f
}

// verdict is the outcome of a packet.
type verdict string

const (
	untouched verdict = "untouched"
	reject    verdict = "REJECT"
	drop      verdict = "DROP"
	balance   verdict = "balance"
)

// decision is the answer of part 0.
type decision struct {
	verdict verdict
	sp      *servicePort // that decided, if one did
	eps     []endpoint   // to balance over
	masq    bool         // before F and G, which depend on the endpoint
}

// decide is CONTRACT part 0, A to D.
func (c *cluster) decide(p packet, f facts) decision {
	sp, as := c.owner(p)

	// A. source range firewall
	if sp != nil && slices.Contains(sp.vips, p.dst) && len(sp.ranges) > 0 && !c.admits(sp, p.src) {
		return decision{verdict: drop, sp: sp}
	}

	// B. lookup
	nodePort := c.nodePort(p)
	c.noteIf(exactBeatsNodePort, as != nothing && nodePort != nil && c.isNodePortAddress(p.dst))
	c.noteIf(nodePortElsewhere, as == nothing && nodePort != nil && !c.isNodePortAddress(p.dst))
	switch {
	case as == clusterIP:
		return c.internal(sp, f)
	case as == loadBalancer, as == externalIP:
		return c.external(sp, f)
	case c.isNodePortAddress(p.dst) && nodePort != nil:
		c.note(nodePortAnswers)
		return c.external(nodePort, f)
	case f.input:
		c.noteIf(inputPath, c.isClusterIP(p.dst) || c.isServiceCIDR(p.dst))
		return decision{verdict: untouched}
	case c.isClusterIP(p.dst):
		c.note(rejectUnusedPort)
		c.noteIf(rejectICMP, p.port == 0)
		return decision{verdict: reject}
	case c.isServiceCIDR(p.dst):
		c.note(dropUnallocated)
		return decision{verdict: drop}
	}
	c.note(untouchedByAll)
	return decision{verdict: untouched}
}

// internal is C.
func (c *cluster) internal(sp *servicePort, f facts) decision {
	eps := sp.clusterEps
	if sp.internalLocal {
		c.note(internalLocal)
		eps = sp.localEps
	}
	if len(eps) == 0 && sp.hasAny {
		c.note(internalDrop)
		return decision{verdict: drop, sp: sp}
	}
	if len(eps) == 0 {
		c.note(internalReject)
		return decision{verdict: reject, sp: sp}
	}
	c.noteIf(masqueradeAllFlag, c.options.masqueradeAll)
	c.noteIf(masqueradeClusterIP, f.detector && !f.localPod)
	masq := c.options.masqueradeAll || f.detector && !f.localPod
	return decision{verdict: balance, sp: sp, eps: eps, masq: masq}
}

// external is D.
func (c *cluster) external(sp *servicePort, f facts) decision {
	if !sp.hasAny {
		c.note(externalReject)
		return decision{verdict: reject, sp: sp}
	}
	if !sp.externalLocal {
		c.note(externalCluster)
		return decision{verdict: balance, sp: sp, eps: sp.clusterEps, masq: true}
	}
	c.noteIf(noDetector, !f.detector)
	switch {
	case f.localPod:
		c.note(localOfPod)
		return decision{verdict: balance, sp: sp, eps: sp.clusterEps, masq: false}
	case f.ofNode:
		c.note(localOfNode)
		return decision{verdict: balance, sp: sp, eps: sp.clusterEps, masq: true}
	case len(sp.localEps) == 0:
		c.note(localDrop)
		return decision{verdict: drop, sp: sp}
	}
	c.note(localOfOthers)
	return decision{verdict: balance, sp: sp, eps: sp.localEps, masq: false}
}

// masquerades is F and G: whether an endpoint would see this node.
func (c *cluster) masquerades(d decision, p packet, e endpoint) bool {
	if c.isOfNode(e.at.Addr()) {
		c.note(deliveredLocally)
		return false
	}
	if e.local && e.at.Addr() == p.src {
		c.note(hairpin)
		return true
	}
	return d.masq
}

// admits: A, CONTRACT 1.8.7.
func (c *cluster) admits(sp *servicePort, src netip.Addr) bool {
	inRanges := func(ip netip.Addr) bool {
		return slices.ContainsFunc(sp.ranges, func(r netip.Prefix) bool { return r.Contains(ip) })
	}
	ofVIP := slices.Contains(sp.vips, src)
	switch {
	case inRanges(src):
		c.note(rangesAllow)
		return true
	case ofVIP && inRanges(c.nodeIP(sp.family)):
		c.note(rangesAllowVIP)
		return true
	}
	c.note(rangesForbid)
	c.noteIf(rangesForbidVIP, ofVIP)
	return false
}

// role is what an address is to a Service, the better claims first.
type role int

const (
	nothing role = iota
	clusterIP
	loadBalancer
	externalIP
)

// owner is B1: which Service has an address, port and protocol, and as what. Two Services
// that claim it are docs/decisions's; to CONTRACT 1.1.13, the last writer wins.
func (c *cluster) owner(p packet) (*servicePort, role) {
	return c.ownerOf(dialled{netip.AddrPortFrom(p.dst, uint16(p.port)), p.protocol})
}

func (c *cluster) ownerOf(d dialled) (*servicePort, role) {
	var found *servicePort
	var as role
	for role := clusterIP; role <= externalIP; role++ {
		for _, sp := range c.ports {
			if sp.port != int32(d.at.Port()) || sp.protocol != d.protocol || !sp.has(d.at.Addr(), role) {
				continue
			}
			if found == nil {
				found, as = sp, role
				continue
			}
			c.noteIf(portTwice, found.service == sp.service && found != sp)
			c.noteIf(claimedTwice, found.service != sp.service && as != role)
			c.noteIf(claimedByOlder, found.service != sp.service && as == role)
			if as == role && c.precedes(sp, found, d) {
				c.note(claimedFirst)
				found = sp
			}
		}
	}
	return found, as
}

func (sp *servicePort) has(ip netip.Addr, as role) bool {
	switch as {
	case clusterIP:
		return sp.clusterIP == ip
	case loadBalancer:
		return slices.Contains(sp.vips, ip)
	case externalIP:
		return slices.Contains(sp.externalIPs, ip)
	}
	return false
}

// nodePort is the service port that has a NodePort.
func (c *cluster) nodePort(p packet) *servicePort {
	if !isPort(p.port) {
		return nil
	}
	asked := servicePort{nodePort: p.port, protocol: p.protocol, family: familyOf(p.dst)}
	return c.nodePortOf(asked.atNode())
}

func (c *cluster) nodePortOf(d dialled) *servicePort {
	var found *servicePort
	for _, sp := range c.ports {
		if !isPort(sp.nodePort) || sp.atNode() != d {
			continue
		}
		if found == nil {
			found = sp
			continue
		}
		c.noteIf(nodePortTwice, found.service != sp.service)
		if c.precedes(sp, found, d) {
			found = sp
		}
	}
	return found
}

// isClusterIP: B3.
func (c *cluster) isClusterIP(ip netip.Addr) bool {
	return slices.ContainsFunc(c.ports, func(sp *servicePort) bool { return sp.clusterIP == ip })
}
