package flows

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Of either family, by [familyIndex].
var (
	everywhere = [...]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	families   = [...]int{netlink.FAMILY_V4, netlink.FAMILY_V6}
)

func familyIndex(ip netip.Addr) int {
	if ip.Is4() {
		return 0
	}

	return 1
}

// hop is one step of a packet, between devices that are joined. They have no
// addresses of a common subnet: a neighbour that is known for good stands for the
// other side.
type hop struct {
	from, to lab.End
	gateways [len(families)]netip.Addr // what the other side is called, by family
}

// hopTo returns a hop. No two neighbours of a device have one number.
func hopTo(from, to lab.End, number byte) hop {
	return hop{from, to, [...]netip.Addr{
		netip.AddrFrom4([4]byte{169, 254, 1, number}),
		netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: number}),
	}}
}

// lead routes a prefix to the other side as a gateway. Preferred is the source
// address of what is sent, unless it is zero.
func (h hop) lead(prefix netip.Prefix, preferred netip.Addr) error {
	return h.route(h.gateways[familyIndex(prefix.Addr())], netlink.Route{Dst: ipNet(prefix), Src: preferred.AsSlice()})
}

// leadAll routes everything there.
func (h hop) leadAll() error {
	return errors.Join(h.lead(everywhere[0], netip.Addr{}), h.lead(everywhere[1], netip.Addr{}))
}

// leadTo routes an address of the other side there: without a gateway, as pods
// are reached.
func (h hop) leadTo(ip netip.Addr) error {
	return h.route(ip, netlink.Route{Dst: ipNet(single(ip)), Scope: netlink.SCOPE_LINK})
}

// route adds a route to a neighbour, or replaces it.
func (h hop) route(neighbour netip.Addr, route netlink.Route) error {
	handle := h.from.Namespace.Netlink()
	from, err := handle.LinkByName(h.from.Device)
	if err != nil {
		return fmt.Errorf("device %s: %w", h.from.Device, err)
	}
	to, err := h.to.Namespace.Netlink().LinkByName(h.to.Device)
	if err != nil {
		return fmt.Errorf("device %s: %w", h.to.Device, err)
	}
	route.LinkIndex = from.Attrs().Index
	if route.Scope != netlink.SCOPE_LINK {
		route.Gw, route.Flags = neighbour.AsSlice(), int(netlink.FLAG_ONLINK)
	}
	err = handle.NeighSet(&netlink.Neigh{
		LinkIndex:    from.Attrs().Index,
		State:        unix.NUD_PERMANENT,
		IP:           neighbour.AsSlice(),
		HardwareAddr: to.Attrs().HardwareAddr,
	})
	if err == nil {
		err = handle.RouteReplace(&route)
	}
	if err != nil {
		return fmt.Errorf("route to %s by %s: %w", route.Dst, h.from.Device, err)
	}

	return nil
}

const tableOfSent = 100

// leadEven makes all that a namespace sends go there, even to addresses of its
// own: a packet may come to a node from the address that it goes to. What arrives
// is delivered as ever.
func (h hop) leadEven() error {
	handle := h.from.Namespace.Netlink()
	var err error
	for i, family := range families {
		sent := ruleOf(family, 10, tableOfSent)
		sent.IifName = "lo" // the kernel's word for itself
		err = errors.Join(err,
			h.route(h.gateways[i], netlink.Route{Dst: ipNet(everywhere[i]), Table: tableOfSent}),
			handle.RuleAdd(sent),
			handle.RuleAdd(ruleOf(family, 20, unix.RT_TABLE_LOCAL)),
			handle.RuleDel(ruleOf(family, 0, unix.RT_TABLE_LOCAL)),
		)
	}

	return err
}

func ruleOf(family, priority, table int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = family, priority, table

	return rule
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: prefix.Masked().Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}
}

// single is the prefix of one address.
func single(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }
