package kubeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// KeeperTable is the table of nftables that keeps translated connections alive when kube-proxy's rules are removed.
//
// The kernel remembers each translated connection, but only looks at packets for it while some rule of the network
// namespace matches the state of connections, and some chain translates new ones. With the last of kube-proxy's rules
// both may be gone: then packets of open connections pass untranslated, and the connections are dead, although they are
// still listed as established. So the table has a rule of the first kind, and chains of the second kind that are empty.
const KeeperTable = "sluice-keeper"

// addKeeper adds the table, or does nothing if it exists.
func addKeeper(conn *nftables.Conn) error {
	table := conn.AddTable(&nftables.Table{Name: KeeperTable, Family: nftables.TableFamilyINet})
	for name, chain := range map[string]struct {
		hook     *nftables.ChainHook
		priority *nftables.ChainPriority
	}{
		"prerouting":  {nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest},
		"input":       {nftables.ChainHookInput, nftables.ChainPriorityNATSource},
		"output":      {nftables.ChainHookOutput, nftables.ChainPriorityNATDest},
		"postrouting": {nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource},
	} {
		conn.AddChain(&nftables.Chain{Table: table, Name: "nat-" + name, Type: nftables.ChainTypeNAT, Hooknum: chain.hook, Priority: chain.priority})
	}
	track := conn.AddChain(&nftables.Chain{
		Table: table, Name: "track", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityFilter,
	})
	conn.FlushChain(track)
	conn.AddRule(&nftables.Rule{Table: table, Chain: track, Exprs: []expr.Any{ // ct state established
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}})
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("table inet %s, which keeps connections alive: %w", KeeperTable, err)
	}

	return nil
}

// ReleaseKeeper removes the table that [Remove] has left, and reports whether it did. The table stays while connections
// need it, whose number is returned; they do not if kube-proxy's rules are back. That there is no table is not an error.
func ReleaseKeeper() (open int, removed bool, err error) {
	conn, err := nftables.New()
	if err != nil {
		return 0, false, fmt.Errorf("nftables: %w", err)
	}
	table, err := findKeeper(conn)
	if err != nil || table == nil {
		return 0, false, err
	}
	open, needed, err := needKeeper()
	if err != nil || needed {
		return open, false, err
	}
	conn.DelTable(table)
	if err := conn.Flush(); err != nil {
		return open, false, fmt.Errorf("table inet %s: %w", KeeperTable, err)
	}

	return 0, true, nil
}

// findKeeper returns the table, or nil if there is none.
func findKeeper(conn *nftables.Conn) (*nftables.Table, error) {
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil && !lacksNFTables(err) {
		return nil, fmt.Errorf("nftables: tables: %w", err)
	}
	if i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == KeeperTable }); i >= 0 {
		return tables[i], nil
	}

	return nil, nil
}

// needKeeper reports whether connections need the table, and how many netfilter translates.
func needKeeper() (open int, needed bool, err error) {
	if open, err = translated(); err != nil {
		return 0, false, err
	}
	modes, err := Modes()

	return open, open > 0 && len(modes) == 0, err
}

// The kernel's TCP_CONNTRACK_ESTABLISHED, and TCP_CONNTRACK_TIME_WAIT: states that follow are over as well.
const (
	tcpEstablished = 3
	tcpTimeWait    = 7
)

// translated returns how many connections and datagram exchanges netfilter translates to another destination. Those of
// rules other than kube-proxy's are included, such as a container's host port: the kernel does not remember the rule.
func translated() (int, error) {
	n := 0
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return 0, fmt.Errorf("connections that netfilter knows: %w", err)
		}
		for _, f := range flows {
			if f.Forward.DstIP.Equal(f.Reverse.SrcIP) && f.Forward.DstPort == f.Reverse.SrcPort {
				continue
			}
			if tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP); ok && tcp.State >= tcpTimeWait {
				continue
			}
			n++
		}
	}

	return n, nil
}

// translations are the original destinations of datagrams that kube-proxy's rules translate; those of node ports have the
// unspecified address. Netfilter would go on translating what a socket of the node sends there for as long as it sends,
// also when the backend is gone, of which kube-proxy would have told it. What others send, Sluice has translated since
// its programs are attached to devices.
type translations map[netip.AddrPort]struct{}

func (all translations) add(frontends []status.Frontend) {
	for _, f := range frontends {
		if f.Protocol == lb.UDP {
			all[f.Address] = struct{}{}
		}
	}
}

// MatchConntrackFlow implements [netlink.CustomConntrackFilter].
func (all translations) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	if f.Forward.Protocol != unix.IPPROTO_UDP || f.Forward.DstIP.Equal(f.Reverse.SrcIP) && f.Forward.DstPort == f.Reverse.SrcPort {
		return false
	}
	to, ok := netip.AddrFromSlice(f.Forward.DstIP)
	if !ok {
		return false
	}
	to = to.Unmap()
	unspecified := netip.IPv4Unspecified()
	if to.Is6() {
		unspecified = netip.IPv6Unspecified()
	}
	_, isService := all[netip.AddrPortFrom(to, f.Forward.DstPort)]
	_, isNodePort := all[netip.AddrPortFrom(unspecified, f.Forward.DstPort)]

	return isService || isNodePort
}

// forget makes netfilter forget these exchanges, so that the next datagram of each begins a new one.
func (all translations) forget() error {
	var errs []error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, all); err != nil {
			errs = append(errs, fmt.Errorf("datagrams that netfilter translates: %w", err))
		}
	}

	return errors.Join(errs...)
}

// reservation is how long [Reserve] lasts.
const reservation = 2 * time.Minute

// Reserve keeps netfilter from using the masquerade of a flow of devices for another connection, for two minutes.
// Netfilter knows neither these flows nor their ports. If it chose the same port of this node for a connection to the same
// backend, both would be one to the backend. So it gets an entry for a connection of which it sees no packet.
func Reserve(f flow.Flow) error {
	if !f.Masquerade.IsValid() {
		return nil
	}
	family := netlink.InetFamily(unix.AF_INET)
	if f.Backend.Addr().Is6() {
		family = unix.AF_INET6
	}
	tuple := func(from, to netip.AddrPort) netlink.IPTuple {
		return netlink.IPTuple{
			Protocol: map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP, "SCTP": unix.IPPROTO_SCTP}[f.Protocol],
			SrcIP:    from.Addr().AsSlice(), SrcPort: from.Port(),
			DstIP: to.Addr().AsSlice(), DstPort: to.Port(),
		}
	}
	entry := netlink.ConntrackFlow{
		FamilyType: uint8(family),
		Forward:    tuple(f.Masquerade, f.Backend),
		Reverse:    tuple(f.Backend, f.Masquerade),
		TimeOut:    uint32(reservation / time.Second),
	}
	if f.Protocol == "TCP" {
		entry.ProtoInfo = &netlink.ProtoInfoTCP{State: tcpEstablished}
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, family, &entry); err != nil {
		return fmt.Errorf("port %s of a connection to %s: %w", f.Masquerade, f.Backend, err)
	}

	return nil
}
