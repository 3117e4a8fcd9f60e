package node

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// judged is the packet that tests judge: the first of a connection to a neighbour.
var judged = Packet{
	Source: netip.MustParseAddr("10.244.1.1"), Destination: netip.MustParseAddrPort("10.244.1.2:8080"), Protocol: 6, Out: "lan0",
}

// mustJudge returns what drops the packet of a connection at the hook OUTPUT, as text, after it has been compared with
// what a real one meets.
func mustJudge(t *testing.T, ns *lab.Namespace, p Packet) []string {
	t.Helper()
	_, found := mustReadNetfilter(t, ns)
	drops, sure := []string{}, false
	for _, drop := range found.Judge(HookOutput, p) {
		drops, sure = append(drops, drop.String()), sure || drop.Sure
	}
	var err error
	lab.MustDo(t, ns, func() error {
		var conn net.Conn
		if conn, err = net.DialTimeout("tcp", p.Destination.String(), 300*time.Millisecond); err == nil {
			conn.Close()
		}

		return nil
	})
	switch {
	case sure && err == nil:
		t.Errorf("a real connection succeeds in spite of %q", drops)
	case len(drops) == 0 && err != nil:
		t.Errorf("nothing drops it, and a real connection fails: %v", err)
	}

	return drops
}

// mustJudged returns a namespace with a neighbour that has a server at the destination of judged, in both families.
func mustJudged(t *testing.T) *lab.Namespace {
	t.Helper()
	ns, server := lab.MustNamespace(t, "judge"), lab.MustNamespace(t, "server")
	prefixes := func(at ...string) (all []netip.Prefix) {
		for _, text := range at {
			all = append(all, netip.MustParsePrefix(text))
		}

		return all
	}
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "lan0", Addresses: prefixes("10.244.1.1/24", "fd00:10:1::1/64")},
		lab.End{Namespace: server, Device: "lan0", Addresses: prefixes("10.244.1.2/24", "fd00:10:1::2/64")})
	for _, at := range []string{"10.244.1.2:8080", "[fd00:10:1::2]:8080"} {
		listener, err := server.Listen("tcp", at)
		lab.Must(t, err)
		t.Cleanup(func() { listener.Close() })
		// Neighbours find each other before there are rules.
		lab.MustDo(t, ns, func() error {
			conn, err := net.DialTimeout("tcp", at, 5*time.Second)
			if err == nil {
				conn.Close()
			}

			return err
		})
	}

	return ns
}

// What drops a packet is found, and so is what accepts it before; each as sure as the conditions that are read make it.
func TestJudge(t *testing.T) {
	const policy = "nftables inet t c by its policy drops packets"
	sure := func(rules ...string) []string {
		for i := range rules {
			rules[i] = "a firewall drops it: " + rules[i]
		}

		return rules
	}
	for _, test := range []struct {
		name, chain string // the rules of the chain c, after those of other chains
		want        []string
	}{
		{"its port", "tcp dport 8080 drop;", sure("nftables inet t c drops packets to ports 8080")},
		{"another port", "tcp dport 80 drop; udp dport 8080 drop; tcp dport != 8080 drop; tcp dport 9000-9999 drop;", []string{}},
		{"a port of a set", "tcp dport { 80, 8000-8999 } drop;", sure("nftables inet t c drops packets to ports 80, 8000-8999")},
		{"a port of no set", "tcp dport { 80, 9000-9999 } drop; tcp dport != { 80, 8080 } drop;", []string{}},
		{"its address", "ip daddr 10.244.0.0/16 reject;", sure("nftables inet t c rejects packets to 10.244.0.0/16")},
		{"an address of a set", "ip daddr { 10.244.0.0/16, 192.0.2.1 } drop;", sure("nftables inet t c drops packets to 192.0.2.1/32")},
		{"another address", "ip daddr 10.245.0.0/16 drop; ip daddr { 10.0.0.0/9, 10.244.1.3 } drop; ip daddr != 10.244.1.2 drop; ip6 daddr ::/0 drop;", []string{}},
		{"its source", "ip saddr 10.244.1.0/24 drop;", sure("nftables inet t c drops packets")},
		{"another source", "ip saddr != 10.244.0.0/16 drop;", []string{}},
		{"its device", `oifname "la*" drop;`, sure("nftables inet t c drops packets")},
		{"another device", `oifname "eth0" drop; oifname != "lan0" drop; oifname { "eth0", "eth1" } drop;`, []string{}},
		{"a new connection", "ct state new drop;", sure("nftables inet t c drops packets")},
		{"connections that are there", "ct state invalid,established drop; ct state { invalid, untracked } drop; ct state != new drop;", []string{}},
		{"those that netfilter translates", "ct status dnat drop;", []string{}},
		{"a policy", "policy drop;", sure(policy)},
		{"a policy, after an accepting rule", "policy drop; ct state established,related accept; tcp dport 8080 accept;", []string{}},
		{"a policy, after one for a set of addresses", "policy drop; ip daddr { 10.244.0.0/16, 10.96.0.0/12 } accept;", []string{}},
		{"a policy, after one for other traffic", `policy drop; oifname "eth0" accept; udp dport 8080 accept; ip daddr 10.96.0.0/12 accept;`, sure(policy)},
		{"a policy, after one that is not read in full", "policy drop; tcp dport 8080 meta skuid 12345 accept;",
			[]string{"a firewall may drop it: " + policy + ", unless a rule before accepts it, whose conditions were not read in full: nftables inet t c accepts packets to ports 8080"}},
		{"a rule that is not read in full", "meta skuid 0 meta mark 7 drop;", []string{"a firewall may drop it: nftables inet t c drops packets, under conditions that were not read in full"}},
		{"a rule after the one that accepts", "accept; drop;", []string{}},
		{"a rule that drops before the one that accepts", "tcp dport 8080 drop; accept;", sure("nftables inet t c drops packets to ports 8080")},
		{"a limit", "limit rate over 10/second drop;", []string{"a firewall may drop it: nftables inet t c drops packets, under conditions that were not read in full"}},
		{"a map of verdicts", "ct state vmap { established : accept, new : jump x, invalid : drop }; drop;", []string{}},
		{"a map of verdicts by ports", "tcp dport vmap { 80 : accept, 8080 : drop };", sure("nftables inet t c drops packets to ports 80, 8080")},
		{"a map of verdicts without it", "policy drop; tcp dport vmap { 80 : accept, 81-90 : accept };", sure(policy)},
		{"a jump to what accepts", "policy drop; ip daddr 10.244.0.0/16 jump x;", []string{}},
		{"a jump to what returns", "policy drop; jump r;", sure(policy)},
		{"a jump that leads nowhere else", "policy drop; goto r; accept;", sure(policy)},
		{"a jump that may be taken, to what accepts", "meta mark 7 jump x; drop;",
			[]string{"a firewall may drop it: nftables inet t c drops packets, unless a rule before accepts it, whose conditions were not read in full: nftables inet t x accepts packets"}},
		{"a jump that may be taken, to what returns", "meta mark 7 jump r; drop;", sure("nftables inet t c drops packets")},
		{"what may return before it is dropped", "jump m;", []string{"a firewall may drop it: nftables inet t m drops packets, under conditions that were not read in full"}},
		{"what is dropped after the part that may return", "policy drop; jump n;", sure(policy)},
		{"what another chain at the hook accepts", "tcp dport 8080 drop; }; chain d { type filter hook output priority -10; accept;", sure("nftables inet t c drops packets to ports 8080")},
		{"another hook", "}; chain d { type filter hook input priority 0; udp dport 8080 drop;", []string{}},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			ns := mustJudged(t)
			lab.Must(t, ns.Netfilter(`table inet t {
				chain x { accept; }
				chain r { return; }
				chain m { meta mark 7 return; drop; }
				chain n { meta mark 7 return; meta mark 8 return; tcp dport 80 drop; }
				chain c { type filter hook output priority 0; `+test.chain+` }
			}`))
			if diff := cmp.Diff(test.want, mustJudge(t, ns, judged)); diff != "" {
				t.Errorf("drops (-want +have):\n%s", diff)
			}
		})
	}
}

// The same is found whichever iptables wrote the rules, in both families.
func TestJudgeIptables(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"} {
		p, pods, others := judged, "10.244.0.0/16", "10.96.0.0/12"
		table := "nftables ip filter"
		if strings.HasPrefix(tool, "ip6") {
			p.Source, p.Destination = netip.MustParseAddr("fd00:10:1::1"), netip.MustParseAddrPort("[fd00:10:1::2]:8080")
			pods, others, table = "fd00:10::/32", "fd00:96::/32", "nftables ip6 filter"
		}
		if strings.HasSuffix(tool, "legacy") {
			table = map[bool]string{true: "legacy iptables filter", false: "legacy ip6tables filter"}[p.Source.Is4()]
		}
		for _, test := range []struct {
			name  string
			rules []string // of OUTPUT, but for those that begin with a dash
			want  string   // empty: nothing drops it
		}{
			{"a policy", []string{"-P OUTPUT DROP"}, "drops it: " + table + " OUTPUT by its policy drops packets"},
			{"what is accepted before the policy", []string{"-P OUTPUT DROP", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-d " + pods + " -j ACCEPT"}, ""},
			{"what other rules accept", []string{"-P OUTPUT DROP", "-d " + others + " -j ACCEPT", "! -s " + pods + " -j ACCEPT", "-o eth+ -j ACCEPT", "-p udp -j ACCEPT",
				"-p tcp --dport 80 -j ACCEPT", "-p tcp -m multiport --dports 80,9000:9999 -j ACCEPT", "-p tcp ! --dport 8080 -j ACCEPT"}, "drops it: " + table + " OUTPUT by its policy drops packets"},
			{"what is accepted by ports", []string{"-P OUTPUT DROP", "-p tcp -m multiport --dports 80,8000:8999 -m comment --comment x -j ACCEPT"}, ""},
			{"what is accepted by the device", []string{"-P OUTPUT DROP", "-o la+ -j ACCEPT"}, ""},
			{"a new connection", []string{"-m conntrack --ctstate NEW -j DROP"}, "drops it: " + table + " OUTPUT drops packets"},
			{"a state", []string{"-m conntrack --ctstate INVALID -j DROP", "-m conntrack ! --ctstate NEW -j DROP", "-m conntrack --ctstate DNAT -j DROP"}, ""},
			{"a mark", []string{"-m mark --mark 7 -j DROP"}, "may drop it: " + table + " OUTPUT drops packets, under conditions that were not read in full"},
			{"a policy after a mark", []string{"-P OUTPUT DROP", "-m mark --mark 7 -j ACCEPT"},
				"may drop it: " + table + " OUTPUT by its policy drops packets, unless a rule before accepts it, whose conditions were not read in full: " + table + " OUTPUT accepts packets"},
			{"chains of others", []string{"-P OUTPUT DROP", "-N pods", "-N logs", "-A pods -s " + pods + " -j ACCEPT", "-A logs -j LOG", "-j logs", "-j pods"}, ""},
			{"a chain that rejects", []string{"-N end", "-A end -p tcp -j REJECT", "-g end"}, "drops it: " + table + " end rejects packets"},
			{"a chain that returns", []string{"-N end", "-A end -j RETURN", "-A end -j DROP", "-g end", "-j DROP"}, ""},
		} {
			t.Run("it is, for "+tool+", "+test.name, func(t *testing.T) {
				ns := mustJudged(t)
				for _, rule := range test.rules {
					if !strings.HasPrefix(rule, "-P") && !strings.HasPrefix(rule, "-N") && !strings.HasPrefix(rule, "-A") {
						rule = "-A OUTPUT " + rule
					}
					mustRun(t, ns, append([]string{tool}, strings.Fields(rule)...)...)
				}
				want := []string{}
				if test.want != "" {
					want = append(want, "a firewall "+test.want)
				}
				if diff := cmp.Diff(want, mustJudge(t, ns, p)); diff != "" {
					t.Errorf("drops (-want +have):\n%s", diff)
				}
			})
		}
	}
}

// The hooks of what is forwarded and of what the node gets have rules of their own, and the policies of the former are told.
func TestJudgedHooks(t *testing.T) {
	ns := lab.MustNamespace(t, "hooks")
	lab.Must(t, ns.Netfilter(`table ip t {
		chain f { type filter hook forward priority 0; policy drop; iifname "cni0" accept; }
		chain i { type filter hook input priority 0; iifname "eth0" tcp dport 8080 drop; }
	}`))
	_, found := mustReadNetfilter(t, ns)
	if len(found.Drops) != 1 || found.Drops[0].String() != "nftables ip t f by its policy drops packets" {
		t.Errorf("the policies are %v", found.Drops)
	}
	for _, test := range []struct {
		hook uint32
		in   string
		to   string
		want int
	}{
		{HookForward, "cni0", "10.244.1.2:8080", 0}, {HookForward, "eth0", "10.244.1.2:8080", 1}, {HookForward, "eth0", "[fd00::1]:8080", 0},
		{HookInput, "cni0", "10.244.1.2:8080", 0}, {HookInput, "eth0", "10.244.1.2:8080", 1}, {HookOutput, "", "10.244.1.2:8080", 0},
	} {
		p := Packet{Destination: netip.MustParseAddrPort(test.to), Protocol: 6, In: test.in, Out: "eth0"}
		if drops := found.Judge(test.hook, p); len(drops) != test.want {
			t.Errorf("hook %d, from %q to %s: %v, want %d", test.hook, test.in, test.to, drops, test.want)
		}
	}
}
