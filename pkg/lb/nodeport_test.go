package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestNodePortAddresses(t *testing.T) {
	local := ips("127.0.0.1", "192.168.0.2", "192.168.1.2", "10.244.1.1", "::1", "2001:db8::2", "2001:db8:1::2")
	const (
		allV4 = "192.168.0.2 192.168.1.2 10.244.1.1"
		allV6 = "2001:db8::2 2001:db8:1::2"
	)
	for _, test := range []struct {
		name    string
		list    []string
		primary []netip.Addr
		want    string
		all     string // families
	}{
		{"the node IPs by default", nil, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 2001:db8::2", ""},
		{"the node IPs as primary", []string{"primary"}, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 2001:db8::2", ""},
		{"all of a family without node IP", nil, ips("192.168.0.2"), "192.168.0.2 " + allV6, "IPv6"},
		{"all without node IPs", nil, nil, allV4 + " " + allV6, "IPv4 IPv6"},
		{"all if the node IPs are loopback", nil, ips("127.0.0.1", "::1"), allV4 + " " + allV6, "IPv4 IPv6"},
		{"none if the node IP is not the node's", nil, ips("192.0.2.1", "2001:db8:2::"), "", ""},
		{"those in the ranges", []string{"192.168.0.0/16", "2001:db8:1::/48"}, nil, "192.168.0.2 192.168.1.2 2001:db8:1::2", ""},
		{"all of a family without range", []string{"192.168.0.0/24"}, nil, "192.168.0.2 " + allV6, "IPv6"},
		{"all with a range of everything", []string{"192.168.0.0/24", "0.0.0.0/0", "2001:db8:1::/48"}, nil, allV4 + " 2001:db8:1::2", "IPv4"},
		{"never loopback", []string{"127.0.0.0/8", "::1/128"}, nil, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, err := ParseNodePortAddresses(test.list)
			if err != nil {
				t.Fatal(err)
			}
			selected := n.Select(local, &Node{PrimaryIPs: test.primary})
			if got := strings.Trim(fmt.Sprint(selected), "[]"); got != test.want {
				t.Errorf("selected %s, want %s", got, test.want)
			}
			var all []string
			for _, family := range []Family{IPv4, IPv6} {
				if n.All(family, &Node{PrimaryIPs: test.primary}) {
					all = append(all, family.String())
				}
			}
			if got := strings.Join(all, " "); got != test.all {
				t.Errorf("all are selected of %q, want %q", got, test.all)
			}
		})
	}
}

func TestParseNodePortAddresses(t *testing.T) {
	for _, test := range []struct {
		name string
		list []string
		err  string
	}{
		{"fine with ranges", []string{"10.0.0.0/8", "fd00::/8"}, ""},
		{"an error with something else", []string{"10.0.0.0/8", "10.0.0.1"}, `nodePortAddresses[1]: "10.0.0.1" is not an address range: no slash`},
		{"an error with primary and a range", []string{"primary", "10.0.0.0/8"}, `nodePortAddresses[0]: "primary" stands alone`},
		{"an error with a range and primary", []string{"10.0.0.0/8", "primary"}, `nodePortAddresses[1]: "primary" stands alone`},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, err := ParseNodePortAddresses(test.list)
			if got := errorText(err); got != test.err {
				t.Errorf("error is %q, want %q", got, test.err)
			}
			if err != nil && len(n.Prefixes) != 0 {
				t.Errorf("%v came with the error", n)
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
