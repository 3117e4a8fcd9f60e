package kubeproxy

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go4.org/netipx"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// servicesChain is the chain of the table nat in which packets to Services begin.
const servicesChain = "KUBE-SERVICES"

// hasLegacyRules reports whether the older iptables has chains of Services. Where it has no table nat, its tool
// is not needed.
func hasLegacyRules() (bool, error) {
	for family, path := range map[string]string{"": "/proc/net/ip_tables_names", "6": "/proc/net/ip6_tables_names"} {
		tables, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the kernel has no iptables of this kind
		}
		if err != nil {
			return false, fmt.Errorf("iptables: %w", err)
		}
		if !slices.Contains(strings.Fields(string(tables)), "nat") {
			continue
		}
		saved, err := runTool("", "ip"+family+"tables-legacy-save", "-t", "nat")
		if err != nil {
			return false, err
		}
		if strings.Contains(saved, ":"+servicesChain+" ") {
			return true, nil
		}
	}

	return false, nil
}

// hostRoots lead to the node's own files from a container: one that sees the node's processes, and one of
// 'kubectl debug node'.
var hostRoots = []string{"/proc/1/root", "/host"}

// findTool returns a command that runs a program of iptables: one on the PATH, or of the node.
func findTool(roots []string, name string, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(name, args...)
	if cmd.Err == nil {
		return cmd, nil
	}
	for _, root := range roots {
		for _, folder := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
			if _, err := os.Stat(filepath.Join(root, folder, name)); err != nil {
				continue
			}
			cmd := exec.Command(filepath.Join(folder, name), args...)
			cmd.SysProcAttr, cmd.Dir, cmd.Err = &syscall.SysProcAttr{Chroot: root}, "/", nil

			return cmd, nil
		}
	}

	return nil, fmt.Errorf("kube-proxy's rules may be in iptables, but there is no %s on the PATH, nor below %s: run this on the node itself, or by 'kubectl debug node/NAME --profile=sysadmin'", name, strings.Join(roots, " or "))
}

// runTool runs a program of iptables, and returns what it prints.
func runTool(input, name string, args ...string) (string, error) {
	cmd, err := findTool(hostRoots, name, args...)
	if err != nil {
		return "", err
	}
	var printed, complaint strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &printed, &complaint
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(complaint.String()))
	}

	return printed.String(), nil
}

// tool returns the name of a program of iptables: "ip6tables-nft-restore".
func (m Mode) tool(family, act string) string {
	variant := "nft"
	if m == IPTablesLegacy {
		variant = "legacy"
	}

	return "ip" + family + "tables-" + variant + "-" + act
}

// ipFamilies are how the names of tools spell the families.
var ipFamilies = []string{"", "6"}

// saveRules returns the rules of a family. That the tool leaves one of kube-proxy's tables out, because nft has put
// something into it that iptables does not know, is an error.
func saveRules(mode Mode, family string) (string, error) {
	tool := mode.tool(family, "save")
	saved, err := runTool("", tool)
	if err != nil {
		return "", err
	}
	for _, table := range []string{"nat", "filter"} {
		if strings.Contains(saved, "# Table `"+table+"' is incompatible") {
			return "", fmt.Errorf("%s: table %s has rules that nft has written, and no tool of iptables can read: see 'nft list table ip%s %s'", tool, table, family, table)
		}
	}

	return saved, nil
}

func readIPTables(mode Mode) (all []ruleset, err error) {
	for i, family := range ipFamilies {
		saved, err := saveRules(mode, family)
		if err != nil {
			return nil, err
		}
		set, err := rulesetOf(saved, []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[i])
		if err != nil {
			return nil, err
		}
		all = append(all, set)
	}

	return all, nil
}

// rulesetOf reads what iptables-save has printed, of the family of the unspecified address.
func rulesetOf(saved string, unspecified netip.Addr) (ruleset, error) {
	r := savedReader{unspecified: unspecified, sources: make(map[string]*netipx.IPSetBuilder), ruleset: newRuleset()}
	for _, rule := range parseSaved(saved) {
		if err := r.add(rule); err != nil {
			return r.ruleset, fmt.Errorf("table %s: -A %s %s: %w", rule.table, rule.chain, rule.text, err)
		}
	}
	for to, chain := range r.chains {
		if sources := r.sources[chain]; sources != nil {
			set, err := sources.Clone().IPSet()
			if err != nil {
				return r.ruleset, err
			}
			r.ranges[to] = set.Prefixes()
		}
	}

	return r.ruleset, nil
}

// savedReader makes a ruleset of the rules of one family.
type savedReader struct {
	unspecified netip.Addr
	sources     map[string]*netipx.IPSetBuilder // from which packets pass the chains KUBE-FW-…
	ruleset
}

// add adds a rule. The chains of the table nat lead to each other:
//
//	KUBE-SERVICES ─┬───────────────────────────────┬▶ KUBE-SVC-… (all endpoints) ─▶ KUBE-SEP-… (one endpoint)
//	               ├▶ KUBE-FW-… (source ranges) ─▶ KUBE-EXT-… ─▶ KUBE-SVL-… (local endpoints) ─▶ KUBE-SEP-…
//	               └▶ KUBE-NODEPORTS ────────────▶ KUBE-EXT-…
//
// Those of the table filter that have the same names, and KUBE-EXTERNAL-SERVICES, refuse packets to Services
// without endpoints.
func (s *savedReader) add(r savedRule) error {
	target := r.target()
	isFront := slices.Contains([]string{servicesChain, "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS"}, r.chain)
	switch {
	case r.chain == servicesChain && target == "KUBE-NODEPORTS":
		if text := r.options["-d"]; text != "" {
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				return err
			}
			s.nodePortAddrs = append(s.nodePortAddrs, prefix)
		}
	case isFront && r.options["--dport"] != "":
		return s.addFront(r, target)
	case r.table != "nat" || !strings.HasPrefix(r.chain, "KUBE-"):
	case strings.HasPrefix(r.chain, "KUBE-FW-") && r.options["-s"] != "":
		prefix, err := netip.ParsePrefix(r.options["-s"])
		if err != nil {
			return err
		}
		if s.sources[r.chain] == nil {
			s.sources[r.chain] = new(netipx.IPSetBuilder)
			s.rules[r.chain] = []rule{{targets: []string{target}}}
		}
		s.sources[r.chain].AddPrefix(prefix)
	case target == "DNAT":
		backend, err := netip.ParseAddrPort(r.options["--to-destination"])
		if err != nil {
			return err
		}
		s.rules[r.chain] = append(s.rules[r.chain], rule{backends: []netip.AddrPort{backend}})
	case strings.HasPrefix(target, "KUBE-S"): // KUBE-SVC-…, KUBE-SVL-…, KUBE-SEP-…
		added := rule{targets: []string{target}}
		// Pods and the node are recognized by the source, or by the device.
		added.local = strings.HasPrefix(r.chain, "KUBE-EXT-") && r.options["-s"]+r.options["-i"]+r.options["--src-type"] != ""
		if seconds := r.options["--seconds"]; seconds != "" {
			n, err := strconv.Atoi(seconds)
			if err != nil {
				return err
			}
			added.affinity = time.Duration(n) * time.Second
		}
		s.rules[r.chain] = append(s.rules[r.chain], added)
	}

	return nil
}

// addFront adds a rule with a destination: it leads to the chain of a Service, or refuses.
func (s *savedReader) addFront(r savedRule, target string) error {
	address := s.unspecified
	if text := r.options["-d"]; text != "" {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return err
		}
		if !prefix.IsSingleIP() {
			return nil // a node port on loopback: the rule for all addresses has the same target
		}
		address = prefix.Addr()
	}
	port, err := strconv.ParseUint(r.options["--dport"], 10, 16)
	if err != nil {
		return err
	}
	to := destination{
		address:  netip.AddrPortFrom(address, uint16(port)),
		protocol: map[string]lb.Protocol{"tcp": lb.TCP, "udp": lb.UDP, "sctp": lb.SCTP}[r.options["-p"]],
	}
	var leads map[destination]string
	switch {
	case target == "REJECT", target == "DROP":
		leads, target = s.refused, strings.ToLower(target)
	case r.table == "nat" && strings.HasPrefix(target, "KUBE-"):
		leads = s.chains
	default:
		return nil // it accepts a health check
	}
	if leads[to] == "" { // packets take the first rule
		leads[to] = target
	}
	if s.names[to] == "" {
		s.names[to], _, _ = strings.Cut(r.options["--comment"], " ")
	}

	return nil
}

// savedRule is a rule as iptables-save prints it.
type savedRule struct {
	table, chain string
	text         string            // all after the chain
	options      map[string]string // by name, such as "-d"; negated ones begin with "!"
}

// parseSaved returns the rules of all tables.
func parseSaved(saved string) (all []savedRule) {
	table := ""
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "*"); ok {
			table = name
		}
		rest, ok := strings.CutPrefix(line, "-A ")
		if !ok {
			continue
		}
		all = append(all, parseRule(table, rest))
	}

	return all
}

// target returns what a rule jumps or goes to: a chain, or "ACCEPT" and the like.
func (r savedRule) target() string { return cmp.Or(r.options["-j"], r.options["-g"]) }

// parseRule returns a rule of which what follows "-A " is given. A comment is in quotes if it has spaces.
func parseRule(table, text string) savedRule {
	chain, text, _ := strings.Cut(text, " ")
	options := make(map[string]string)
	name, negated, quoted := "", "", false
	for _, word := range strings.FieldsFunc(text, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}

		return r == ' ' && !quoted
	}) {
		switch {
		case word == "!":
			negated = "!"
		case strings.HasPrefix(word, "-"):
			name, negated = negated+word, ""
			options[name] = ""
		case name != "" && options[name] == "":
			options[name] = strings.Trim(word, `"`)
		}
	}

	return savedRule{table, chain, text, options}
}
