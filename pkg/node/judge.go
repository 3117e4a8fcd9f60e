package node

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// Hooks of netfilter at which [Netfilter.Judge] judges packets.
const (
	HookForward = uint32(unix.NF_INET_FORWARD)
	HookInput   = uint32(unix.NF_INET_LOCAL_IN)
	HookOutput  = uint32(unix.NF_INET_LOCAL_OUT)
)

// Packet is what is known of the first packet of a connection, as a hook of netfilter sees it. What is not known is
// the zero value.
type Packet struct {
	Source      netip.Addr
	Destination netip.AddrPort
	Protocol    uint8 // IPPROTO_*
	In, Out     string
}

// Drop is a rule or a policy that drops or rejects a packet.
type Drop struct {
	NetfilterRule
	// Sure is set if it does; else conditions were not read on which that depends. Unless is the first rule before it
	// that may accept the packet, by such conditions; the zero value if there is none.
	Sure   bool
	Unless NetfilterRule
}

// String describes the drop in a sentence without an end.
func (d Drop) String() string {
	switch {
	case d.Sure:
		return "a firewall drops it: " + d.NetfilterRule.String()
	case d.Unless.Name != "":
		return fmt.Sprintf("a firewall may drop it: %s, unless a rule before accepts it, whose conditions were not read in full: %s", d.NetfilterRule, d.Unless)
	}

	return fmt.Sprintf("a firewall may drop it: %s, under conditions that were not read in full", d.NetfilterRule)
}

// Judge returns what drops or rejects a packet at a hook, by the rules that it passes in their order.
func (f *Netfilter) Judge(hook uint32, p Packet) []Drop {
	var drops []Drop
	for i := range f.filters {
		if base := &f.filters[i]; base.hook == hook && base.sees(p) {
			j := judgement{filter: base, packet: p, maybe: make(map[string]passed)}
			rest := j.pass(base.Name, yes, Match{}, 0)
			j.walk(base.NetfilterChain, base.policy, rest.leaves, Match{}, 0)
			drops = append(drops, j.drops...)
		}
	}

	return drops
}

// filter is a base chain at one of these hooks, with the chains to which it jumps.
type filter struct {
	NetfilterChain
	hook   uint32
	policy []step            // which packets meet that no rule has decided about
	chains map[string][]step // by name
}

// addFilter adds a base chain, if it is at one of the hooks at which packets are judged. Policy is empty if it is the
// last rule of the chain.
func (f *Netfilter) addFilter(hook uint32, at NetfilterChain, policy []step, stepsOf func(chain string) ([]step, error)) error {
	if hook != HookForward && hook != HookInput && hook != HookOutput {
		return nil
	}
	added := filter{at, hook, policy, make(map[string][]step)}
	for names := []string{at.Name}; len(names) > 0; names = names[1:] {
		if _, known := added.chains[names[0]]; known {
			continue
		}
		steps, err := stepsOf(names[0])
		if err != nil {
			return err
		}
		added.chains[names[0]] = steps
		for _, s := range steps {
			if s.jump != "" {
				names = append(names, s.jump)
			}
			if s.does == policyDrops && hook == HookForward {
				f.Drops = append(f.Drops, NetfilterRule{at, Match{}, s.does})
			}
		}
	}
	for _, s := range policy {
		if s.does == policyDrops && hook == HookForward {
			f.Drops = append(f.Drops, NetfilterRule{at, Match{}, s.does})
		}
	}
	f.filters = append(f.filters, added)

	return nil
}

// sees reports whether packets of this family pass the chain.
func (f *filter) sees(p Packet) bool {
	v4, v6 := isOfFamily(f.Table)

	return p.Destination.Addr().Is4() && v4 || p.Destination.Addr().Is6() && v6
}

// judgement is the way of a packet through the rules of a filter.
type judgement struct {
	*filter
	packet Packet
	drops  []Drop
	unless NetfilterRule     // the first rule that may have accepted the packet
	maybe  map[string]passed // chains that it may have passed
}

// passed is the outcome of a chain for a packet that has entered it.
type passed struct {
	leaves  certainty // whether it leaves the chain, to meet the rules after the jump, and is not known to be dropped
	accepts bool      // a rule has accepted it, or may have
}

// maxJumps is the kernel's limit of nested jumps.
const maxJumps = 16

// pass walks a chain that the packet enters, or may enter, by a jump with the match outer.
func (j *judgement) pass(chain string, enters certainty, outer Match, depth int) passed {
	if known, was := j.maybe[chain]; was && enters == maybe {
		return known
	}
	result := passed{leaves: maybe, accepts: true}
	if depth <= maxJumps {
		result = j.walk(NetfilterChain{j.Table, chain}, j.chains[chain], enters, outer, depth)
	}
	if enters == maybe {
		j.maybe[chain] = result
	}

	return result
}

// walk follows the packet through rules, the first of which it meets, or may meet. Here is whether it comes to a rule. What
// may be dropped is noted, and regarded as not dropped afterwards.
func (j *judgement) walk(at NetfilterChain, steps []step, enters certainty, outer Match, depth int) passed {
	here, left, accepts := enters, no, false
	for _, s := range steps {
		holds := s.holds(j.packet)
		if holds == no || here == no {
			continue
		}
		rule := NetfilterRule{at, s.within(outer), s.does}
		met := min(here, holds)
		switch s.then {
		case verdictDrops:
			j.drops = append(j.drops, Drop{rule, met == yes, j.unless})
			if holds == yes {
				here = no
			}
		case verdictAccepts, verdictUnread:
			accepts = true
			if holds == yes && s.then == verdictAccepts {
				here = no
			} else {
				here = maybe
			}
			if met == maybe || s.then == verdictUnread {
				j.doubt(rule)
			}
		case verdictReturns:
			left = max(left, met)
			here = here.without(holds)
		case verdictJumps, verdictGoes:
			inner := j.pass(s.jump, met, rule.Match, depth+1)
			accepts = accepts || inner.accepts
			switch {
			case s.then == verdictGoes:
				left = max(left, min(inner.leaves, met))
				here = here.without(holds)
			case holds == yes:
				here = inner.leaves
			case inner.accepts:
				here = maybe
			}
		}
	}
	switch {
	case here == no && left == no:
		return passed{no, accepts}
	case accepts:
		return passed{maybe, true}
	}

	return passed{enters, false}
}

// doubt notes that a rule may have ended the packet's way.
func (j *judgement) doubt(rule NetfilterRule) {
	if j.unless.Name == "" {
		rule.Does = cmp.Or(rule.Does, "accepts")
		j.unless = rule
	}
}

// verdict is what a rule does with the packets that it selects, as far as that decides whether they are dropped.
type verdict int

const (
	verdictContinues verdict = iota
	verdictAccepts
	verdictDrops
	verdictReturns
	verdictJumps
	verdictGoes   // as a jump without a return
	verdictUnread // another, such as a queue
)

// policyDrops is what a chain does that drops what no rule accepts.
const policyDrops = "by its policy drops"

// decide sets what a rule of nftables does, by an attribute with a verdict.
func (s *step) decide(attribute []byte) {
	code, target, err := verdictOf(attribute)
	switch {
	case err != nil:
		s.does, s.then = "does something unknown to", verdictUnread
	case code == nfAccept:
		s.then = verdictAccepts
	case code == unix.NFT_CONTINUE:
	case code == unix.NFT_RETURN:
		s.then = verdictReturns
	case code == unix.NFT_JUMP:
		s.jump, s.then = target, verdictJumps
	case code == unix.NFT_GOTO:
		s.jump, s.then = target, verdictGoes
	case code == nfDrop:
		s.does, s.then = "drops", verdictDrops
	default:
		s.does, s.then = "queues", verdictUnread
	}
}

// decideLegacy sets what a rule of iptables does, by the code of its standard target: -1 - verdict.
func (s *step) decideLegacy(code int32) {
	const legacyReturn = -5
	switch code {
	case -1 - nfDrop:
		s.does, s.then = "drops", verdictDrops
	case -1 - nfAccept:
		s.then = verdictAccepts
	case legacyReturn:
		s.then = verdictReturns
	default:
		s.does, s.then = "queues", verdictUnread
	}
}

// targetVerdict returns what a target of iptables does, other than the standard one.
func targetVerdict(target string) verdict {
	switch target {
	case "DROP", "REJECT":
		return verdictDrops
	case "ACCEPT", "DNAT", "SNAT", "REDIRECT", "MASQUERADE", "TPROXY":
		return verdictAccepts
	case "LOG", "NFLOG", "ULOG", "TRACE", "CT", "NOTRACK", "TCPMSS", "CLASSIFY", "DSCP", "CHECKSUM", "MARK", "CONNMARK":
		return verdictContinues
	}

	return verdictUnread
}

// isOfFamily reports whether packets of IPv4 and of IPv6 pass the chains of a table.
func isOfFamily(table string) (v4, v6 bool) {
	v4Only := strings.HasPrefix(table, "nftables ip ") || strings.HasPrefix(table, "legacy iptables ")
	v6Only := strings.HasPrefix(table, "nftables ip6 ") || strings.HasPrefix(table, "legacy ip6tables ")

	return !v6Only, !v4Only
}
