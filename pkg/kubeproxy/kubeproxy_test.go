package kubeproxy

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// What kube-proxy writes for a Service with external traffic policy Local: a ClusterIP, a load balancer's address with
// source ranges, and a node port. Other programs have rules beside it.
const saved = `*filter
:FORWARD ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
:MINE - [0:0]
-A FORWARD -j MINE
-A FORWARD -g KUBE-SERVICES
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-SERVICES -d 10.96.0.2/32 -p udp -m comment --comment "shop/dns has no endpoints" -m udp --dport 53 -j REJECT --reject-with icmp-port-unreachable
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-EXT-A - [0:0]
:KUBE-FW-A - [0:0]
:KUBE-SEP-1 - [0:0]
:KUBE-SEP-2 - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SVL-A - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-EXT-A -s 10.244.0.0/16 -m comment --comment "pod traffic for shop/web:http external destinations" -j KUBE-SVC-A
-A KUBE-EXT-A -i cali+ -m comment --comment "pod traffic for shop/web:http external destinations" -j KUBE-SVC-A
-A KUBE-EXT-A -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-A -m addrtype --src-type LOCAL -j KUBE-SVC-A
-A KUBE-EXT-A -j KUBE-SVL-A
-A KUBE-FW-A -s 10.0.0.0/9 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-A
-A KUBE-FW-A -s 10.128.0.0/9 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-A
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-EXT-A
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-EXT-A
-A KUBE-SEP-1 -s 10.244.1.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-1 -p tcp -m recent --set --name KUBE-SEP-1 --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 10.244.1.2:8080
-A KUBE-SEP-2 -p tcp -m tcp -j DNAT --to-destination 10.244.2.2:8080
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 203.0.113.1/32 -p tcp -m comment --comment "shop/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-A
-A KUBE-SERVICES -d 192.168.50.1/32 -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -j KUBE-NODEPORTS
-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m recent --rcheck --seconds 600 --reap --name KUBE-SEP-1 --mask 255.255.255.255 --rsource -j KUBE-SEP-1
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-1
-A KUBE-SVC-A -j KUBE-SEP-2
-A KUBE-SVL-A -j KUBE-SEP-1
COMMIT
`

func TestFrontendsOfIPTables(t *testing.T) {
	set, err := rulesetOf(saved, netip.IPv4Unspecified())
	lab.Must(t, err)
	local, all := addresses("10.244.1.2:8080"), addresses("10.244.1.2:8080", "10.244.2.2:8080")
	front := func(service, address string, protocol lb.Protocol, scope lb.Scope) status.Frontend {
		return status.Frontend{Service: service, Address: netip.MustParseAddrPort(address), Protocol: protocol, Scope: scope}
	}
	web := func(address string, scope lb.Scope, affinity uint32, backends []netip.AddrPort, ranges ...netip.Prefix) status.Frontend {
		f := front("shop/web:http", address, lb.TCP, scope)
		f.Backends, f.AffinitySeconds, f.SourceRanges = backends, affinity, ranges

		return f
	}
	dns := front("shop/dns", "10.96.0.2:53", lb.UDP, lb.Internal)
	dns.WhenEmpty = "reject"
	want := []status.Frontend{dns, dns}
	want[1].Scope = lb.External
	merged := netip.MustParsePrefix("10.0.0.0/8")
	want = append(want,
		web("0.0.0.0:30080", lb.Internal, 600, all), web("0.0.0.0:30080", lb.External, 0, local),
		web("10.96.0.1:80", lb.Internal, 600, all), web("10.96.0.1:80", lb.External, 600, all),
		web("203.0.113.1:80", lb.Internal, 600, all, merged), web("203.0.113.1:80", lb.External, 0, local, merged))
	byValue := cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })
	if diff := cmp.Diff(want, set.frontends(), byValue, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error("frontends are not as wanted (-want +got):\n" + diff)
	}
	if got := set.nodePortAddrs; len(got) != 1 || got[0] != netip.MustParsePrefix("192.168.50.1/32") {
		t.Errorf("node ports answer on %v", got)
	}
}

// Only chains of kube-proxy are removed, and only rules that lead to them: not those of the kubelet and of others.
func TestWithoutChains(t *testing.T) {
	got := withoutChains(saved, nil)
	for _, wanted := range []string{
		"-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n",
		"-D FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n",
		"-D FORWARD -g KUBE-SERVICES\n", ":KUBE-SEP-1 - [0:0]\n", "-X KUBE-SEP-1\n", "-X KUBE-SERVICES\nCOMMIT\n",
	} {
		if !strings.Contains(got, wanted) {
			t.Errorf("%q is missing in:\n%s", wanted, got)
		}
	}
	for _, other := range []string{"MINE", "KUBE-FIREWALL", "\n-A ", ":FORWARD"} {
		if strings.Contains(got, other) {
			t.Errorf("%q is in:\n%s", other, got)
		}
	}
}

// Host ports of containers may be marked and masqueraded by kube-proxy's chains. Then these stay, and so do the rules.
func TestMarkUser(t *testing.T) {
	const marks = `*nat
:POSTROUTING ACCEPT [0:0]
:CNI-DN-1 - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A CNI-DN-1 -s 10.244.1.0/24 -p tcp -m tcp --dport 8080 -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
COMMIT
*filter
:KUBE-FORWARD - [0:0]
COMMIT
`
	if got := markUser(marks); got != "CNI-DN-1" {
		t.Errorf("%q marks packets, want CNI-DN-1", got)
	}
	if got := markUser(saved); got != "" {
		t.Errorf("%q marks packets, but all that do are kube-proxy's", got)
	}
	const want = "*filter\n:KUBE-FORWARD - [0:0]\n-X KUBE-FORWARD\nCOMMIT\n*nat\n:KUBE-SERVICES - [0:0]\n-X KUBE-SERVICES\nCOMMIT\n"
	if diff := cmp.Diff(want, withoutChains(marks, markChains)); diff != "" {
		t.Error("what is removed (-want +got):\n" + diff)
	}
}

// A pod is known by its address or by the device that its packets come by, as detectLocalMode says.
func TestLocalRulesOfNFTables(t *testing.T) {
	for _, test := range []struct {
		name  string
		what  expr.Any
		local bool
	}{
		{"an address", &expr.Payload{Offset: 12}, true},
		{"a device", &expr.Meta{Key: expr.MetaKeyIIFNAME}, true},
		{"a protocol", &expr.Meta{Key: expr.MetaKeyL4PROTO}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := nftReader{table: &nftables.Table{Family: nftables.TableFamilyIPv4}, ruleset: newRuleset()}
			exprs := []expr.Any{test.what, &expr.Cmp{}, &expr.Verdict{Kind: expr.VerdictGoto, Chain: "service-1"}}
			lab.Must(t, r.addRule("external-1", exprs))
			if rules := r.rules["external-1"]; len(rules) != 1 || rules[0].local != test.local {
				t.Errorf("rules are %+v, want one that is for local packets: %v", rules, test.local)
			}
		})
	}
}

// A table of which iptables-save prints nothing is not one without rules.
func TestSaveRules(t *testing.T) {
	tools := t.TempDir()
	t.Setenv("PATH", tools)
	const tool = "#!/bin/sh\necho \"# Table \\`nat' is incompatible, use 'nft' tool.\"\n"
	lab.Must(t, os.WriteFile(filepath.Join(tools, "ip6tables-nft-save"), []byte(tool), 0o700))
	if _, err := saveRules(IPTablesNFT, "6"); err == nil || !strings.Contains(err.Error(), "ip6tables-nft-save: table nat ") {
		t.Errorf("the error is %v, want one with the name of the table", err)
	}
}

func TestCompare(t *testing.T) {
	web := status.Frontend{
		Service: "shop/web:http", Address: netip.MustParseAddrPort("203.0.113.1:80"), Protocol: lb.TCP, Scope: lb.External,
		Backends: addresses("10.244.1.2:8080", "10.244.2.2:8080"), AffinitySeconds: 600,
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
	}
	empty := func(when string) status.Frontend {
		f := web
		f.Backends, f.WhenEmpty, f.AffinitySeconds, f.SourceRanges = nil, when, 0, nil

		return f
	}
	for _, test := range []struct {
		name   string
		change func(*status.Frontend)
		mode   Mode
		theirs status.Frontend
		fields string
	}{
		{"equal", func(*status.Frontend) {}, NFTables, web, ""},
		{"another backend", func(f *status.Frontend) { f.Backends = f.Backends[:1] }, NFTables, web, "backends"},
		{"another timeout of affinity", func(f *status.Frontend) { f.AffinitySeconds = 0 }, NFTables, web, "affinitySeconds"},
		{"the same addresses in other ranges", func(f *status.Frontend) {
			f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/9"), netip.MustParsePrefix("10.128.0.0/9")}
		}, NFTables, web, ""},
		{"other ranges", func(f *status.Frontend) { f.SourceRanges = nil }, NFTables, web, "sourceRanges"},
		{"another port", func(f *status.Frontend) { f.Address = netip.MustParseAddrPort("203.0.113.1:81") }, NFTables, web, "exists exists"},
		{"another Service", func(f *status.Frontend) { f.Service = "shop/other:http" }, NFTables, web, "service"},
		{"reject and drop", func(f *status.Frontend) { *f = empty("drop") }, NFTables, empty("reject"), "whenEmpty"},
		{"affinity without endpoints", func(f *status.Frontend) { *f = empty("drop"); f.AffinitySeconds = 600 }, NFTables, empty("drop"), ""},
		{"ranges without endpoints", func(f *status.Frontend) { *f = empty("drop"); f.SourceRanges = web.SourceRanges }, NFTables, empty("drop"), "sourceRanges"},
		{"ranges without endpoints, which iptables mode lacks", func(f *status.Frontend) { *f = empty("drop"); f.SourceRanges = web.SourceRanges }, IPTablesNFT, empty("drop"), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			ours := web
			test.change(&ours)
			catchAll := status.Frontend{Service: "shop/web", Address: netip.MustParseAddrPort("10.96.0.1:0")}
			var fields []string
			for _, d := range (Rules{Mode: test.mode, Frontends: []status.Frontend{test.theirs}}).Compare([]status.Frontend{catchAll, ours}) {
				fields = append(fields, d.Field)
			}
			if got := strings.Join(fields, " "); got != test.fields {
				t.Errorf("differences in %q, want %q", got, test.fields)
			}
		})
	}
}

func TestCompareNodePorts(t *testing.T) {
	node := []netip.Addr{netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("10.244.1.1")}
	both := append(node, netip.MustParseAddr("fd00:50::1"))
	v4 := status.Frontend{Address: netip.MustParseAddrPort("0.0.0.0:30080")}
	v6 := status.Frontend{Address: netip.MustParseAddrPort("[::]:30080")}
	primary := []netip.Prefix{netip.MustParsePrefix("192.168.50.1/32")}
	for _, test := range []struct {
		name            string
		theirs          Rules
		programmed, all []netip.Addr
		want            string // the addresses that differ
	}{
		{"the primary address", Rules{"", []status.Frontend{v4}, primary}, node[:1], node, ""},
		{"the primary address against all", Rules{"", []status.Frontend{v4}, primary}, node, node, "10.244.1.1 by kube-proxy: false"},
		{"all against the primary address", Rules{"", []status.Frontend{v4}, nil}, node[:1], node, "10.244.1.1 by kube-proxy: true"},
		{"a family without selected addresses", Rules{"", []status.Frontend{v4, v6}, primary}, both[:1], both, "fd00:50::1 by kube-proxy: true"},
		{"a family without node ports", Rules{"", []status.Frontend{v4}, primary}, both[:1], both, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var differing []string
			for _, d := range test.theirs.CompareNodePorts(test.programmed, test.all) {
				differing = append(differing, d.Frontend+" by kube-proxy: "+d.KubeProxy)
			}
			if got := strings.Join(differing, ", "); got != test.want {
				t.Errorf("different are %q, want %q", got, test.want)
			}
		})
	}
}

// Ranges of sets may touch, and the last one may reach to the last address, which has no end.
func TestAddRanges(t *testing.T) {
	element := func(address string, end bool) nftables.SetElement {
		return nftables.SetElement{Key: netip.MustParseAddr(address).AsSlice(), IntervalEnd: end}
	}
	var set netipx.IPSetBuilder
	addRanges(&set, []nftables.SetElement{
		element("0.0.0.0", true), element("10.0.1.0", true), element("10.0.1.0", false), element("10.0.0.0", false),
		element("10.0.1.128", true), element("224.0.0.0", false),
	})
	got, err := set.IPSet()
	lab.Must(t, err)
	var texts []string
	for _, p := range got.Prefixes() {
		texts = append(texts, p.String())
	}
	if text, want := strings.Join(texts, " "), "10.0.0.0/24 10.0.1.0/25 224.0.0.0/3"; text != want {
		t.Errorf("ranges are %s, want %s", text, want)
	}
}

// Where the image has no tools, those of the node are run, in the node's own files.
func TestFindTool(t *testing.T) {
	lab.NeedsRoot(t)
	t.Setenv("PATH", "/nonexistent")
	cmd, err := findTool([]string{"/nonexistent", "/"}, "iptables-nft-save", "--version")
	lab.Must(t, err)
	if printed, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(printed), "iptables") {
		t.Errorf("it prints %q, %v", printed, err)
	}
	if _, err := findTool([]string{"/nonexistent"}, "iptables-nft-save"); err == nil || !strings.Contains(err.Error(), "no iptables-nft-save on the PATH") {
		t.Errorf("a node without it: %v", err)
	}
}

func addresses(texts ...string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, text := range texts {
		all = append(all, netip.MustParseAddrPort(text))
	}

	return all
}

// Only datagrams that are translated, and that were sent to a Service, are forgotten: host ports of containers are not.
func TestTranslations(t *testing.T) {
	all := make(translations)
	for protocol, addresses := range map[lb.Protocol][]string{
		lb.UDP: {"10.96.0.10:53", "[fd00:96::10]:53", "0.0.0.0:30053"}, lb.TCP: {"10.96.0.11:53"},
	} {
		for _, a := range addresses {
			all.add([]status.Frontend{{Address: netip.MustParseAddrPort(a), Protocol: protocol}})
		}
	}
	for _, test := range []struct {
		name                  string
		protocol              uint8
		original, answersFrom string
		want                  bool
	}{
		{"a Service", unix.IPPROTO_UDP, "10.96.0.10:53", "10.244.1.2:53", true},
		{"a Service of IPv6", unix.IPPROTO_UDP, "[fd00:96::10]:53", "[fd00:10:244:1::2]:53", true},
		{"a node port", unix.IPPROTO_UDP, "192.168.50.1:30053", "10.244.1.2:53", true},
		{"a Service whose datagrams are not translated", unix.IPPROTO_UDP, "10.96.0.10:53", "10.96.0.10:53", false},
		{"a connection to the same port", unix.IPPROTO_TCP, "10.96.0.10:53", "10.244.1.2:53", false},
		{"a host port", unix.IPPROTO_UDP, "192.168.50.1:53", "10.244.1.2:53", false},
		{"a node port of the other family", unix.IPPROTO_UDP, "[fd00:50::1]:30053", "[fd00:10:244:1::2]:53", false},
	} {
		to, from := netip.MustParseAddrPort(test.original), netip.MustParseAddrPort(test.answersFrom)
		flow := netlink.ConntrackFlow{
			Forward: netlink.IPTuple{Protocol: test.protocol, DstIP: to.Addr().AsSlice(), DstPort: to.Port()},
			Reverse: netlink.IPTuple{Protocol: test.protocol, SrcIP: from.Addr().AsSlice(), SrcPort: from.Port()},
		}
		if got := all.MatchConntrackFlow(&flow); got != test.want {
			t.Errorf("%s: forgotten: %v, want %v", test.name, got, test.want)
		}
	}
}
