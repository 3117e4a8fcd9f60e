package kubeproxy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// Removed is what [Remove] has removed, and what it has left.
type Removed struct {
	Modes []Mode // those whose rules are gone
	// Warnings are sentences about what the rules have done beside translating.
	Warnings []string
}

// Remove removes the rules of kube-proxy, and no others. Connections that they have translated go on: see
// [KeeperTable], which is added first, and stays. Exchanges of datagrams begin anew: see [translations]. That there are
// no rules is not an error. The error wraps [ErrIPVS] if kube-proxy has run in that mode, and then nothing is removed.
func Remove() (Removed, error) {
	modes, err := Modes()
	if err != nil || len(modes) == 0 {
		return Removed{}, err
	}
	if slices.Contains(modes, IPVS) {
		return Removed{}, ErrIPVS
	}
	conn, err := nftables.New()
	if err != nil {
		return Removed{}, fmt.Errorf("nftables: %w", err)
	}
	if err := addKeeper(conn); err != nil {
		return Removed{}, err
	}
	var removed Removed
	datagrams := make(translations)
	for _, mode := range modes {
		rules, unread := readMode(mode)
		if unread != nil {
			removed.Warnings = append(removed.Warnings, fmt.Sprintf("UDP sockets of the node may keep a backend that is gone, until their programs are restarted: %v", unread))
		}
		datagrams.add(rules.Frontends)
		var failed error
		if mode == NFTables {
			failed = removeTables(conn)
		} else {
			var warnings []string
			warnings, failed = removeChains(mode)
			removed.Warnings = append(removed.Warnings, warnings...)
		}
		if failed == nil {
			removed.Modes = append(removed.Modes, mode)
		}
		err = errors.Join(err, failed)
	}

	return removed, errors.Join(err, datagrams.forget())
}

// removeTables removes the tables of nftables mode, both or none.
func removeTables(conn *nftables.Conn) error {
	tables, err := conn.ListTables()
	if err != nil {
		return fmt.Errorf("nftables: tables: %w", err)
	}
	for _, t := range tables {
		if t.Name == tableName {
			conn.DelTable(t)
		}
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("tables %s: %w", tableName, err)
	}

	return nil
}

// isKubeProxys reports whether a chain of iptables is kube-proxy's, and not the kubelet's.
func isKubeProxys(chain string) bool {
	switch chain {
	case servicesChain, "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-POSTROUTING", "KUBE-MARK-MASQ",
		"KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY":
		return true
	}

	return slices.ContainsFunc([]string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"}, func(prefix string) bool {
		return strings.HasPrefix(chain, prefix)
	})
}

// markChains mark packets for masquerading, and masquerade those that are marked. Others use them for the host ports of
// containers (cri-dockerd, and the CNI plugin portmap if it is configured so).
var markChains = []string{"KUBE-MARK-MASQ", "KUBE-POSTROUTING"}

// removeChains removes the chains of iptables mode, and the rules of other chains that lead to them, table by table:
// one transaction each.
func removeChains(mode Mode) (warnings []string, err error) {
	for _, family := range ipFamilies {
		saved, err := saveRules(mode, family)
		if err != nil {
			return warnings, err
		}
		var kept []string
		if user := markUser(saved); user != "" {
			kept = markChains
			warnings = append(warnings, fmt.Sprintf("%s: the chains %s of the table nat stay, because rules in %s, which is not kube-proxy's, lead to them", mode.tool(family, "save"), strings.Join(kept, " and "), user))
		}
		if _, err := runTool(withoutChains(saved, kept), mode.tool(family, "restore"), "--noflush", "--wait=30"); err != nil {
			return warnings, err
		}
		if _, filter, ok := strings.Cut(saved, "*filter"); ok && strings.Contains(filter, "\n:FORWARD DROP") {
			warnings = append(warnings, fmt.Sprintf("%s drops forwarded packets that no rule accepts, and kube-proxy's rules accepted those of Services: 'ip%stables -L FORWARD' shows whether others accept the packets of pods", mode.tool(family, "save"), family))
		}
	}

	return warnings, nil
}

// markUser returns a chain that is not kube-proxy's and marks packets by kube-proxy's chain, or "".
func markUser(saved string) string {
	for _, r := range parseSaved(saved) {
		if r.target() == "KUBE-MARK-MASQ" && !isKubeProxys(r.chain) {
			return r.chain
		}
	}

	return ""
}

// withoutChains returns what makes iptables-restore remove kube-proxy's chains, but not those that are kept, from what
// iptables-save has printed. The table nat comes last: if another one fails, [Modes] still finds the rules.
func withoutChains(saved string, kept []string) string {
	goes := func(chain string) bool { return isKubeProxys(chain) && !slices.Contains(kept, chain) }
	var tables, nat, table, deleted strings.Builder
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			fmt.Fprintln(&table, line)
		case strings.HasPrefix(line, ":"):
			if chain, _, _ := strings.Cut(line[1:], " "); goes(chain) {
				fmt.Fprintf(&table, ":%s - [0:0]\n", chain) // which empties it
				fmt.Fprintf(&deleted, "-X %s\n", chain)
			}
		case strings.HasPrefix(line, "-A "):
			if r := parseRule("", line[3:]); goes(r.target()) && !goes(r.chain) {
				fmt.Fprintf(&table, "-D %s %s\n", r.chain, r.text)
			}
		case line == "COMMIT":
			text := table.String() + deleted.String() + "COMMIT\n"
			if strings.HasPrefix(text, "*nat\n") {
				nat.WriteString(text)
			} else {
				tables.WriteString(text)
			}
			table.Reset()
			deleted.Reset()
		}
	}

	return tables.String() + nat.String()
}
