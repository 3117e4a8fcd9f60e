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
	Modes []Mode
	// Warnings are sentences about what the rules have done beside translating.
	Warnings []string
}

// Remove removes the rules of kube-proxy, and no others. Connections that they have translated go on: see
// [KeeperTable], which is added first, and stays. That there are no rules is not an error. The error wraps
// [ErrIPVS] if kube-proxy has run in that mode, and then nothing is removed.
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
	removed := Removed{Modes: modes}
	for _, mode := range modes {
		if mode == NFTables {
			err = errors.Join(err, removeTables(conn))

			continue
		}
		warnings, failed := removeChains(mode)
		removed.Warnings = append(removed.Warnings, warnings...)
		err = errors.Join(err, failed)
	}

	return removed, err
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

// removeChains removes the chains of iptables mode, and the rules of other chains that jump to them, table by table:
// one transaction each.
func removeChains(mode Mode) (warnings []string, err error) {
	for _, family := range ipFamilies {
		saved, err := runTool("", mode.tool(family, "save"))
		if err != nil {
			return warnings, err
		}
		if _, err := runTool(withoutChains(saved), mode.tool(family, "restore"), "--noflush"); err != nil {
			return warnings, err
		}
		if _, filter, ok := strings.Cut(saved, "*filter\n"); ok && strings.Contains(filter, "\n:FORWARD DROP") {
			warnings = append(warnings, fmt.Sprintf("%s drops forwarded packets that no rule accepts, and kube-proxy's rules accepted those of Services: 'ip%stables -L FORWARD' shows whether others accept the packets of pods", mode.tool(family, "save"), family))
		}
	}

	return warnings, nil
}

// withoutChains returns what makes iptables-restore remove kube-proxy's chains from what iptables-save has printed.
func withoutChains(saved string) string {
	var out, deleted strings.Builder
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			fmt.Fprintln(&out, line)
		case strings.HasPrefix(line, ":"):
			if chain, _, _ := strings.Cut(line[1:], " "); isKubeProxys(chain) {
				fmt.Fprintf(&out, ":%s - [0:0]\n", chain) // which empties it
				fmt.Fprintf(&deleted, "-X %s\n", chain)
			}
		case strings.HasPrefix(line, "-A "):
			chain, rule, _ := strings.Cut(line[3:], " ")
			if target := optionsOf(rule)["-j"]; isKubeProxys(target) && !isKubeProxys(chain) {
				fmt.Fprintf(&out, "-D %s %s\n", chain, rule)
			}
		case line == "COMMIT":
			fmt.Fprintf(&out, "%sCOMMIT\n", deleted.String())
			deleted.Reset()
		}
	}

	return out.String()
}
