package agent

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// lastingIPs returns the addresses of the Node, and those that it had of a family
// of which it has none any more. If the Node is gone, or loses its addresses for a
// moment, node ports must not open on every address: "primary" stays what it was.
func lastingIPs(now, before []netip.Addr) []netip.Addr {
	lasting := slices.Clone(now)
	for _, ip := range before {
		if !hasFamily(now, lb.FamilyOf(ip)) {
			lasting = append(lasting, ip)
		}
	}

	return lasting
}

// withNodeIP returns the Node's addresses with the configured one first, which replaces
// the one of its family. The zero address changes nothing.
func withNodeIP(ips []netip.Addr, configured netip.Addr) []netip.Addr {
	if !configured.IsValid() {
		return ips
	}
	with := []netip.Addr{configured}
	for _, ip := range ips {
		if lb.FamilyOf(ip) != lb.FamilyOf(configured) {
			with = append(with, ip)
		}
	}

	return with
}

func hasFamily(ips []netip.Addr, family lb.Family) bool {
	return slices.ContainsFunc(ips, func(ip netip.Addr) bool { return lb.FamilyOf(ip) == family })
}
