package config

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/lb"
)

func TestCheckNode(t *testing.T) {
	both := []lb.Family{lb.IPv4, lb.IPv6}
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, test := range []struct {
		name     string
		fields   string
		families []lb.Family
		ips      []netip.Addr
		podCIDRs string
		warning  string // the one that there is
		err      string
	}{
		{"fine with both families", "nodePortAddresses: [primary]\nclusterCIDR: 10.0.0.0/8,fd00::/8", both, []netip.Addr{v4, v6}, "", "", ""},
		{"fine with the second family first", "nodePortAddresses: [primary]\nclusterCIDR: fd00::/8,10.0.0.0/8", both, []netip.Addr{v4, v6}, "", "", ""},
		{"a warning without nodePortAddresses", "", both, []netip.Addr{v4}, "", `nodePortAddresses is not set: all addresses of the node have node ports; consider "primary"`, ""},
		{"a warning if the primary addresses are not known", "nodePortAddresses: [primary]", both, nil, "", `nodePortAddresses is not set: all addresses of the node have node ports; consider "primary"`, ""},
		{"fine with a word for both families", "nodePortAddresses: [localhost]\nclusterCIDR: 10.0.0.0/8,fd00::/8", both, []netip.Addr{v4}, "", "", ""},
		{"fine with primary beside it, whose addresses are not known", "nodePortAddresses: [primary, localhost]", both, nil, "", "", ""},
		{"fine with primary beside a range of the other family", `nodePortAddresses: ["fd00::/8", primary]` + "\nclusterCIDR: 10.0.0.0/8,fd00::/8", both, []netip.Addr{v4}, "", "", ""},
		{"a warning if localhost is named and switched off", "nodePortAddresses: [primary, localhost]\niptables: {localhostNodePorts: false}", both, []netip.Addr{v4, v6}, "", "nodePortAddresses [primary localhost] has loopback addresses, and iptables.localhostNodePorts is false: node ports do not answer there", ""},
		{"a warning so with a range", `nodePortAddresses: [all, 127.0.0.1/32]` + "\niptables: {localhostNodePorts: false}", both, []netip.Addr{v4, v6}, "", "nodePortAddresses [all 127.0.0.1/32] has loopback addresses, and iptables.localhostNodePorts is false: node ports do not answer there", ""},
		{"fine if all addresses are, and localhost is switched off", "nodePortAddresses: [all]\niptables: {localhostNodePorts: false}", both, []netip.Addr{v4, v6}, "", "", ""},
		{"a warning if node ports have one family of a cluster of two", "nodePortAddresses: [192.0.2.0/24]\nclusterCIDR: 10.0.0.0/8,fd00::/8", both, []netip.Addr{v4, v6}, "", "nodePortAddresses has no IPv6 addresses, and the cluster seems to have both families: of IPv6, all addresses of the node have node ports", ""},
		{"a warning so, by the pods' ranges", "nodePortAddresses: [192.0.2.0/24]\ndetectLocalMode: NodeCIDR", both, []netip.Addr{v4, v6}, "10.0.0.0/24,fd00::/64", "nodePortAddresses has no IPv6 addresses, and the cluster seems to have both families: of IPv6, all addresses of the node have node ports", ""},
		{"fine so in a cluster of one", "nodePortAddresses: [192.0.2.0/24]\nclusterCIDR: 10.0.0.0/8", both, []netip.Addr{v4, v6}, "", "", ""},
		{"a warning if node ports have the other family only", `nodePortAddresses: ["2001:db8::/32"]`, both, []netip.Addr{v4, v6}, "", "nodePortAddresses has only IPv6 addresses: of IPv4, all addresses of the node have node ports", ""},
		{"a warning if cluster CIDRs have the other family only", "nodePortAddresses: [primary]\nclusterCIDR: fd00::/8", both, []netip.Addr{v4, v6}, "", "clusterCIDR fd00::/8 has only IPv6 addresses, and the node's primary address is of IPv4", ""},
		{"an error so on a node of one family", "nodePortAddresses: [primary]\nclusterCIDR: fd00::/8", both[:1], []netip.Addr{v4}, "", "", "clusterCIDR fd00::/8 has only IPv6 addresses, and the node's primary address is of IPv4; detectLocalMode ClusterCIDR needs one of these"},
		{"a warning so, if another mode detects pods", "nodePortAddresses: [primary]\nclusterCIDR: fd00::/8\ndetectLocalMode: NodeCIDR", both[:1], []netip.Addr{v4}, "", "clusterCIDR fd00::/8 has only IPv6 addresses, and the node's primary address is of IPv4", ""},
		{"an error if podCIDRs have the other family only", "nodePortAddresses: [primary]\ndetectLocalMode: NodeCIDR", both, []netip.Addr{v6, v4}, "10.0.0.0/24", "", "the Node's podCIDRs [10.0.0.0/24] have only IPv4 addresses, and its primary address is of IPv6; detectLocalMode NodeCIDR needs one of these"},
		{"fine so, if another mode detects pods", "nodePortAddresses: [primary]", both, []netip.Addr{v6, v4}, "10.0.0.0/24", "", ""},
		{"a warning if it listens in a family that there is not", "nodePortAddresses: [primary]\nhealthzBindAddress: '[2001:db8::1]:1'", both[:1], []netip.Addr{v4}, "", "healthzBindAddress [2001:db8::1]:1 is of IPv6, which the kernel does not have", ""},
		{"a warning so for metrics", "nodePortAddresses: [primary]\nmetricsBindAddress: '[::1]:1'", both[:1], []netip.Addr{v4}, "", "metricsBindAddress [::1]:1 is of IPv6, which the kernel does not have", ""},
		{"fine if it listens everywhere", "nodePortAddresses: [primary]\nhealthzBindAddress: '[::]:1'", both[:1], []netip.Addr{v4}, "", "", ""},
		{"fine if it listens in the second family", "nodePortAddresses: [primary]\nhealthzBindAddress: '[2001:db8::1]:1'", both, []netip.Addr{v4}, "", "", ""},
		{"an error if the primary family is not there", "nodePortAddresses: [primary]", both[:1], []netip.Addr{v6}, "", "", "the node's primary address is of IPv6, which the kernel does not have"},
	} {
		t.Run(test.name, func(t *testing.T) {
			primary := lb.IPv4
			if len(test.ips) > 0 {
				primary = lb.FamilyOf(test.ips[0])
			}
			node := Node{Families: test.families, Primary: primary, IPs: test.ips}
			if test.podCIDRs != "" {
				node.PodCIDRs = parsePrefixes(strings.Split(test.podCIDRs, ","))
			}
			warnings, err := CheckNode(mustDecode(t, test.fields), node)
			if got := errorText(err); got != test.err {
				t.Errorf("error is %q, want %q", got, test.err)
			}
			switch {
			case test.warning == "" && len(warnings) > 0, test.warning != "" && (len(warnings) != 1 || warnings[0] != test.warning):
				t.Errorf("warnings are %q, want %q", warnings, test.warning)
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}

	return err.Error()
}
