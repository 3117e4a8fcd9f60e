package lab

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Profile is how the nodes of a cluster differ from the kernel's defaults. Nodes in the
// field do: their distribution, a tuning guide, a plugin or a firewall has set them up.
type Profile struct {
	Name string

	// Ruleset is loaded on each node, in the language of nft(8). It has no named
	// counters, because tests count with theirs.
	Ruleset string

	// Sysctls are settings of each node's namespace: "net/ipv4/tcp_ecn=1". All
	// kernels from 5.10 on have them, those of conntrack once a ruleset needs it.
	Sysctls []string

	// SecondUplink gives the nodes and the client a second uplink. Both lead to the
	// pods of other nodes, at equal costs.
	SecondUplink bool

	// MPTCP has servers and callers use Multipath TCP, and the client open further
	// subflows from another address. It is for whole processes, see [UseProfile].
	MPTCP bool

	// Pod gives each pod more than its device eth0.
	Pod func(*Pod) error
}

var plain = Profile{
	Name: "plain",
}

// Profiles are all that the tests know; see [UseProfile].
var Profiles = []Profile{
	plain,
	{
		// Bottlerocket, EKS and tuning guides: all ports that are not privileged, but
		// for those of the kubelet and of kube-proxy.
		Name:    "wide-ports",
		Sysctls: []string{"net/ipv4/ip_local_port_range=1024 65535", "net/ipv4/ip_local_reserved_ports=10249,10250,10256"},
	},
	{
		// Guides for servers with many connections, and AKS.
		Name:    "most-ports",
		Sysctls: []string{"net/ipv4/ip_local_port_range=1024 65000", "net/ipv4/ip_local_reserved_ports=30000-32767"},
	},
	{
		// CIS benchmarks and what follows them.
		Name: "hardened",
		Sysctls: []string{
			"net/ipv4/conf/all/rp_filter=1", "net/ipv4/conf/default/rp_filter=1",
			"net/ipv4/conf/all/accept_redirects=0", "net/ipv4/conf/default/accept_redirects=0",
			"net/ipv4/conf/all/secure_redirects=0", "net/ipv4/conf/default/secure_redirects=0",
			"net/ipv4/conf/all/send_redirects=0", "net/ipv4/conf/default/send_redirects=0",
			"net/ipv6/conf/all/accept_redirects=0", "net/ipv6/conf/default/accept_redirects=0",
			"net/ipv4/tcp_timestamps=0", "net/ipv4/tcp_rfc1337=1", "net/ipv4/tcp_syncookies=2",
		},
	},
	{
		// systemd, tuned, and load balancers' guides: LVS, MetalLB, keepalived.
		Name: "tuned",
		Sysctls: []string{
			"net/ipv4/conf/all/rp_filter=2", "net/ipv4/conf/default/rp_filter=2",
			"net/ipv4/conf/all/arp_ignore=1", "net/ipv4/conf/all/arp_announce=2",
			"net/ipv4/ip_nonlocal_bind=1", "net/ipv6/ip_nonlocal_bind=1",
			"net/ipv4/fib_multipath_hash_policy=1", "net/ipv6/fib_multipath_hash_policy=1",
			"net/ipv4/tcp_tw_reuse=1", "net/ipv4/tcp_fin_timeout=10", "net/ipv4/tcp_ecn=1",
			"net/ipv4/tcp_mtu_probing=1", "net/ipv4/tcp_fastopen=3", "net/ipv4/ip_early_demux=0",
		},
	},
	{
		// A plugin that tracks all connections and masquerades what pods send to the world,
		// with conntrack as kube-proxy and others set it for clouds that lose order.
		Name: "cni",
		Sysctls: []string{
			"net/netfilter/nf_conntrack_tcp_be_liberal=1", "net/netfilter/nf_conntrack_tcp_loose=1",
			"net/netfilter/nf_conntrack_tcp_timeout_close_wait=3600",
			"net/ipv4/conf/all/src_valid_mark=1", "net/ipv4/conf/all/route_localnet=1",
		},
		Ruleset: `
			table inet plugin {
				chain prerouting {
					type filter hook prerouting priority mangle
					meta mark set ct mark
				}
				chain forward {
					type filter hook forward priority filter
					ip saddr 10.244.0.0/16 accept
					ip daddr 10.244.0.0/16 accept
				}
				chain postrouting {
					type nat hook postrouting priority srcnat
					ip saddr 10.244.0.0/16 ip daddr != { 10.244.0.0/16, 192.168.50.0/23, 224.0.0.0/4 } masquerade fully-random
					ip6 saddr fd00:10:244::/48 ip6 daddr != { fd00:10:244::/48, fd00:50::/31, ff00::/8 } masquerade fully-random
				}
			}`,
	},
	{
		// ufw, firewalld: the ports that Kubernetes' documentation lists, and what pods and
		// nodes send to each other. What is refused is refused as by a host without a firewall.
		Name:    "firewall",
		Sysctls: []string{"net/netfilter/nf_conntrack_tcp_loose=0"},
		Ruleset: `
			table inet firewall {
				chain input {
					type filter hook input priority filter; policy drop
					ct state established,related accept
					ct state invalid drop
					iifname { "lo", "br0", "pod*" } accept
					meta l4proto { icmp, ipv6-icmp } accept
					tcp dport { 8080, 10249, 10250, 10256, 30000-32767 } accept
					udp dport { 8080, 8472, 30000-32767 } accept
					meta l4proto tcp reject with tcp reset
					reject
				}
				chain forward {
					type filter hook forward priority filter; policy drop
					ct state established,related accept
					ct state invalid drop
					ip saddr { 10.244.0.0/16, 192.168.50.0/24 } accept
					ip daddr { 10.244.0.0/16, 192.168.50.0/24 } accept
					ip6 saddr { fd00:10:244::/48, fd00:50::/64 } accept
					ip6 daddr { fd00:10:244::/48, fd00:50::/64 } accept
				}
			}`,
	},
	{
		// Nodes with two uplinks, whose flows are spread by their ports.
		Name: "two-uplinks",
		Sysctls: []string{
			"net/ipv4/conf/all/rp_filter=2", "net/ipv4/conf/default/rp_filter=2",
			"net/ipv4/fib_multipath_hash_policy=1", "net/ipv6/fib_multipath_hash_policy=1",
		},
		SecondUplink: true,
	},
	{
		// Go's servers accept it by default, and mptcpize has any program use it.
		Name:  "mptcp",
		MPTCP: true,
	},
	{
		// Multus: pods have a device in a network that is not the cluster's.
		Name:         "second-interface",
		SecondUplink: true,
		Pod:          (*Pod).addSecondInterface,
	},
	{
		// Clusters in pods, such as kind's and k3s's, and builds in pods: they masquerade
		// what leaves the pod.
		Name: "nested-cluster",
		Pod: func(p *Pod) error {
			return errors.Join(p.addBehind(), p.Netfilter(`
				table inet nested {
					chain postrouting {
						type nat hook postrouting priority srcnat
						iifname "behind" oifname "eth0" masquerade
					}
				}`))
		},
	},
	{
		// VPNs and gateways in pods: their node has routes to who is behind, other nodes
		// have none.
		Name: "gateway-pod",
		Pod:  func(p *Pod) error { return errors.Join(p.addBehind(), p.leadBehind()) },
	},
}

// profileVariable names the profile of a run, whatever the packages ask for.
const profileVariable = "SLUICE_TEST_PROFILE"

var processProfile = plain

// UseProfile has the nodes of all clusters of this process be of a profile: the one that
// SLUICE_TEST_PROFILE names or else this one. It is called in TestMain, after [Main].
func UseProfile(name string) {
	var err error
	if processProfile, err = profileNamed(cmp.Or(os.Getenv(profileVariable), name)); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
	fmt.Println("profile:", processProfile.Name)
}

// profileNamed returns that of the process for no name.
func profileNamed(name string) (Profile, error) {
	if name == "" {
		return processProfile, nil
	}
	i := slices.IndexFunc(Profiles, func(p Profile) bool { return p.Name == name })
	if i < 0 {
		return Profile{}, fmt.Errorf("no profile is called %q, see test/lab/profile.go", name)
	}

	return Profiles[i], nil
}

// Apply makes a namespace like a node of the profile.
func (p Profile) Apply(ns *Namespace) error {
	if p.Ruleset != "" {
		if err := ns.Netfilter(p.Ruleset); err != nil {
			return fmt.Errorf("profile %s: %w", p.Name, err)
		}
	}

	return p.set(ns, p.Sysctls)
}

// ApplySysctls gives a namespace the settings that nodes of this process' profile have. It is for
// a node that a test builds itself, of which the rules and devices of the profile know
// nothing; settings of conntrack need such rules.
func ApplySysctls(ns *Namespace) error {
	return processProfile.set(ns, slices.DeleteFunc(slices.Clone(processProfile.Sysctls), func(sysctl string) bool {
		return strings.HasPrefix(sysctl, "net/netfilter/")
	}))
}

func (p Profile) set(ns *Namespace, sysctls []string) error {
	for _, sysctl := range sysctls {
		name, value, _ := strings.Cut(sysctl, "=")
		if err := ns.Sysctl(name, value); err != nil {
			return fmt.Errorf("profile %s: %w", p.Name, err)
		}
	}

	return nil
}
