package lab

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Commands and attributes of the path manager of Multipath TCP: see linux/mptcp_pm.h.
const (
	multipathAddAddr   = 1
	multipathSetLimits = 5

	multipathAttrAddr       = 1
	multipathAttrAddAddrs   = 2
	multipathAttrSubflows   = 3
	multipathAddrFamily     = 1
	multipathAddrV4         = 3
	multipathAddrFlags      = 6
	multipathFlagAnnounce   = 1
	multipathFamilyVersion1 = 1
)

// Multipath has the connections of Multipath TCP in the namespace begin up to two further subflows each, to the
// addresses that their peers announce, and announce these, of IPv4, to their peers. The error wraps [unix.ENOENT]
// if the kernel has no Multipath TCP.
func (ns *Namespace) Multipath(announced ...netip.Addr) error {
	return ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("mptcp_pm")
		if err != nil {
			return fmt.Errorf("path manager of Multipath TCP: %w", err)
		}
		request := func(command uint8, attrs ...*nl.RtAttr) error {
			r := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
			r.AddData(&nl.Genlmsg{Command: command, Version: multipathFamilyVersion1})
			for _, attr := range attrs {
				r.AddData(attr)
			}
			_, err := r.Execute(unix.NETLINK_GENERIC, 0)

			return err
		}
		two := nl.Uint32Attr(2)
		if err := request(multipathSetLimits, nl.NewRtAttr(multipathAttrAddAddrs, two), nl.NewRtAttr(multipathAttrSubflows, two)); err != nil {
			return fmt.Errorf("limits of Multipath TCP: %w", err)
		}
		for _, addr := range announced {
			attr := nl.NewRtAttr(multipathAttrAddr|unix.NLA_F_NESTED, nil)
			attr.AddRtAttr(multipathAddrFamily, nl.Uint16Attr(unix.AF_INET))
			attr.AddRtAttr(multipathAddrV4, addr.AsSlice())
			attr.AddRtAttr(multipathAddrFlags, nl.Uint32Attr(multipathFlagAnnounce))
			if err := request(multipathAddAddr, attr); err != nil {
				return fmt.Errorf("announce %s by Multipath TCP: %w", addr, err)
			}
		}

		return nil
	})
}
