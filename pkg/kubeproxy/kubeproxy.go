// Package kubeproxy reads the rules that kube-proxy has left in the kernel, compares them with what
// is programmed here, and removes them without ending the connections that they have translated.
//
// [Read] reads the rules: those of nftables mode by netlink (nftables.go), those of iptables mode as
// iptables-save prints them (iptables.go). Both become a [ruleset], which frontends.go turns into the
// frontends that clients can dial. [Compare] compares these, and [Remove] removes the rules
// (remove.go, and keeper.go for what keeps connections alive).
//
// Everything is done in the network namespace of the calling process.
package kubeproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/status"
)

// Mode is the mode of kube-proxy that has written rules.
type Mode string

// The modes, iptables by the variant of iptables that was used.
const (
	NFTables       Mode = "nftables"
	IPTablesNFT    Mode = "iptables (nf_tables)"
	IPTablesLegacy Mode = "iptables (legacy)"
	IPVS           Mode = "ipvs"
)

// ErrIPVS is returned for rules of kube-proxy's IPVS mode, which cannot be compared or removed.
var ErrIPVS = errors.New("kube-proxy has run in IPVS mode here (there is a device kube-ipvs0): its rules can neither be compared, nor removed without cutting its connections. Drain the node, stop kube-proxy, and run 'kube-proxy --cleanup'")

// Rules are what kube-proxy has programmed.
type Rules struct {
	Mode Mode
	// Frontends are sorted by Service and address. The fields Kind, Algorithm, Masquerade and NodeInRanges
	// are not set. WhenEmpty is "pass" where no rule applies to a client.
	Frontends []status.Frontend
	// NodePortAddrs are the addresses of the node that node ports answer on; none of a family means all of it.
	NodePortAddrs []netip.Prefix
}

// Modes returns the modes of which there are rules, mostly one or none.
func Modes() ([]Mode, error) {
	var found []Mode
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil && !lacksNFTables(err) {
		return nil, fmt.Errorf("nftables: chains: %w", err)
	}
	have := make(map[Mode]bool)
	for _, c := range chains {
		switch {
		case c.Table.Name == tableName:
			have[NFTables] = true
		case c.Table.Name == "nat" && c.Name == servicesChain:
			have[IPTablesNFT] = true
		}
	}
	if have[IPTablesLegacy], err = hasLegacyRules(); err != nil {
		return nil, err
	}
	if _, err := net.InterfaceByName("kube-ipvs0"); err == nil {
		have[IPVS] = true
	}
	for _, mode := range []Mode{NFTables, IPTablesNFT, IPTablesLegacy, IPVS} {
		if have[mode] {
			found = append(found, mode)
		}
	}

	return found, nil
}

// lacksNFTables reports whether err is that of a kernel without nftables.
func lacksNFTables(err error) bool {
	return slices.ContainsFunc([]error{unix.EINVAL, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EOPNOTSUPP}, func(e error) bool {
		return errors.Is(err, e)
	})
}

// readAttempts is how often [Read] tries: kube-proxy may remove a chain while it is read.
const readAttempts = 5

// Read returns the rules of kube-proxy. The error wraps [ErrIPVS] if kube-proxy has run in that mode. That there
// are no rules, or those of two modes, is an error as well.
func Read() (Rules, error) {
	modes, err := Modes()
	if err != nil {
		return Rules{}, err
	}
	switch {
	case len(modes) == 0:
		return Rules{}, errors.New("kube-proxy has no rules in this network namespace: neither a table kube-proxy of nftables, nor a chain KUBE-SERVICES of iptables")
	case modes[len(modes)-1] == IPVS:
		return Rules{}, ErrIPVS
	case len(modes) > 1:
		return Rules{}, fmt.Errorf("there are rules of several modes of kube-proxy: %s. It removes those of its other modes when it starts", join(modes))
	}

	return readMode(modes[0])
}

// readMode returns the rules of a mode.
func readMode(mode Mode) (Rules, error) {
	var sets []ruleset
	var err error
	for range readAttempts {
		if mode == NFTables {
			sets, err = readNFTables()
		} else {
			sets, err = readIPTables(mode)
		}
		if err == nil {
			break
		}
	}
	if err != nil {
		return Rules{}, fmt.Errorf("rules of kube-proxy in mode %s: %w", mode, err)
	}
	rules := Rules{Mode: mode}
	for _, s := range sets {
		rules.Frontends = append(rules.Frontends, s.frontends()...)
		rules.NodePortAddrs = append(rules.NodePortAddrs, s.nodePortAddrs...)
	}

	return rules, nil
}

func join(modes []Mode) string {
	texts := make([]string, len(modes))
	for i, m := range modes {
		texts[i] = string(m)
	}

	return strings.Join(texts, ", ")
}

// Running returns the process id of a kube-proxy that runs in this network namespace, or "". It sees
// those of other containers only if /proc is the node's.
func Running() string {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	processes, _ := os.ReadDir("/proc") // unreadable: none is seen
	for _, p := range processes {
		name, err := os.ReadFile("/proc/" + p.Name() + "/comm")
		if err != nil || strings.TrimSpace(string(name)) != "kube-proxy" {
			continue
		}
		if ns, err := os.Readlink("/proc/" + p.Name() + "/ns/net"); err == nil && ns == own {
			return p.Name()
		}
	}

	return ""
}
