package node

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
)

// Netfilter is what nftables and iptables have in a network namespace, as far as it concerns Services.
type Netfilter struct {
	// Chains are all chains. There may be many thousands where kube-proxy runs.
	Chains []NetfilterChain
	// Rules are those that no longer match a packet to a Service whose destination was translated
	// at a device, which is before netfilter sees the packet. Rules of kube-proxy and of CNIs that
	// distinguish pods are not among them.
	Rules []NetfilterRule
	// Drops are the policies that drop every forwarded packet which no rule accepts.
	Drops []NetfilterRule

	filters []filter // see [Netfilter.Judge]
}

// NetfilterChain is the name of a chain.
type NetfilterChain struct {
	Table string // "nftables ip nat", "legacy iptables nat"
	Name  string
}

// String returns the names of the table and the chain.
func (c NetfilterChain) String() string { return c.Table + " " + c.Name }

// NetfilterRule is a rule that selects packets by their original destination, or by what comes
// with it.
type NetfilterRule struct {
	NetfilterChain
	Match
	// Does is a verb: "drops", "rejects", "marks", or [MarksConnections].
	Does string
}

// MarksConnections is what a rule does whose mark the answers of a connection get, too. VPC CNIs
// have such rules for node ports, to choose the device by which answers leave.
const MarksConnections = "marks connections of"

// Match is what a rule selects packets by, of what concerns Services. It is the last condition of
// each kind, of the rule or of one by which its chain is reached.
type Match struct {
	Ports       []bpf.PortRange // of the destination; nil: any
	Destination netip.Prefix    // invalid: any
	// Original is true if it is the destination before all translations, as netfilter's connection
	// tracking knows it.
	Original bool
}

// String describes the rule, as "nftables ip raw PREROUTING drops packets to ports 30000-32767".
func (r NetfilterRule) String() string {
	text := fmt.Sprintf("%s %s packets", r.NetfilterChain, r.Does)
	if r.Destination.IsValid() {
		text += " to " + r.Destination.String()
	}
	for i, ports := range r.Ports {
		if i == 0 {
			text += " to ports "
		} else {
			text += ", "
		}
		text += fmt.Sprint(ports.Low)
		if ports.High != ports.Low {
			text += fmt.Sprintf("-%d", ports.High)
		}
	}
	if r.Original {
		text += ", before translation"
	}

	return text
}

// within returns the match of a rule in a chain that is reached by a rule with the match outer.
func (m Match) within(outer Match) Match {
	if m.Ports == nil {
		m.Ports = outer.Ports
	}
	if !m.Destination.IsValid() {
		m.Destination = outer.Destination
	}
	m.Original = m.Original || outer.Original

	return m
}

// step is a rule of a chain, of either kind of tables, or what a rule does for one element of its map of verdicts.
type step struct {
	Match
	does string // a verb, or empty
	jump string // the chain that it jumps to, or empty
	when []condition
	then verdict
}

// ReadNetfilter reads the rules of the calling thread's network namespace. It creates no table and
// loads no module.
func ReadNetfilter() (Netfilter, error) { return Complete(readNetfilter) }

func readNetfilter() (Netfilter, error) {
	var found Netfilter
	tables, err := openNFTables(netns.None())
	if err != nil {
		return found, err
	}
	defer tables.close()
	if err := tables.survey(&found); err != nil {
		return found, fmt.Errorf("nftables: %w", err)
	}
	if err := surveyLegacy(&found); err != nil {
		return found, fmt.Errorf("legacy iptables: %w", err)
	}

	return found, nil
}

// addChain adds the rules that concern Services, of a base chain and of those that it jumps to. Early is set if packets
// pass the chain before kube-proxy would translate them.
func (f *Netfilter) addChain(base NetfilterChain, early bool, stepsOf func(chain string) ([]step, error)) error {
	isOwn := func(chain string) bool {
		return slices.ContainsFunc(ownPrefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
	}
	if isOwn(base.Name) {
		return nil
	}

	return visit(base, Match{}, stepsOf, make(map[string]bool), func(at NetfilterChain, match Match, s step) bool {
		selects := match.Ports != nil || match.Destination.IsValid() || s.does == MarksConnections
		if s.does != "" && (early && selects || match.Original) {
			f.Rules = append(f.Rules, NetfilterRule{at, match, s.does})
		}

		return !isOwn(s.jump)
	})
}

// visit visits the rules of a chain, each with all that leads to it, and those of the chains to which rules jump for
// which jumps returns true.
func visit(at NetfilterChain, outer Match, stepsOf func(chain string) ([]step, error), seen map[string]bool,
	jumps func(at NetfilterChain, match Match, s step) bool) error {
	key := fmt.Sprint(at.Name, outer)
	if seen[key] {
		return nil
	}
	seen[key] = true
	steps, err := stepsOf(at.Name)
	if err != nil {
		return err
	}
	for _, s := range steps {
		match := s.within(outer)
		if jumps(at, match, s) && s.jump != "" {
			if err := visit(NetfilterChain{at.Table, s.jump}, match, stepsOf, seen, jumps); err != nil {
				return err
			}
		}
	}

	return nil
}

// ownPrefixes begin the names of chains of kube-proxy and of CNIs, whose rules have checks of their own.
var ownPrefixes = []string{"KUBE-", "cali-", "CILIUM_", "FLANNEL-", "CNI-"}

// familyNames are nft's names of families.
var familyNames = map[uint8]string{
	unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet",
	unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_ARP: "arp",
}

// survey adds the chains and the rules of nftables, which include those of iptables-nft.
func (n nftables) survey(found *Netfilter) error {
	chains, err := n.chains()
	if err != nil {
		return err
	}
	for _, c := range chains {
		at := NetfilterChain{"nftables " + cmp.Or(familyNames[c.family], "other") + " " + c.table, c.name}
		found.Chains = append(found.Chains, at)
		if !c.hooked || c.table == "kube-proxy" {
			continue
		}
		isIP := c.family == unix.NFPROTO_IPV4 || c.family == unix.NFPROTO_IPV6 || c.family == unix.NFPROTO_INET
		early := isIP && c.hook == unix.NF_INET_PRE_ROUTING ||
			c.family == unix.NFPROTO_NETDEV && c.hook == unix.NF_NETDEV_INGRESS
		if !early && !isIP {
			continue
		}
		stepsOf := func(name string) ([]step, error) { return n.stepsOf(chain{c.family, c.table, name}) }
		policy := step{then: verdictAccepts}
		if c.policy != nfAccept {
			policy = step{does: policyDrops, then: verdictDrops}
		}
		if isIP {
			if err := found.addFilter(c.hook, at, []step{policy}, stepsOf); err != nil {
				return err
			}
		}
		if err := found.addChain(at, early, stepsOf); err != nil {
			return err
		}
	}

	return nil
}

// stepsOf returns the rules of a chain.
func (n nftables) stepsOf(c chain) ([]step, error) {
	var steps []step
	for expressions, err := range n.rules(c) {
		if err != nil {
			return nil, err
		}
		of, err := n.stepsOfRule(c, expressions)
		if err != nil {
			return nil, err
		}
		steps = append(steps, of...)
	}

	return steps, nil
}

// field is what an expression has loaded into a register. The zero value is nothing that
// concerns Services.
type field struct {
	quantity // of a packet, for conditions
	mask     []byte

	port, original bool
	address        int // bytes of the destination address that are loaded; 0: none are
	bits           int // that a mask has left of them
	v6             bool
}

// stepsOfRule returns what a rule selects, and what it does: one step, and one for each element of a map of verdicts.
func (n nftables) stepsOfRule(c chain, expressions []expression) ([]step, error) {
	var s step
	var cases []step
	loaded := make(map[uint32]field) // by register
	for _, e := range expressions {
		switch e.name {
		case "payload":
			loaded[number(e.data[unix.NFTA_PAYLOAD_DREG])] = fieldOfPayload(e)
		case "ct":
			_, writes := e.data[unix.NFTA_CT_SREG]
			if writes && number(e.data[unix.NFTA_CT_KEY]) == unix.NFT_CT_MARK {
				s.does = MarksConnections
			} else if !writes {
				loaded[number(e.data[unix.NFTA_CT_DREG])] = fieldOfConnection(e)
			}
		case "meta":
			if _, writes := e.data[unix.NFTA_META_SREG]; !writes {
				loaded[number(e.data[unix.NFTA_META_DREG])] = field{quantity: metaQuantities[number(e.data[unix.NFTA_META_KEY])]}
			} else if number(e.data[unix.NFTA_META_KEY]) == unix.NFT_META_MARK {
				s.does = cmp.Or(s.does, "marks")
			}
		case "bitwise":
			f := loaded[number(e.data[unix.NFTA_BITWISE_SREG])]
			f.mask = valueOf(e.data[unix.NFTA_BITWISE_MASK])
			f.bits = maskBits(f.mask)
			if len(f.mask) == 0 || strings.Trim(string(valueOf(e.data[unix.NFTA_BITWISE_XOR])), "\x00") != "" {
				f.quantity = unread
			}
			loaded[number(e.data[unix.NFTA_BITWISE_DREG])] = f
		case "cmp":
			f, op, value := loaded[number(e.data[unix.NFTA_CMP_SREG])], number(e.data[unix.NFTA_CMP_OP]), valueOf(e.data[unix.NFTA_CMP_DATA])
			s.compare(f, op, value)
			s.when = append(s.when, f.compared(op, value))
		case "range":
			f := loaded[number(e.data[unix.NFTA_RANGE_SREG])]
			from, to := valueOf(e.data[unix.NFTA_RANGE_FROM_DATA]), valueOf(e.data[unix.NFTA_RANGE_TO_DATA])
			s.compare(f, unix.NFT_CMP_GTE, from)
			s.compare(f, unix.NFT_CMP_LTE, to)
			s.when = append(s.when, f.within(from, to).unless(number(e.data[unix.NFTA_RANGE_OP]) != 0))
		case "lookup":
			f := loaded[number(e.data[unix.NFTA_LOOKUP_SREG])]
			if f.quantity == unread && !f.port && f.address == 0 {
				s.when = append(s.when, unreadCondition)

				continue // the set may be large
			}
			elements, err := n.elements(c, text(e.data[unix.NFTA_LOOKUP_SET]))
			if err != nil {
				return nil, err
			}
			s.lookUp(f, elements)
			register, maps := e.data[unix.NFTA_LOOKUP_DREG]
			if maps && number(register) == unix.NFT_REG_VERDICT {
				s.does = "has a verdict for"
				for _, element := range elements {
					one := step{Match: s.Match, when: append(slices.Clone(s.when), f.within(element.from, element.to))}
					one.decide(element.verdict)
					cases = append(cases, one)
				}
			} else if !maps {
				flags, inverts := e.data[unix.NFTA_LOOKUP_FLAGS]
				s.when = append(s.when, f.among(elements).unless(inverts && number(flags)&unix.NFT_LOOKUP_F_INV != 0))
			}
		case "match":
			s.addMatch(text(e.data[unix.NFTA_MATCH_NAME]), e.data[unix.NFTA_MATCH_INFO])
		case "target":
			s.does = cmp.Or(targetVerb(text(e.data[xtName])), s.does)
			s.then = targetVerdict(text(e.data[xtName]))
		case "reject":
			s.does, s.then = "rejects", verdictDrops
		case "queue":
			s.does, s.then = "queues", verdictUnread
		case "nat", "redir", "tproxy":
			s.does, s.then = "redirects", verdictAccepts
		case "immediate":
			if register := number(e.data[unix.NFTA_IMMEDIATE_DREG]); register == unix.NFT_REG_VERDICT {
				s.decide(e.data[unix.NFTA_IMMEDIATE_DATA])
			} else {
				delete(loaded, register)
			}
		case "counter", "log", "masq":
		default: // it may be a condition, as a limit is, or load what is not read
			s.when = append(s.when, unreadCondition)
			clear(loaded)
		}
	}

	return append(cases, s), nil
}

// fieldOfPayload returns the part of a packet's headers that an expression loads.
func fieldOfPayload(e expression) field {
	offset, size := number(e.data[unix.NFTA_PAYLOAD_OFFSET]), int(number(e.data[unix.NFTA_PAYLOAD_LEN]))
	switch number(e.data[unix.NFTA_PAYLOAD_BASE]) {
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		if offset == 2 && size == 2 {
			return field{quantity: destinationPort, port: true}
		}
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		switch {
		case offset == 12 && size <= 4:
			return field{quantity: sourceV4}
		case offset == 16 && size <= 4:
			return field{quantity: destinationV4, address: size, bits: 8 * size}
		case offset == 8 && size > 1 && size <= 16: // a byte is the time to live of IPv4
			return field{quantity: sourceV6}
		case offset == 24 && size <= 16:
			return field{quantity: destinationV6, address: size, bits: 8 * size, v6: true}
		}
	}

	return field{}
}

// fieldOfConnection returns the part of a connection's state, or of its original tuple, that an expression loads.
func fieldOfConnection(e expression) field {
	switch number(e.data[unix.NFTA_CT_KEY]) {
	case unix.NFT_CT_STATE:
		return field{quantity: connectionState}
	case unix.NFT_CT_STATUS:
		return field{quantity: connectionStatus}
	}
	if direction, ok := e.data[unix.NFTA_CT_DIRECTION]; !ok || len(direction) != 1 || direction[0] != 0 {
		return field{}
	}
	switch number(e.data[unix.NFTA_CT_KEY]) {
	case unix.NFT_CT_PROTO_DST:
		return field{port: true, original: true}
	case unix.NFT_CT_DST, unix.NFT_CT_DST_IP:
		return field{address: 4, bits: 32, original: true}
	case unix.NFT_CT_DST_IP6:
		return field{address: 16, bits: 128, original: true, v6: true}
	default:
		return field{}
	}
}

// compare adds the comparison of a field with a value.
func (s *step) compare(f field, op uint32, value []byte) {
	switch {
	case f.port && len(value) >= 2:
		port := binary.BigEndian.Uint16(value)
		open := len(s.Ports) > 0 && s.Ports[len(s.Ports)-1].High == 65535
		switch {
		case op == unix.NFT_CMP_EQ:
			s.Ports = append(s.Ports, bpf.PortRange{Low: port, High: port})
		case op == unix.NFT_CMP_GT || op == unix.NFT_CMP_GTE:
			s.Ports = append(s.Ports, bpf.PortRange{Low: port, High: 65535})
		case (op == unix.NFT_CMP_LT || op == unix.NFT_CMP_LTE) && open:
			s.Ports[len(s.Ports)-1].High = port
		default: // all but a few
			s.Ports = append(s.Ports, bpf.PortRange{High: 65535})
		}
	case f.address > 0 && len(value) >= f.address && op == unix.NFT_CMP_EQ:
		s.Destination = prefixOf(value[:f.address], f.bits, f.v6)
	default:
		return
	}
	s.Original = s.Original || f.original
}

// element is one of a set: a value, or an interval of values.
type element struct {
	from, to []byte // included
	verdict  []byte // of a map of verdicts
}

// elements returns those of a set, in their order.
func (n nftables) elements(c chain, set string) ([]element, error) {
	messages, err := n.dump(unix.NFT_MSG_GETSETELEM, c.family,
		nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(c.table)),
		nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	if err != nil {
		return nil, fmt.Errorf("set %s of table %s: %w", set, c.table, err)
	}
	type bound struct {
		element
		end bool // it is the first after an interval
	}
	var bounds []bound
	for _, message := range messages {
		attrs, err := attributesOf(message)
		if err != nil {
			return nil, err
		}
		list, err := nl.ParseRouteAttr(attrs[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
		if err != nil {
			return nil, err
		}
		for _, listed := range list {
			parts, err := parse(listed.Value)
			if err != nil {
				return nil, err
			}
			flags, flagged := parts[unix.NFTA_SET_ELEM_FLAGS]
			key := valueOf(parts[unix.NFTA_SET_ELEM_KEY])
			bounds = append(bounds, bound{element{key, key, parts[unix.NFTA_SET_ELEM_DATA]}, flagged && number(flags)&unix.NFT_SET_ELEM_INTERVAL_END != 0})
		}
	}
	slices.SortStableFunc(bounds, func(a, b bound) int {
		return cmp.Or(slices.Compare(a.from, b.from), map[bool]int{true: -1, false: 1}[a.end])
	})
	intervals := slices.ContainsFunc(bounds, func(b bound) bool { return b.end })
	var elements []element
	for i, b := range bounds {
		switch {
		case b.end:
			continue
		case intervals && i+1 < len(bounds):
			b.to = before(bounds[i+1].from)
		case intervals: // to the last value
			b.to = []byte(strings.Repeat("\xff", len(b.from)))
		}
		elements = append(elements, b.element)
	}

	return elements, nil
}

// before returns the value before this one, which is not zero.
func before(value []byte) []byte {
	less := slices.Clone(value)
	for i := len(less) - 1; i >= 0; i-- {
		if less[i]--; less[i] != 0xff {
			break
		}
	}

	return less
}

// lookUp adds that a field is among the elements of a set.
func (s *step) lookUp(f field, elements []element) {
	for _, e := range elements {
		switch {
		case f.port && slices.Compare(e.from, e.to) != 0:
			s.compare(f, unix.NFT_CMP_GTE, e.from)
			s.compare(f, unix.NFT_CMP_LTE, e.to)
		case f.port || f.address > 0:
			s.compare(f, unix.NFT_CMP_EQ, e.from)
		}
	}
}

// valueOf returns the bytes in an attribute with data.
func valueOf(attribute []byte) []byte {
	data, err := parse(attribute)
	if err != nil {
		return nil
	}

	return data[unix.NFTA_DATA_VALUE]
}

func maskBits(mask []byte) int {
	bits := 0
	for _, b := range mask {
		for ; b&0x80 != 0; b <<= 1 {
			bits++
		}
	}

	return bits
}

// prefixOf returns the prefix of these first bytes of an address.
func prefixOf(bytes []byte, bits int, v6 bool) netip.Prefix {
	size := 4
	if v6 {
		size = 16
	}
	full := make([]byte, size)
	copy(full, bytes)
	addr, _ := netip.AddrFromSlice(full)

	return netip.PrefixFrom(addr, bits)
}
