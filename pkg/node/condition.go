package node

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// certainty is whether something holds, by what is known.
type certainty int

const (
	no certainty = iota
	maybe
	yes
)

// not returns whether the opposite holds.
func (c certainty) not() certainty { return yes - c }

// without returns the certainty that is left of c where what may hold has gone elsewhere.
func (c certainty) without(holds certainty) certainty { return min(c, holds.not()) }

// certain returns the certainty of what is known.
func certain(holds bool) certainty {
	if holds {
		return yes
	}

	return no
}

// condition is one of a rule.
type condition func(Packet) certainty

// unreadCondition is one that is not understood.
func unreadCondition(Packet) certainty { return maybe }

// unless returns the opposite of the condition if inverted is set.
func (c condition) unless(inverted bool) condition {
	if !inverted {
		return c
	}

	return func(p Packet) certainty { return c(p).not() }
}

// holds reports whether a packet meets all conditions of a rule.
func (s *step) holds(p Packet) certainty {
	holds := yes
	for _, c := range s.when {
		holds = min(holds, c(p))
	}

	return holds
}

// quantity is what of a packet a condition compares.
type quantity int

const (
	unread quantity = iota // the zero value: what is not understood
	destinationPort
	sourceV4
	sourceV6
	destinationV4
	destinationV6
	deviceIn
	deviceOut
	protocolNumber
	addressFamily
	connectionState
	connectionStatus
)

// metaQuantities are those of the keys of meta expressions of nftables.
var metaQuantities = map[uint32]quantity{
	unix.NFT_META_IIFNAME: deviceIn, unix.NFT_META_OIFNAME: deviceOut,
	unix.NFT_META_L4PROTO: protocolNumber, unix.NFT_META_NFPROTO: addressFamily,
}

// The first packet of a connection is new: the kernel's NF_CT_STATE_BIT(IP_CT_NEW). It has the status of no translation by
// netfilter, since Sluice has translated it before.
const (
	stateNew              = 1 << 3
	statusDestinationNAT  = 1 << 5
	legacyStateNew        = 1 << 3
	legacyConntrackStates = 1 << 0 // the flag of a match that compares states
	legacyStateAlias      = 1 << 13
)

// of returns a quantity of a packet as the kernel compares it, nil if it is not known.
func (q quantity) of(p Packet) []byte {
	to := p.Destination.Addr()
	addr := func(a netip.Addr, v4 bool) []byte {
		if !a.IsValid() || a.Is4() != v4 {
			return nil
		}

		return a.AsSlice()
	}
	name := func(device string) []byte {
		if device == "" {
			return nil
		}

		return append([]byte(device), make([]byte, 16-min(15, len(device)))...)[:16]
	}
	switch q {
	case destinationPort:
		return binary.BigEndian.AppendUint16(nil, p.Destination.Port())
	case sourceV4, sourceV6:
		return addr(p.Source, q == sourceV4)
	case destinationV4, destinationV6:
		return addr(to, q == destinationV4)
	case deviceIn:
		return name(p.In)
	case deviceOut:
		return name(p.Out)
	case protocolNumber:
		return []byte{p.Protocol}
	case addressFamily:
		if to.Is4() {
			return []byte{unix.NFPROTO_IPV4}
		}

		return []byte{unix.NFPROTO_IPV6}
	case connectionState:
		return binary.NativeEndian.AppendUint32(nil, stateNew)
	}

	return nil
}

// value returns the field of a packet, as many bytes as a value has that it is compared with; nil if it is not known.
func (f field) value(p Packet, size int) []byte {
	value := f.quantity.of(p)
	if f.quantity == connectionStatus && size == 4 && len(f.mask) == 4 && binary.NativeEndian.Uint32(f.mask) == statusDestinationNAT {
		value = make([]byte, size)
	}
	if len(value) < size || size == 0 {
		return nil
	}
	value = bytes.Clone(value[:size])
	for i := range min(len(f.mask), size) {
		value[i] &= f.mask[i]
	}

	return value
}

// compared returns the condition that the field compares so with a value.
func (f field) compared(op uint32, with []byte) condition {
	return func(p Packet) certainty {
		value := f.value(p, len(with))
		if value == nil {
			return maybe
		}
		order := bytes.Compare(value, with)
		switch op {
		case unix.NFT_CMP_EQ:
			return certain(order == 0)
		case unix.NFT_CMP_NEQ:
			return certain(order != 0)
		case unix.NFT_CMP_LT:
			return certain(order < 0)
		case unix.NFT_CMP_LTE:
			return certain(order <= 0)
		case unix.NFT_CMP_GT:
			return certain(order > 0)
		case unix.NFT_CMP_GTE:
			return certain(order >= 0)
		}

		return maybe
	}
}

// within returns the condition that the field is in an interval.
func (f field) within(from, to []byte) condition {
	return func(p Packet) certainty {
		return min(f.compared(unix.NFT_CMP_GTE, from)(p), f.compared(unix.NFT_CMP_LTE, to)(p))
	}
}

// among returns the condition that the field is in one of these intervals.
func (f field) among(elements []element) condition {
	return func(p Packet) certainty {
		found := no
		for _, e := range elements {
			found = max(found, f.within(e.from, e.to)(p))
		}

		return found
	}
}

// conditionOfMatch returns the condition of a match extension of iptables, whose layout is the kernel's.
func conditionOfMatch(name string, info []byte) condition {
	order := binary.NativeEndian
	port := field{quantity: destinationPort}
	ports := func(low, high uint16) condition {
		return port.within(binary.BigEndian.AppendUint16(nil, low), binary.BigEndian.AppendUint16(nil, high))
	}
	const allPorts = 0xffff
	switch {
	case name == "comment":
		return func(Packet) certainty { return yes }
	case name == "tcp" && len(info) >= 12 || name == "udp" && len(info) >= 9: // struct xt_tcp, struct xt_udp
		anySource := order.Uint16(info) == 0 && order.Uint16(info[2:]) == allPorts
		inverted := info[8]
		if name == "tcp" {
			if inverted = info[11]; info[8] != 0 || info[9] != 0 { // options and flags
				return unreadCondition
			}
		}
		const invertedTo = 1 << 1
		if !anySource || inverted&^invertedTo != 0 {
			return unreadCondition
		}

		return ports(order.Uint16(info[4:]), order.Uint16(info[6:])).unless(inverted != 0)
	case name == "multiport" && len(info) >= 48 && info[0] == 1: // struct xt_multiport_v1: 1 is the destination
		const first, isRange, inverted = 2, 32, 47
		var any []condition
		for i := 0; i < min(int(info[1]), 15); i++ {
			low, high := order.Uint16(info[first+2*i:]), order.Uint16(info[first+2*i:])
			if info[isRange+i] != 0 && i < 14 {
				i++
				high = order.Uint16(info[first+2*i:])
			}
			any = append(any, ports(low, high))
		}

		return condition(func(p Packet) certainty {
			found := no
			for _, c := range any {
				found = max(found, c(p))
			}

			return found
		}).unless(info[inverted] != 0)
	case name == "conntrack" && len(info) >= 154: // struct xt_conntrack_mtinfo3
		flags, inverted, states := order.Uint16(info[146:]), order.Uint16(info[148:]), order.Uint16(info[150:])
		if flags&^(legacyConntrackStates|legacyStateAlias) != 0 {
			return unreadCondition
		}

		return condition(func(Packet) certainty { return certain(states&legacyStateNew != 0) }).unless(inverted&legacyConntrackStates != 0)
	case name == "state" && len(info) >= 4: // struct xt_state_info
		return func(Packet) certainty { return certain(order.Uint32(info)&legacyStateNew != 0) }
	}

	return unreadCondition
}
