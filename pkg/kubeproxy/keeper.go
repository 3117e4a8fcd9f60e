package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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

// keeperInterval is how often [WatchKeeper] looks, beside when the kernel reports a change.
const keeperInterval = 30 * time.Second

// WatchKeeper puts the table back when another program takes it, as `nft flush ruleset` does, as long as connections need
// it, and logs that. It returns when ctx ends, and at once where the kernel has no nftables.
func WatchKeeper(ctx context.Context, log *slog.Logger) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	changes, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if lacksNFTables(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("subscribe to changes of nftables: %w", err)
	}
	defer changes.Close()
	stop := context.AfterFunc(ctx, changes.Close)
	defer stop()
	interval := unix.NsecToTimeval(keeperInterval.Nanoseconds())
	if err := changes.SetReceiveTimeout(&interval); err != nil {
		return fmt.Errorf("changes of nftables: %w", err)
	}

	for there := false; ctx.Err() == nil; {
		if there, err = putKeeperBack(conn, there, log); err != nil {
			log.Error("connections of kube-proxy's rules may end", "error", err)
		}
		if err := awaitTables(changes); err != nil && ctx.Err() == nil {
			return fmt.Errorf("changes of nftables: %w", err)
		}
	}

	return nil
}

// awaitTables returns when a table has come or gone, or may have, and at least after the socket's timeout.
func awaitTables(changes *nl.NetlinkSocket) error {
	for deadline := time.Now().Add(keeperInterval); time.Now().Before(deadline); {
		messages, from, err := changes.Receive()
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.ENOBUFS) {
			return nil // messages are lost by the latter
		}
		if err != nil {
			return err
		}
		for _, m := range messages {
			kind := m.Header.Type & 0xff
			if from.Pid == nl.PidKernel && (kind == unix.NFT_MSG_NEWTABLE || kind == unix.NFT_MSG_DELTABLE) {
				return nil
			}
		}
	}

	return nil
}

// putKeeperBack adds the table if it was there, is not, and is needed. It reports whether it is there now.
func putKeeperBack(conn *nftables.Conn, was bool, log *slog.Logger) (is bool, err error) {
	table, err := findKeeper(conn)
	if err != nil || table != nil || !was {
		return table != nil || was && err != nil, err
	}
	open, needed, err := needKeeper()
	if err != nil || !needed {
		return err != nil, err
	}
	if err := addKeeper(conn); err != nil {
		return true, err
	}
	log.Warn("another program has removed the table of nftables that keeps connections of kube-proxy's rules alive; it is put back",
		"table", "inet "+KeeperTable, "connections", open)

	return true, nil
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
