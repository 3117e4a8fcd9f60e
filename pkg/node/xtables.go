package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
)

// addMatch adds the condition of a match extension of iptables, whose layout is the kernel's. A
// match that is inverted counts as one of every port.
func (s *step) addMatch(name string, info []byte) {
	order := binary.NativeEndian
	switch {
	case (name == "tcp" || name == "udp") && len(info) >= 8: // struct xt_tcp, struct xt_udp
		ports := bpf.PortRange{Low: order.Uint16(info[4:]), High: order.Uint16(info[6:])}
		if ports != (bpf.PortRange{High: 65535}) {
			s.Ports = append(s.Ports, ports)
		}
	case name == "multiport" && len(info) >= 47 && info[0] != 0: // struct xt_multiport_v1: 0 is the source
		const ports, isRange = 2, 32
		for i := 0; i < min(int(info[1]), 15); i++ {
			port := order.Uint16(info[ports+2*i:])
			if i > 0 && info[isRange+i-1] != 0 {
				s.Ports[len(s.Ports)-1].High = port
			} else {
				s.Ports = append(s.Ports, bpf.PortRange{Low: port, High: port})
			}
		}
	case name == "conntrack" && len(info) >= 162: // struct xt_conntrack_mtinfo3
		const toAddress, toPort = 1 << 3, 1 << 9
		flags := order.Uint16(info[146:])
		if flags&toPort != 0 {
			s.Ports = append(s.Ports, bpf.PortRange{Low: order.Uint16(info[140:]), High: order.Uint16(info[156:])})
		}
		s.Original = s.Original || flags&(toAddress|toPort) != 0
	}
	s.when = append(s.when, conditionOfMatch(name, info))
}

// harmlessTargets do not decide about packets, or come after the destination is translated.
var harmlessTargets = []string{
	"ACCEPT", "LOG", "NFLOG", "ULOG", "TRACE", "CT", "NOTRACK", "TCPMSS", "CLASSIFY", "DSCP", "MASQUERADE", "SNAT", "CHECKSUM",
}

// targetVerb returns what a target of iptables does, or "" if that concerns no Service.
func targetVerb(target string) string {
	switch {
	case slices.Contains(harmlessTargets, target):
		return ""
	case target == "DROP":
		return "drops"
	case target == "REJECT":
		return "rejects"
	case target == "MARK":
		return "marks"
	case target == "CONNMARK":
		return MarksConnections
	case target == "DNAT" || target == "REDIRECT" || target == "TPROXY":
		return "redirects"
	default:
		return "applies " + target + " to"
	}
}

// legacyFamily is a family of iptables-legacy, with the kernel's layout of its rules.
type legacyFamily struct {
	name        string // of the tables, for operators
	names       string // the kernel's file with the names of tables
	domain      int
	level       uintptr // of socket options
	source      int     // offset in a rule
	destination int
	mask        int
	protocol    int // offset of the inverted conditions
	entry       int // size of a rule without matches and target
	targetAt    int // offset of the offset of the target
	v6          bool
}

var legacyFamilies = []legacyFamily{
	{"legacy iptables", "ip_tables_names", unix.AF_INET, unix.SOL_IP, 0, 4, 12, 83, 112, 88, false},
	{"legacy ip6tables", "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 0, 16, 48, 132, 168, 140, true},
}

// surveyLegacy adds the chains and the rules of iptables-legacy.
func surveyLegacy(found *Netfilter) error {
	runtime.LockOSThread() // the file and the socket are of one namespace
	defer runtime.UnlockOSThread()
	for _, family := range legacyFamilies {
		names, err := os.ReadFile("/proc/thread-self/net/" + family.names)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		// Only tables that exist: to ask for another one would create it.
		for table := range strings.FieldsSeq(string(names)) {
			if err := family.survey(found, table); err != nil {
				return fmt.Errorf("table %s: %w", table, err)
			}
		}
	}

	return nil
}

// The kernel's socket options, and the layout of their answers: struct ipt_getinfo and
// struct ipt_get_entries.
const (
	getInfo, getEntries    = 64, 65
	sizeofInfo, sizeofHead = 84, 40
	hooksAt, policiesAt    = 36, 56
	sizeAt                 = 80
	errorTarget            = "ERROR" // the first entry of a chain, whose name it has
	standardTarget         = ""
)

// Flags of an entry, before the inverted conditions.
const (
	goesTo        = 1 << 1
	protocolIsSet = 1 << 0 // of IPv6
	goesToV6      = 1 << 2
)

func (f legacyFamily) survey(found *Netfilter, table string) error {
	socket, err := unix.Socket(f.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	info := make([]byte, sizeofInfo)
	copy(info, table)
	if err := f.ask(socket, getInfo, info); err != nil {
		return err
	}
	size := binary.NativeEndian.Uint32(info[sizeAt:])
	answer := make([]byte, sizeofHead+size)
	copy(answer, table)
	binary.NativeEndian.PutUint32(answer[32:], size)
	if err := f.ask(socket, getEntries, answer); err != nil {
		return err // EAGAIN: the table has changed
	}

	hooked := make(map[uint32]uint32) // the hook of a chain, by its offset
	policies := make(map[uint32]bool) // the last rules of these chains, by their offsets
	valid := binary.NativeEndian.Uint32(info[32:])
	for hook := range uint32(5) {
		if valid&(1<<hook) != 0 {
			hooked[binary.NativeEndian.Uint32(info[hooksAt+4*hook:])] = hook
			policies[binary.NativeEndian.Uint32(info[policiesAt+4*hook:])] = true
		}
	}
	chains, names := f.parse(answer[sizeofHead:], hooked, policies)
	stepsOf := func(name string) ([]step, error) { return chains[name], nil }
	for _, name := range names {
		at := NetfilterChain{f.name + " " + table, name}
		found.Chains = append(found.Chains, at)
		hook := slices.Index(hookNames, name)
		if hook < 0 {
			continue
		}
		if err := found.addFilter(uint32(hook), at, nil, stepsOf); err != nil {
			return err
		}
		if err := found.addChain(at, hook == unix.NF_INET_PRE_ROUTING, stepsOf); err != nil {
			return err
		}
	}

	return nil
}

// hookNames are the names of the base chains, by hook.
var hookNames = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

func (f legacyFamily) ask(socket int, option uintptr, buffer []byte) error {
	size := uint32(len(buffer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), f.level, option,
		uintptr(unsafe.Pointer(&buffer[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}

	return nil
}

// parse returns the rules of a table by chain, and the names of the chains in their order.
func (f legacyFamily) parse(entries []byte, hooked map[uint32]uint32, policies map[uint32]bool) (map[string][]step, []string) {
	order := binary.NativeEndian
	chains, starts := make(map[string][]step), make(map[uint32]string)
	var names []string
	// A jump is to the offset of a chain's first rule, and may be to a later chain.
	jumps := make(map[string]map[int]uint32)
	current := ""
	begin := func(name string, offset uint32) {
		current = name
		names, starts[offset], chains[name], jumps[name] = append(names, name), name, nil, make(map[int]uint32)
	}
	for offset := 0; offset+f.entry <= len(entries); {
		entry := entries[offset:]
		targetAt, next := int(order.Uint16(entry[f.targetAt:])), int(order.Uint16(entry[f.targetAt+2:]))
		if targetAt+36 > next || next > len(entry) {
			break
		}
		if hook, ok := hooked[uint32(offset)]; ok {
			begin(hookNames[hook], uint32(offset))
		}
		// A target: its size, its name, its revision, and what depends on it.
		target, rest := unix.ByteSliceToString(entry[targetAt+2:targetAt+31]), entry[targetAt+32:next]
		if target == errorTarget {
			if name := unix.ByteSliceToString(rest); name != errorTarget { // which ends the table
				begin(name, uint32(offset+next))
			}
			offset += next

			continue
		}
		s := f.stepOf(entry, targetAt)
		if target != standardTarget {
			s.does, s.then = targetVerb(target), targetVerdict(target)
		} else if code := int32(order.Uint32(rest)); code >= 0 {
			jumps[current][len(chains[current])] = uint32(code)
			s.then = verdictJumps
			if flags := entry[f.protocol-1]; f.v6 && flags&goesToV6 != 0 || !f.v6 && flags&goesTo != 0 {
				s.then = verdictGoes
			}
		} else {
			s.decideLegacy(code)
			if s.then == verdictDrops && policies[uint32(offset)] {
				s.does = policyDrops
			}
		}
		chains[current] = append(chains[current], s)
		offset += next
	}
	for name, at := range jumps {
		for i, to := range at {
			chains[name][i].jump = starts[to]
		}
	}

	return chains, names
}

// Which conditions of an entry are inverted.
const (
	conditionInvertedIn       = 1 << 0
	conditionInvertedOut      = 1 << 1
	conditionInvertedFrom     = 1 << 3
	conditionInvertedTo       = 1 << 4
	conditionInvertedFragment = 1 << 5
	conditionInvertedProtocol = 1 << 6
)

// stepOf returns what an entry selects: struct ipt_ip or struct ip6t_ip6, and matches.
func (f legacyFamily) stepOf(entry []byte, targetAt int) step {
	var s step
	size, from, to := 4, sourceV4, destinationV4
	if f.v6 {
		size, from, to = 16, sourceV6, destinationV6
	}
	inverted := entry[f.protocol]
	if bits := maskBits(entry[f.mask : f.mask+size]); bits > 0 && inverted&conditionInvertedTo == 0 {
		s.Destination = prefixOf(entry[f.destination:f.destination+size], bits, f.v6)
	}
	masked := func(q quantity, at, maskAt, size int, inverted bool) {
		mask := entry[maskAt : maskAt+size]
		if strings.Trim(string(mask), "\x00") != "" {
			value := slices.Clone(entry[at : at+size]) // which may have a wildcard where the mask has nothing
			for i := range value {
				value[i] &= mask[i]
			}
			s.when = append(s.when, field{quantity: q, mask: slices.Clone(mask)}.compared(unix.NFT_CMP_EQ, value).unless(inverted))
		}
	}
	const nameSize = 16
	names := f.mask + size
	masked(from, f.source, f.mask-size, size, inverted&conditionInvertedFrom != 0)
	masked(to, f.destination, f.mask, size, inverted&conditionInvertedTo != 0)
	masked(deviceIn, names, names+2*nameSize, nameSize, inverted&conditionInvertedIn != 0)
	masked(deviceOut, names+nameSize, names+3*nameSize, nameSize, inverted&conditionInvertedOut != 0)
	if protocol := entry[names+4*nameSize]; protocol != 0 {
		s.when = append(s.when, field{quantity: protocolNumber}.compared(unix.NFT_CMP_EQ, []byte{protocol}).unless(inverted&conditionInvertedProtocol != 0))
	}
	known := byte(goesTo)
	if f.v6 {
		known = protocolIsSet | goesToV6
	}
	if entry[f.protocol-1]&^known != 0 || inverted&conditionInvertedFragment != 0 {
		s.when = append(s.when, unreadCondition) // fragments, or the type of service
	}
	for at := f.entry; at+32 <= targetAt; {
		length := int(binary.NativeEndian.Uint16(entry[at:]))
		if length < 32 || at+length > targetAt {
			break
		}
		s.addMatch(unix.ByteSliceToString(entry[at+2:at+31]), entry[at+32:at+length])
		at += length
	}

	return s
}
