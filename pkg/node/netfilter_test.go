package node

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustReadNetfilter returns the rules that concern Services, as text.
func mustReadNetfilter(t testing.TB, ns *lab.Namespace) ([]string, Netfilter) {
	t.Helper()
	var found Netfilter
	lab.MustDo(t, ns, func() (err error) {
		found, err = ReadNetfilter()

		return err
	})
	rules := []string{}
	for _, r := range found.Rules {
		rules = append(rules, r.String())
	}

	return rules, found
}

// Rules that see packets before kube-proxy translates them, or that ask for the original
// destination, are found with what they select and do; all others are not.
func TestNetfilterRules(t *testing.T) {
	for _, test := range []struct {
		name, rules string
		want        []string
	}{
		{"nothing", "", []string{}},
		{"node ports, dropped before conntrack", `table ip t { chain c {
			type filter hook prerouting priority raw
			iifname "eth0" tcp dport 30000-32767 counter drop
		}
		}`, []string{"nftables ip t c drops packets to ports 30000-32767"}},
		{"a set of ports", `table inet t { chain c {
			type filter hook prerouting priority mangle
			udp dport { 30053, 30080 } reject
		}
		}`, []string{"nftables inet t c rejects packets to ports 30053, 30080"}},
		{"a named set of ranges", `table inet t {
			set s { type inet_service; flags interval; elements = { 30000-30010, 31000 } }
			chain c { type filter hook prerouting priority mangle; tcp dport @s drop; }
		}`, []string{"nftables inet t c drops packets to ports 30000-30010, 31000"}},
		{"an address, by way of another chain", `table ip6 t {
			chain x { ct state invalid accept; drop; }
			chain c { type filter hook prerouting priority filter; ip6 daddr fd00:10:96::/48 jump x; }
		}`, []string{"nftables ip6 t x drops packets to fd00:10:96::/48"}},
		{"a node port, by way of another chain", `table inet t {
			chain x { ip saddr 192.0.2.0/24 accept; drop; }
			chain c { type filter hook prerouting priority mangle; tcp dport 30080 goto x; }
		}`, []string{"nftables inet t x drops packets to ports 30080"}},
		{"a redirection", `table ip t { chain c {
			type nat hook prerouting priority -110
			tcp dport 30080 redirect to :8080
			tcp dport 30081 dnat to 192.0.2.1:80
		}
		}`, []string{"nftables ip t c redirects packets to ports 30080", "nftables ip t c redirects packets to ports 30081"}},
		{"part of an address", `table ip t { chain c {
			type filter hook prerouting priority raw
			ip daddr 10.96.0.0/12 meta mark set 7
		}
		}`, []string{"nftables ip t c marks packets to 10.96.0.0/12"}},
		{"all but a port", `table ip t { chain c {
			type filter hook prerouting priority raw
			tcp dport != 22 drop
		}
		}`, []string{"nftables ip t c drops packets to ports 0-65535"}},
		{"the original destination, later", `table inet t { chain c {
			type filter hook forward priority filter
			meta l4proto tcp ct original proto-dst 30080 drop
			ct original ip daddr 10.96.0.1 drop
			tcp dport 8080 drop
		}
		}`, []string{
			"nftables inet t c drops packets to ports 30080, before translation",
			"nftables inet t c drops packets to 10.96.0.1/32, before translation",
		}},
		{"at the device", `table netdev t { chain c {
			type filter hook ingress device "lo" priority filter
			tcp dport 30080 drop
		}
		}`, []string{"nftables netdev t c drops packets to ports 30080"}},
		{"a mark of the connection", `table inet t { chain c {
			type filter hook prerouting priority mangle
			iifname "eth0" fib daddr type local ct mark set 0x80
		}
		}`, []string{"nftables inet t c marks connections of packets"}},
		{"what accepts, counts, or comes after translation", `table inet t {
			chain c { type filter hook prerouting priority raw; tcp dport 30080 accept; tcp dport 30081 counter; drop; }
			chain f { type filter hook forward priority filter; tcp dport 30080 drop; }
		}`, []string{}},
		{"kube-proxy's own", `table ip kube-proxy { chain c {
			type filter hook prerouting priority raw
			tcp dport 30080 drop
		}
		}`, []string{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			lab.Must(t, ns.Netfilter(test.rules))
			rules, _ := mustReadNetfilter(t, ns)
			if diff := cmp.Diff(test.want, rules); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
		})
	}
}

// The same rules are found whichever iptables wrote them, in both families.
func TestNetfilterRulesOfIptables(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"} {
		t.Run(tool, func(t *testing.T) {
			v6 := strings.HasPrefix(tool, "ip6")
			vip, table := "10.96.0.1", map[bool]string{true: "nftables ip", false: "legacy iptables"}[strings.HasSuffix(tool, "nft")]
			bits := "/32"
			if v6 {
				vip, bits = "fd00::1", "/128"
				table = map[string]string{"nftables ip": "nftables ip6", "legacy iptables": "legacy ip6tables"}[table]
			}
			ns := lab.MustNamespace(t, "node")
			for _, command := range []string{
				"-t mangle -N limits",
				"-t mangle -A limits -p tcp -m multiport --dports 30000:30010,31000 -j DROP",
				"-t mangle -A PREROUTING -d " + vip + " -j limits",
				"-t mangle -A PREROUTING -i eth0 -m addrtype --dst-type LOCAL -j CONNMARK --set-xmark 0x80/0x80",
				"-t mangle -A PREROUTING ! -d " + vip + " -j MARK --set-mark 1",
				"-t raw -A PREROUTING -p udp --dport 30053 -j DROP",
				"-t raw -A PREROUTING -p udp --dport 30054 -j NOTRACK",
				"-t filter -A FORWARD -m conntrack --ctorigdstport 30080 -j REJECT",
				"-t filter -A FORWARD -p tcp --dport 30080 -j DROP",
				"-t nat -N KUBE-SERVICES",
				"-t nat -A KUBE-SERVICES -d " + vip + " -p tcp --dport 80 -j MARK --set-mark 1",
				"-t nat -A PREROUTING -j KUBE-SERVICES",
			} {
				mustRun(t, ns, append([]string{tool}, strings.Fields(command)...)...)
			}
			rules, found := mustReadNetfilter(t, ns)
			want := map[string]bool{
				table + " mangle limits drops packets to " + vip + bits + " to ports 30000-30010, 31000": true,
				table + " mangle PREROUTING marks connections of packets":                                true,
				table + " raw PREROUTING drops packets to ports 30053":                                   true,
				table + " filter FORWARD rejects packets to ports 30080, before translation":             true,
			}
			got := make(map[string]bool)
			for _, rule := range rules {
				got[rule] = true
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
			services := NetfilterChain{table + " nat", "KUBE-SERVICES"}
			for _, c := range found.Chains {
				if c == services {
					return
				}
			}
			t.Errorf("no chain %s among %v", services, found.Chains)
		})
	}
}

// A table of the old iptables comes into being when it is first asked for: reading asks for none.
func TestNetfilterTablesAreNotCreated(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	mustReadNetfilter(t, ns)
	r := mustReader(t, ns)
	if tables, err := r.legacyTables(); err != nil || tables != "" {
		t.Errorf("after reading: %q, %v", tables, err)
	}
}
