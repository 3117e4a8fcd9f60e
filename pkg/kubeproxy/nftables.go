package kubeproxy

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink/nl"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// tableName is the table of nftables mode, one of each family.
const tableName = "kube-proxy"

// nftReader reads the table of one family. The maps of the table lead from destinations to chains:
//
//	service-ips, service-nodeports             to the chain of a Service, or the one for external clients
//	no-endpoint-services, no-endpoint-nodeports  to what happens to those that were not translated
//	firewall-ips                                to the chain of the Service's source ranges
type nftReader struct {
	conn  *nftables.Conn
	table *nftables.Table
	sets  map[string]*nftables.Set
	ruleset
}

func readNFTables() (all []ruleset, err error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, err
	}
	defer conn.CloseLasting()
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		tables, err := conn.ListTablesOfFamily(family)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName })
		if i < 0 {
			continue
		}
		r := nftReader{conn: conn, table: tables[i], sets: make(map[string]*nftables.Set), ruleset: newRuleset()}
		if err := r.read(); err != nil {
			return nil, err
		}
		all = append(all, r.ruleset)
	}

	return all, nil
}

// read reads the sets, the chains, then the maps that lead to them.
func (r *nftReader) read() error {
	sets, err := r.conn.GetSets(r.table)
	if err != nil {
		return fmt.Errorf("sets: %w", err)
	}
	for _, s := range sets {
		r.sets[s.Name] = s
	}
	chains, err := r.conn.ListChainsOfTableFamily(r.table.Family)
	if err != nil {
		return fmt.Errorf("chains: %w", err)
	}
	sources := make(map[string][]netip.Prefix) // of the chains of firewall-ips
	for _, c := range chains {
		if c.Table.Name != tableName || c.Hooknum != nil {
			continue
		}
		rules, err := r.conn.GetRules(r.table, c)
		if err != nil {
			return fmt.Errorf("chain %s: %w", c.Name, err)
		}
		for _, message := range rules {
			if strings.HasPrefix(c.Name, "firewall-") {
				sources[c.Name], err = r.allowed(message.Exprs)
			} else {
				err = r.addRule(c.Name, message.Exprs)
			}
			if err != nil {
				return fmt.Errorf("chain %s: %w", c.Name, err)
			}
		}
	}
	for name, add := range map[string]func(destination, nftables.SetElement){
		"service-ips": r.addChain, "service-nodeports": r.addChain,
		"no-endpoint-services": r.addRefusal, "no-endpoint-nodeports": r.addRefusal,
		"firewall-ips": func(to destination, e nftables.SetElement) { r.ranges[to] = sources[e.VerdictData.Chain] },
	} {
		elements, err := r.elements(name)
		if err != nil {
			return err
		}
		for _, e := range elements {
			to, err := r.destination(e.Key)
			if err != nil || e.VerdictData == nil {
				return fmt.Errorf("map %s: an element without a destination or a verdict: %x", name, e.Key)
			}
			add(to, e)
		}
	}

	return nil
}

// elements returns those of a set, none if there is no such set. The library leaves the verdicts of a map
// undecoded: a code, and the name of a chain.
func (r *nftReader) elements(name string) ([]nftables.SetElement, error) {
	s, ok := r.sets[name]
	if !ok {
		return nil, nil
	}
	elements, err := r.conn.GetSetElements(s)
	if err != nil {
		return nil, fmt.Errorf("set %s: %w", name, err)
	}
	if !s.IsMap || s.DataType.Name != "" {
		return elements, nil
	}
	for i := range elements {
		attrs, err := nl.ParseRouteAttr(elements[i].Val)
		if err != nil {
			return nil, fmt.Errorf("set %s: verdict: %w", name, err)
		}
		verdict := new(expr.Verdict)
		for _, a := range attrs {
			switch {
			case a.Attr.Type == unix.NFTA_VERDICT_CODE && len(a.Value) == 4:
				verdict.Kind = expr.VerdictKind(int32(binary.BigEndian.Uint32(a.Value)))
			case a.Attr.Type == unix.NFTA_VERDICT_CHAIN:
				verdict.Chain = unix.ByteSliceToString(a.Value)
			}
		}
		elements[i].VerdictData, elements[i].Val = verdict, nil
	}

	return elements, nil
}

// addChain adds an element of service-ips or service-nodeports. Its chain is called
// "external-HASH-namespace/name/protocol/port".
func (r *nftReader) addChain(to destination, e nftables.SetElement) {
	r.chains[to] = e.VerdictData.Chain
	_, name, _ := strings.Cut(e.VerdictData.Chain, "-")
	_, name, _ = strings.Cut(name, "-")
	if parts := strings.Split(name, "/"); len(parts) == 4 {
		port := lb.PortName{Service: lb.ServiceName{Namespace: parts[0], Name: parts[1]}, Port: parts[3]}
		r.names[to] = port.String()
	} else {
		r.names[to] = e.VerdictData.Chain
	}
}

// addRefusal adds an element of no-endpoint-services or no-endpoint-nodeports, whose comment is the service port.
func (r *nftReader) addRefusal(to destination, e nftables.SetElement) {
	r.refused[to] = "reject"
	if e.VerdictData.Kind == expr.VerdictDrop {
		r.refused[to] = "drop"
	}
	if r.names[to] == "" {
		r.names[to] = e.Comment
	}
}

// addRule adds a rule if it leads to backends, or selects the addresses of node ports.
func (r *nftReader) addRule(chain string, exprs []expr.Any) error {
	var added rule
	var immediates [][]byte
	reads := "" // the part of the packet in the register, or the device it came by
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Fib:
			added.local = e.FlagSADDR
		case *expr.Payload:
			reads = map[uint32]string{12: "saddr", 16: "daddr"}[e.Offset]
			if r.table.Family == nftables.TableFamilyIPv6 {
				reads = map[uint32]string{8: "saddr", 24: "daddr"}[e.Offset]
			}
		case *expr.Meta:
			reads = map[expr.MetaKey]string{expr.MetaKeyIIFNAME: "iifname"}[e.Key]
		case *expr.Cmp:
			added.local = added.local || (reads == "saddr" || reads == "iifname") && strings.HasPrefix(chain, "external-")
		case *expr.Immediate:
			immediates = append(immediates, e.Data)
		case *expr.Verdict:
			if e.Kind == expr.VerdictGoto {
				added.targets = append(added.targets, e.Chain)
			}
		case *expr.NAT:
			if backend, ok := backendIn(slices.Concat(immediates...)); ok {
				added.backends = append(added.backends, backend)
			}
		case *expr.Lookup:
			elements, err := r.lookedUp(e, &added)
			if err != nil {
				return err
			}
			if e.SetName == "nodeport-ips" {
				for _, element := range elements {
					if a, ok := netip.AddrFromSlice(element.Key); ok {
						r.nodePortAddrs = append(r.nodePortAddrs, netip.PrefixFrom(a, a.BitLen()))
					}
				}
			}
		}
	}
	if len(added.targets)+len(added.backends) > 0 {
		r.rules[chain] = append(r.rules[chain], added)
	}

	return nil
}

// lookedUp adds to a rule what a set or map that it looks up leads to: clients that are remembered, chains of
// endpoints, or backends. It returns the elements, without those of a set of clients.
func (r *nftReader) lookedUp(e *expr.Lookup, added *rule) ([]nftables.SetElement, error) {
	if s, ok := r.sets[e.SetName]; ok && s.HasTimeout {
		added.affinity = s.Timeout.Round(time.Second)

		return nil, nil
	}
	if !strings.HasPrefix(e.SetName, "__") && e.SetName != "nodeport-ips" {
		return nil, nil // of destinations, see read
	}
	elements, err := r.elements(e.SetName)
	for _, element := range elements {
		if v := element.VerdictData; v != nil && v.Kind == expr.VerdictGoto {
			added.targets = append(added.targets, v.Chain)
		} else if backend, ok := backendIn(element.Val); ok {
			added.backends = append(added.backends, backend)
		}
	}

	return elements, err
}

// backendIn reads an address and a port, as they stand behind each other in registers.
func backendIn(data []byte) (netip.AddrPort, bool) {
	size := 4
	if len(data) >= 16+2 {
		size = 16
	}
	if len(data) < size+2 {
		return netip.AddrPort{}, false
	}
	address, ok := netip.AddrFromSlice(data[:size])

	return netip.AddrPortFrom(address, binary.BigEndian.Uint16(data[size:])), ok
}

// destination reads the key of a map: an address, unless it is one of node ports, a protocol and a port, each
// padded to four bytes.
func (r *nftReader) destination(key []byte) (destination, error) {
	address, size := netip.IPv4Unspecified(), 4
	if r.table.Family == nftables.TableFamilyIPv6 {
		address, size = netip.IPv6Unspecified(), 16
	}
	if len(key) == size+8 {
		address, _ = netip.AddrFromSlice(key[:size])
		key = key[size:]
	}
	if len(key) != 8 {
		return destination{}, fmt.Errorf("a key of %d bytes", len(key))
	}

	return destination{netip.AddrPortFrom(address, binary.BigEndian.Uint16(key[4:])), lb.Protocol(key[0])}, nil
}

// allowed returns the source ranges of a chain of firewall-ips, which drops the packets of all others:
// "ip saddr != { 192.0.2.0/24, … } drop", or for a single one "ip saddr != 192.0.2.0/24 drop".
func (r *nftReader) allowed(exprs []expr.Any) ([]netip.Prefix, error) {
	bits := 0
	var found netipx.IPSetBuilder
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Payload:
			bits = 8 * int(e.Len)
		case *expr.Bitwise:
			bits, _ = net.IPMask(e.Mask).Size()
		case *expr.Cmp:
			full := make([]byte, map[nftables.TableFamily]int{nftables.TableFamilyIPv4: 4, nftables.TableFamilyIPv6: 16}[r.table.Family])
			copy(full, e.Data)
			if a, ok := netip.AddrFromSlice(full); ok {
				found.AddPrefix(netip.PrefixFrom(a, bits))
			}
		case *expr.Lookup:
			elements, err := r.elements(e.SetName)
			if err != nil {
				return nil, err
			}
			addRanges(&found, elements)
		}
	}
	set, err := found.IPSet()
	if err != nil {
		return nil, err
	}

	return set.Prefixes(), nil
}

// addRanges adds the elements of a set of intervals: each range ends before an element that says so, or at the last
// address.
func addRanges(to *netipx.IPSetBuilder, elements []nftables.SetElement) {
	slices.SortFunc(elements, func(a, b nftables.SetElement) int {
		if a.IntervalEnd != b.IntervalEnd && slices.Equal(a.Key, b.Key) { // one range begins where another has ended
			return map[bool]int{true: -1, false: 1}[a.IntervalEnd]
		}

		return slices.Compare(a.Key, b.Key)
	})
	for i, e := range elements {
		from, ok := netip.AddrFromSlice(e.Key)
		if !ok || e.IntervalEnd {
			continue
		}
		last := netipx.PrefixLastIP(netip.PrefixFrom(from, 0))
		if i+1 < len(elements) {
			if next, ok := netip.AddrFromSlice(elements[i+1].Key); ok {
				last = next.Prev()
			}
		}
		to.AddRange(netipx.IPRangeFrom(from, last))
	}
}
