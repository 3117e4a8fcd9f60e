package model

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// dialled is what clients dial: an address, or the unspecified one for a NodePort.
type dialled struct {
	at       netip.AddrPort
	protocol corev1.Protocol
}

// claims are for how long Services have had addresses: docs/decisions. Which of two Services has an address that
// both name is left open by CONTRACT 1.1.13.
type claims struct {
	since   map[claim]claimed
	count   int
	started bool                  // an agent has started, and knows no order
	held    map[dialled]objectKey // what the maps said then
}

type claim struct {
	service objectKey
	dialled
}

type claimed struct {
	created time.Time
	since   int // 0: an earlier agent has left it so; 1: known at the start
}

// dials returns what clients dial to reach a service port, but for the NodePort.
func (sp *servicePort) dials() []dialled {
	var all []dialled
	for _, ip := range slices.Concat([]netip.Addr{sp.clusterIP}, sp.vips, sp.externalIPs) {
		all = append(all, dialled{netip.AddrPortFrom(ip, uint16(sp.port)), sp.protocol})
	}
	return all
}

// atNode is what clients dial to reach a service port at the node's addresses.
func (sp *servicePort) atNode() dialled {
	ip := netip.IPv6Unspecified()
	if sp.family == corev1.IPv4Protocol {
		ip = netip.IPv4Unspecified()
	}
	return dialled{netip.AddrPortFrom(ip, uint16(sp.nodePort)), sp.protocol}
}

// startClaims is what the start of an agent does to the order of claims: it takes the maps as another agent has left them, by
// what was read last.
func (c *cluster) startClaims() {
	c.claims = claims{started: true, held: map[dialled]objectKey{}, since: c.claims.since}
	for _, sp := range c.ports {
		for _, d := range sp.dials() {
			if owner, _ := c.ownerOf(d); owner != nil {
				c.claims.held[d] = keyOf(&owner.service.ObjectMeta)
			}
		}
		if owner := c.nodePortOf(sp.atNode()); owner != nil {
			c.claims.held[sp.atNode()] = keyOf(&owner.service.ObjectMeta)
		}
	}
}

// readClaims notes which claims of the service ports are new. An agent takes the Services that changed at once in the
// order of their names.
func (c *cluster) readClaims() {
	before, now := c.claims.since, map[claim]claimed{}
	ports := slices.Clone(c.ports)
	slices.SortStableFunc(ports, func(a, b *servicePort) int {
		return keyOf(&a.service.ObjectMeta).compare(keyOf(&b.service.ObjectMeta))
	})
	for _, sp := range ports {
		for _, d := range append(sp.dials(), sp.atNode()) {
			cl := claim{keyOf(&sp.service.ObjectMeta), d}
			was, made := before[cl]
			switch created := sp.service.CreationTimestamp.Time; {
			case c.claims.started && c.claims.held[d] == cl.service:
				now[cl] = claimed{created, 0}
			case c.claims.started:
				now[cl] = claimed{created, 1}
			case made && was.created.Equal(created):
				now[cl] = was
			default:
				if _, twice := now[cl]; !twice {
					c.claims.count++
					now[cl] = claimed{created, 1 + c.claims.count}
				}
			}
		}
	}
	c.claims = claims{since: now, count: c.claims.count}
}

// precedes reports whether a service port has what both name, which are of the same kind; by age they are sorted.
func (c *cluster) precedes(a, b *servicePort, d dialled) bool {
	of := func(sp *servicePort) int { return c.claims.since[claim{keyOf(&sp.service.ObjectMeta), d}].since }
	return of(a) < of(b)
}
