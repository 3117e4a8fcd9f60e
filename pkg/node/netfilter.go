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
	// Drops are the rules and policies by which a forwarded packet may be dropped or rejected,
	// except rules that look at the state of its connection. InputDrops are those for packets to this node itself,
	// OutputDrops those for what it sends.
	Drops, InputDrops, OutputDrops []NetfilterRule
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

// step is a rule of a chain, of either kind of tables.
type step struct {
	Match
	does string // a verb, or empty
	jump string // the chain that it jumps to, or empty
	// stateful is set if the rule looks at the state of the connection.
	stateful bool
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

// dropsAt returns the list of what drops packets at a hook, nil if there is none.
func (f *Netfilter) dropsAt(hook uint32) *[]NetfilterRule {
	switch hook {
	case unix.NF_INET_FORWARD:
		return &f.Drops
	case unix.NF_INET_LOCAL_IN:
		return &f.InputDrops
	case unix.NF_INET_LOCAL_OUT:
		return &f.OutputDrops
	}

	return nil
}

// addChain adds the rules that concern Services, of a base chain and of those that it jumps to. Early is set if packets
// pass the chain before kube-proxy would translate them. Drops receives what drops packets there, unless it is nil.
func (f *Netfilter) addChain(base NetfilterChain, early bool, drops *[]NetfilterRule, stepsOf func(chain string) ([]step, error)) error {
	if drops != nil {
		if err := visit(base, Match{}, stepsOf, make(map[string]bool), func(at NetfilterChain, match Match, s step) bool {
			if (s.does == "drops" || s.does == "rejects") && !s.stateful {
				*drops = append(*drops, NetfilterRule{at, match, s.does})
			}

			return !s.stateful
		}); err != nil {
			return err
		}
	}
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

// Concerns reports whether the rule may match a packet to this destination, by what is known of it.
func (m Match) Concerns(to netip.AddrPort) bool {
	if m.Destination.IsValid() && !m.Destination.Contains(to.Addr()) {
		return false
	}
	within := func(r bpf.PortRange) bool { return r.Low <= to.Port() && to.Port() <= r.High }

	return m.Ports == nil || slices.ContainsFunc(m.Ports, within)
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
		var drops *[]NetfilterRule
		if isIP {
			drops = found.dropsAt(c.hook)
		}
		if drops != nil && c.policy != nfAccept {
			*drops = append(*drops, NetfilterRule{at, Match{}, "by its policy drops"})
		}
		if err := found.addChain(at, early, drops, stepsOf); err != nil {
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
		s, err := n.stepOf(c, expressions)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}

	return steps, nil
}

// field is what an expression has loaded into a register. The zero value is nothing that
// concerns Services.
type field struct {
	port, original bool
	address        int // bytes of the destination address that are loaded; 0: none are
	bits           int // that a mask has left of them
	v6             bool
}

// stepOf returns what a rule selects, and what it does.
func (n nftables) stepOf(c chain, expressions []expression) (step, error) {
	var s step
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
				s.stateful = s.stateful || number(e.data[unix.NFTA_CT_KEY]) == unix.NFT_CT_STATE
				loaded[number(e.data[unix.NFTA_CT_DREG])] = fieldOfConnection(e)
			}
		case "meta":
			if _, writes := e.data[unix.NFTA_META_SREG]; writes && number(e.data[unix.NFTA_META_KEY]) == unix.NFT_META_MARK {
				s.does = cmp.Or(s.does, "marks")
			}
		case "bitwise":
			f := loaded[number(e.data[unix.NFTA_BITWISE_SREG])]
			f.bits = maskBits(valueOf(e.data[unix.NFTA_BITWISE_MASK]))
			loaded[number(e.data[unix.NFTA_BITWISE_DREG])] = f
		case "cmp":
			op := number(e.data[unix.NFTA_CMP_OP])
			s.compare(loaded[number(e.data[unix.NFTA_CMP_SREG])], op, valueOf(e.data[unix.NFTA_CMP_DATA]))
		case "range":
			f := loaded[number(e.data[unix.NFTA_RANGE_SREG])]
			s.compare(f, unix.NFT_CMP_GTE, valueOf(e.data[unix.NFTA_RANGE_FROM_DATA]))
			s.compare(f, unix.NFT_CMP_LTE, valueOf(e.data[unix.NFTA_RANGE_TO_DATA]))
		case "lookup":
			f := loaded[number(e.data[unix.NFTA_LOOKUP_SREG])]
			if err := n.lookUp(&s, c, f, text(e.data[unix.NFTA_LOOKUP_SET])); err != nil {
				return s, err
			}
			if number(e.data[unix.NFTA_LOOKUP_DREG]) == unix.NFT_REG_VERDICT {
				s.does = "has a verdict for"
			}
		case "match":
			s.addMatch(text(e.data[unix.NFTA_MATCH_NAME]), e.data[unix.NFTA_MATCH_INFO])
		case "target":
			s.does = cmp.Or(targetVerb(text(e.data[xtName])), s.does)
		case "reject":
			s.does = "rejects"
		case "queue":
			s.does = "queues"
		case "nat", "redir", "tproxy":
			s.does = "redirects"
		case "immediate":
			target, harmless := e.verdict()
			s.jump = target
			if !harmless {
				s.does = "drops"
			}
		}
	}

	return s, nil
}

// fieldOfPayload returns the part of a packet's headers that an expression loads.
func fieldOfPayload(e expression) field {
	offset, size := number(e.data[unix.NFTA_PAYLOAD_OFFSET]), int(number(e.data[unix.NFTA_PAYLOAD_LEN]))
	switch number(e.data[unix.NFTA_PAYLOAD_BASE]) {
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return field{port: offset == 2 && size == 2}
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		if offset == 16 && size <= 4 {
			return field{address: size, bits: 8 * size}
		}
		if offset == 24 && size <= 16 {
			return field{address: size, bits: 8 * size, v6: true}
		}
	}

	return field{}
}

// fieldOfConnection returns the part of a connection's original tuple that an expression loads.
func fieldOfConnection(e expression) field {
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

// lookUp adds that a field is among the elements of a set.
func (n nftables) lookUp(s *step, c chain, f field, set string) error {
	if !f.port && f.address == 0 {
		return nil
	}
	messages, err := n.dump(unix.NFT_MSG_GETSETELEM, c.family,
		nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(c.table)),
		nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	if err != nil {
		return fmt.Errorf("set %s of table %s: %w", set, c.table, err)
	}
	type bound struct {
		key []byte
		end bool // the key is the first after an interval
	}
	var bounds []bound
	for _, message := range messages {
		attrs, err := attributesOf(message)
		if err != nil {
			return err
		}
		elements, err := nl.ParseRouteAttr(attrs[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
		if err != nil {
			return err
		}
		for _, element := range elements {
			parts, err := parse(element.Value)
			if err != nil {
				return err
			}
			flags, flagged := parts[unix.NFTA_SET_ELEM_FLAGS]
			end := flagged && number(flags)&unix.NFT_SET_ELEM_INTERVAL_END != 0
			bounds = append(bounds, bound{valueOf(parts[unix.NFTA_SET_ELEM_KEY]), end})
		}
	}
	slices.SortFunc(bounds, func(a, b bound) int { return slices.Compare(a.key, b.key) })
	intervals := slices.ContainsFunc(bounds, func(b bound) bool { return b.end })
	for i, b := range bounds {
		switch {
		case b.end:
		case f.port && intervals && i+1 < len(bounds) && len(b.key) >= 2 && len(bounds[i+1].key) >= 2:
			s.compare(f, unix.NFT_CMP_GTE, b.key)
			next := binary.BigEndian.Uint16(bounds[i+1].key)
			s.compare(f, unix.NFT_CMP_LTE, binary.BigEndian.AppendUint16(nil, next-1))
		case f.port && intervals:
			s.compare(f, unix.NFT_CMP_GTE, b.key)
		default:
			s.compare(f, unix.NFT_CMP_EQ, b.key)
		}
	}

	return nil
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
