package node

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func mustReader(t testing.TB, ns *lab.Namespace) *reader {
	t.Helper()
	r, err := newReader(ns.Handle())
	lab.Must(t, err)
	t.Cleanup(r.close)

	return r
}

// Rules that only match, count, accept or jump are no concern; all others are.
func TestConcernOfRules(t *testing.T) {
	for _, test := range []struct {
		name, rules string
		concern     string
	}{
		{"nothing", "", ""},
		{"accepting forward chains", `
			table inet t {
				set pods { type ipv4_addr; elements = {10.244.1.1} }
				chain allowed { ct state established,related accept; return }
				chain forward {
					type filter hook forward priority 0; policy accept
					iifname "eth0" ip saddr @pods tcp dport {80,443} counter accept
					meta mark & 0xff == 3 goto allowed
					ip6 daddr fd00::/8 jump allowed
				}
				chain nat { ip saddr 10.244.0.0/16 masquerade random }
				chain postrouting { type nat hook postrouting priority 100; ip6 daddr fd00::/8 masquerade; jump nat }
			}`, ""},
		{"what drops for the node itself", `
			table ip t {
				chain firewall { drop }
				chain input { type filter hook input priority 0; policy drop; jump firewall }
				chain output { type filter hook output priority 0; policy accept; jump firewall }
				chain unused { drop }
			}`, ""},
		{"what goes by bridges", "table bridge t { chain c { type filter hook forward priority 0; policy drop; } }", ""},
		{"a policy", "table ip6 t { chain c { type filter hook forward priority 0; policy drop; } }", "nftables chain t c has a policy other than accept"},
		{"a drop", "table ip t { chain c { type filter hook forward priority 0; tcp dport 25 drop; } }", `nftables chain t c has a rule with "immediate"`},
		{"a drop for an address, behind a jump", `
			table inet t {
				chain last { ip saddr 192.0.2.1 drop }
				chain more { goto last }
				chain c { type filter hook prerouting priority -300; jump more; }
			}`, `nftables chain t last has a rule with "immediate"`},
		{"a reject", "table ip t { chain c { type filter hook forward priority 0; reject; } }", `nftables chain t c has a rule with "reject"`},
		{"another source", "table ip t { chain c { type nat hook postrouting priority 100; snat to 192.0.2.1; } }", `nftables chain t c has a rule with "nat"`},
		{"another destination", "table ip t { chain c { type nat hook prerouting priority -100; dnat to 192.0.2.1; } }", `nftables chain t c has a rule with "nat"`},
		{"a verdict map", `table ip t { chain c { type filter hook forward priority 0; tcp dport vmap {22 : drop}; } }`, `nftables chain t c has a rule with "lookup"`},
		{"a mark that is set", "table ip t { chain c { type filter hook prerouting priority -150; meta mark set 7; } }", `nftables chain t c has a rule with "meta"`},
		{"a mark of a connection that is set", "table ip t { chain c { type filter hook prerouting priority -150; ct mark set 7; } }", `nftables chain t c has a rule with "ct"`},
		{"a header that is written", "table ip t { chain c { type filter hook forward priority 0; ip dscp set 7; } }", `nftables chain t c has a rule with "payload"`},
		{"a limit", "table ip t { chain c { type filter hook forward priority 0; limit rate 1/second accept; } }", `nftables chain t c has a rule with "limit"`},
		{"a log", "table ip t { chain c { type filter hook forward priority 0; log; } }", `nftables chain t c has a rule with "log"`},
		{"what is at a device", `table netdev t { chain c { type filter hook ingress device "lo" priority 0; ip saddr 192.0.2.1 drop; } }`, `nftables chain t c has a rule with "immediate"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			r := mustReader(t, ns)
			lab.Must(t, ns.Netfilter(strings.ReplaceAll(test.rules, " }", "; }")+"\n"))
			if got := r.concern(); got != (concern{text: test.concern}) {
				t.Errorf("concern is %+v, want %q", got, test.concern)
			}
		})
	}
}

// Rules of iptables-legacy and of iptables-nft are found.
func TestConcernOfIptables(t *testing.T) {
	for _, test := range []struct{ name, command, concern string }{
		{"nft accepting", "iptables-nft -A FORWARD -m comment --comment x -s 10.244.0.0/16 -m conntrack --ctstate NEW -j ACCEPT", ""},
		{"nft rejecting", "iptables-nft -A FORWARD -s 10.244.0.0/16 -j REJECT", `nftables chain filter FORWARD has a rule with "target"`},
		{"nft masquerading", "ip6tables-nft -t nat -A POSTROUTING -m comment --comment x -j MASQUERADE --random-fully", ""},
		{"nft marking", "ip6tables-nft -t mangle -A POSTROUTING -j MARK --set-mark 7", `nftables chain mangle POSTROUTING has a rule with "target"`},
		{"nft dropping by policy", "iptables-nft -P FORWARD DROP", "nftables chain filter FORWARD has a policy other than accept"},
		{"legacy", "iptables-legacy -A INPUT -j ACCEPT", "legacy iptables has tables: filter"},
		{"legacy of IPv6", "ip6tables-legacy -t mangle -A PREROUTING -j ACCEPT", "legacy iptables has tables: mangle"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			r := mustReader(t, ns)
			mustRun(t, ns, strings.Fields(test.command)...)
			if got := r.concern(); !strings.HasPrefix(got.text, test.concern) || test.concern == "" && got.text != "" || got.encrypts {
				t.Errorf("concern is %+v, want %q", got, test.concern)
			}
		})
	}
}

func mustRun(t testing.TB, ns *lab.Namespace, command ...string) {
	t.Helper()
	if _, err := exec.LookPath(command[0]); err != nil {
		t.Skip(err)
	}
	if output, err := lab.Output(ns, nil, command[0], command[1:]...); err != nil {
		t.Fatalf("%s: %v: %s", command, err, output)
	}
}

// Programs of others that miss packets at an uplink are reported, with filters as soon as they are there.
func TestWatchReportsBypassed(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	uplink := lab.End{Namespace: ns, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}
	lab.MustVeth(t, uplink, lab.End{Namespace: peer, Device: "eth0"})
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "veth0"}, lab.End{Namespace: peer, Device: "eth1"}) // of a pod
	link, err := ns.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	index := link.Attrs().Index
	var inStack atomic.Pointer[string]
	inStack.Store(new(string))
	watch := mustWatch(t, ns, Config{Bypassed: func(devices []int) (map[int]string, error) {
		if !slices.Equal(devices, []int{index}) {
			return nil, fmt.Errorf("devices are %v, and not eth0 alone", devices)
		}
		filters, err := netlink.FilterList(link, netlink.HANDLE_MIN_INGRESS) // of the thread's namespace
		found := map[int]string{0: *inStack.Load()}
		if len(filters) > 0 {
			found[index] = filters[0].Type()
		}

		return found, err
	}})
	wait := func(filter, concern string) {
		t.Helper()
		watch.until(filter+concern, func(s State) bool {
			at := slices.IndexFunc(s.Devices, func(d Device) bool { return d.Index == index })

			return s.Devices[at].Bypassed == filter && s.Concern == concern
		})
	}
	wait("", "")
	clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	lab.Must(t, ns.Netlink().QdiscAdd(clsact))
	filter := &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 7, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1),
	}
	lab.Must(t, ns.Netlink().FilterAdd(filter))
	wait("u32", "")
	inStack.Store(new("their_program"))
	lab.Must(t, ns.Netlink().QdiscDel(clsact))
	wait("", `"their_program" runs at a hook of netfilter`)
}

// Routing rules that select by more than addresses, IPsec policies and nftables chains are reported
// when they are added, and when they are gone.
func TestWatchReportsConcerns(t *testing.T) {
	rule := netlink.NewRule()
	rule.Priority, rule.Table, rule.Mark = 100, 254, 7
	port := netlink.NewRule()
	port.Priority, port.Table, port.Family, port.Dport = 101, 254, netlink.FAMILY_V6, netlink.NewRulePortRange(80, 80)
	source := netlink.NewRule()
	source.Priority, source.Table, source.Src = 102, 254, mustNet(t, "10.0.0.0/8")
	_, all, _ := net.ParseCIDR("0.0.0.0/0")
	policy := &netlink.XfrmPolicy{Src: all, Dst: all, Dir: netlink.XFRM_DIR_OUT}

	ns := lab.MustNamespace(t, "node")
	watch := mustWatch(t, ns, Config{})
	wait := func(concern string) {
		t.Helper()
		encrypts := concern == "1 IPsec policies"
		watch.until(concern, func(s State) bool { return s.Concern == concern && s.Encrypts == encrypts })
	}
	wait("")
	for _, step := range []struct {
		concern  string
		add, del func() error
	}{
		{"routing rule 100 selects by a mark", func() error { return ns.Netlink().RuleAdd(rule) }, func() error { return ns.Netlink().RuleDel(rule) }},
		{"routing rule 101 selects by more than addresses", func() error { return ns.Netlink().RuleAdd(port) }, func() error { return ns.Netlink().RuleDel(port) }},
		{"1 IPsec policies", func() error { return ns.Do(func() error { return netlink.XfrmPolicyAdd(policy) }) },
			func() error { return ns.Do(func() error { return netlink.XfrmPolicyDel(policy) }) }},
		{"nftables chain t c has a policy other than accept",
			func() error {
				return ns.Netfilter("table ip t { chain c { type filter hook forward priority 0; policy drop; }; }")
			},
			func() error { return ns.Netfilter("delete table ip t") }},
	} {
		if err := step.add(); err != nil {
			t.Fatalf("%s: %v", step.concern, err)
		}
		wait(step.concern)
		if err := step.del(); err != nil {
			t.Fatalf("%s: %v", step.concern, err)
		}
		wait("")
	}
	lab.Must(t, ns.Netlink().RuleAdd(source))
	watch.wantNoUpdate(4 * quietTime)
}

// Legacy tables have no notifications: a periodic list finds them.
func TestWatchFindsLegacyTables(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	watch := mustWatch(t, ns, Config{relistTime: 20 * time.Millisecond})
	mustRun(t, ns, "iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-j", "ACCEPT")
	watch.until("a concern", func(s State) bool { return s.Concern == "legacy iptables has tables: raw" })
}

func mustNet(t testing.TB, text string) *net.IPNet {
	t.Helper()
	_, network, err := net.ParseCIDR(text)
	lab.Must(t, err)

	return network
}
