package doctor

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

// healthy is a node on which nothing stands in the way of Sluice, before it is installed.
func healthy() Node {
	return Node{
		Kernel: Fact[Kernel]{Value: Kernel{"6.12.48+deb13-amd64", Version{6, 12}}},
		Features: Fact[datapath.Features]{Value: datapath.Features{
			SetRetval: true, NetnsCookie: 1, TCX: true, Tracing: true, FIBSource: true, FIBMTU: true, ChecksumIPv6: true, Conntrack: true,
		}},
		JIT:     Fact[int]{Value: 1},
		Memlock: Fact[uint64]{Value: 8 << 20},
		Memory:  Fact[node.Memory]{Value: node.Memory{Free: 2 << 30}},
		Files:   Fact[uint64]{Value: 1 << 20},
		Process: Fact[Process]{Value: Process{Capabilities: 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_ADMIN}},
		Cgroup:  Fact[datapath.Cgroup]{Value: datapath.Cgroup{Path: "/sys/fs/cgroup", Relative: "/", WholeMachine: true}},
		Config:  Config{BPFRoot: "/sys/fs/bpf/sluice", FlowMemory: 64 << 20, Model: node.ModelConfig{NodeName: "node-1"}},
		State: Fact[node.State]{Value: node.State{
			Addresses: []node.Address{{Addr: netip.MustParseAddr("127.0.0.1"), IfIndex: 1, IsLoopback: true}, {Addr: netip.MustParseAddr("192.168.50.1"), IfIndex: 2}},
		}},
		Agent: Fact[status.Status]{Err: status.ErrNotRunning},

		AllProcesses: true,
		Devices: Fact[[]Device]{Value: []Device{
			device(1, "lo", "", node.ClassNone, 65536), uplink(2, "eth0"),
			device(3, "flannel.1", "vxlan", node.ClassUplink, 1450), device(4, "veth1a", "veth", node.ClassPods, 1450),
		}},
		Addresses:  []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.50.1")},
		IPForward:  Fact[Forwarding]{Value: Forwarding{V4: true}},
		Ephemeral:  Fact[[]bpf.PortRange]{Value: []bpf.PortRange{{Low: 32768, High: 60999}}},
		Masquerade: Fact[node.MasqueradePorts]{Value: node.MasqueradePorts{Ranges: []bpf.PortRange{{Low: 1024, High: 29999}, {Low: 61000, High: 65535}}}},
		APIServer: Fact[APIServer]{Value: APIServer{
			URL: "https://192.168.50.10:6443", Status: 200, ServiceIPs: []string{"10.96.0.1"},
			ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:96::/112")},
			CIDRStatus:   200, PodCIDRs: []PodCIDR{{"node-1", netip.MustParsePrefix("10.244.1.0/24")}},
			SelfStatus: 200, SelfIPs: []netip.Addr{netip.MustParseAddr("192.168.50.1")}, SelfPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		}},
		Routes: Fact[[]node.Route]{Value: []node.Route{
			route("0.0.0.0/0", "eth0"), route("10.0.0.0/8", "eth0"), route("192.168.50.0/24", "eth0"), route("::/0", "eth0"),
		}},
		Namespaces: Fact[[]Namespace]{Value: []Namespace{{
			Routes: []node.Route{route("0.0.0.0/0", "eth0"), route("10.0.0.0/8", "eth0"), route("10.244.1.0/24", "eth0")},
		}}},
	}
}

func route(to, device string) node.Route {
	return node.Route{To: netip.MustParsePrefix(to), Device: device}
}

func device(index int, name, kind string, class node.Class, mtu int) Device {
	return Device{Decision: node.Decision{
		Device: node.Device{Index: index, Name: name, Kind: kind, IsUp: true}, Class: class, Reason: "as it looks",
	}, MTU: mtu}
}

func uplink(index int, name string) Device {
	d := device(index, name, "", node.ClassUplink, 1500)
	d.Network = netip.MustParsePrefix("192.168.50.1/24")

	return d
}

func rules(of ...node.NetfilterRule) Fact[node.Netfilter] {
	return Fact[node.Netfilter]{Value: node.Netfilter{Rules: of}}
}

func foreign(of ...datapath.Foreign) Fact[[]datapath.Foreign] {
	return Fact[[]datapath.Foreign]{Value: of}
}

// certificateError is what a TLS client returns.
func certificateError(err error) error {
	return &tls.CertificateVerificationError{Err: err}
}

// selects returns a rule of the chain prerouting.
func selects(match node.Match, does string) node.NetfilterRule {
	return node.NetfilterRule{NetfilterChain: prerouting, Match: match, Does: does}
}

var (
	prerouting = node.NetfilterChain{Table: "nftables ip raw", Name: "PREROUTING"}
	nodePort   = node.Match{Ports: []bpf.PortRange{{Low: 30080, High: 30080}}}
)

// unclear lets a probe fail.
func unclear(n *Node, err error) {
	n.Features.Value.SetRetval, n.Features.Value.Unclear = false, []error{fmt.Errorf("probe of bpf_set_retval: %w", err)}
}

// patients are nodes that are healthy but for one thing, with the check that has to find it.
var patients = []struct {
	check, name string
	fall        func(*Node)
}{
	{"kernel", "too old", func(n *Node) { n.Kernel.Value = Kernel{"4.19.0-26-amd64", Version{4, 19}} }},
	{"kernel", "without newer features", func(n *Node) { n.Features.Value.TCX, n.Features.Value.SetRetval = false, false }},
	{"kernel", "not probed without root", func(n *Node) { unclear(n, unix.EPERM) }},
	{"kernel", "with a probe that gives no answer", func(n *Node) { unclear(n, unix.E2BIG) }},
	{"kernel", "in a time namespace", func(n *Node) { n.Features.Err = datapath.ErrOtherClock }},
	{"btf", "a kernel without", func(n *Node) { n.Features.Err = datapath.ErrNoBTF }},
	{"jit", "off", func(n *Node) { n.JIT.Value = 0 }},
	{"jit", "for debugging", func(n *Node) { n.JIT.Value = 2 }},
	{"capabilities", "none", func(n *Node) { n.Process.Value.Capabilities = 0 }},
	{"seccomp", "which forbids bpf", func(n *Node) {
		n.Process.Value.Seccomp = 2
		unclear(n, unix.EPERM)
	}},
	{"seccomp", "which allows bpf", func(n *Node) { n.Process.Value.Seccomp = 2 }},
	{"memlock", "limited on 5.10", func(n *Node) { n.Kernel.Value = Kernel{"5.10.0-36-amd64", Version{5, 10}} }},
	{"memlock", "may be lifted on 5.10", func(n *Node) {
		n.Kernel.Value = Kernel{"5.10.0-36-amd64", Version{5, 10}}
		n.Process.Value.Capabilities |= 1 << unix.CAP_SYS_RESOURCE
	}},
	{"memory", "too little", func(n *Node) { n.Memory.Value.Free = 100 << 20 }},
	{"memory", "limited to too little", func(n *Node) {
		n.Memory.Value = node.Memory{Free: 120 << 20, Limit: 128 << 20, LimitedBy: "/sys/fs/cgroup/kubepods/memory.max"}
	}},
	{"memory", "too little, with some maps of an earlier agent", func(n *Node) {
		n.Memory.Value.Free, n.Pins.Value.Folders = 100<<20, []string{"/sys/fs/bpf/sluice/v3"}
	}},
	{"memory", "little, with all maps of an earlier agent", func(n *Node) {
		n.Memory.Value.Free, n.Pins.Value = 100<<20, Pins{Folders: []string{"/sys/fs/bpf/sluice/v3"}, Complete: true}
	}},
	{"descriptors", "few", func(n *Node) { n.Files.Value = 400 }},
	{"cgroup", "version 1 only", func(n *Node) { n.Cgroup.Err = datapath.ErrNoCgroup2 }},
	{"cgroup", "hybrid", func(n *Node) { n.CgroupV1 = true }},
	{"cgroup", "of a container", func(n *Node) { n.Cgroup.Value = datapath.Cgroup{Path: "/sys/fs/cgroup", Relative: "/"} }},
	{"cgroup", "none at --cgroup-root", func(n *Node) { n.Cgroup.Err = errors.New(`cgroup "/tmp": not on a cgroup2 file system`) }},
	{"bpffs", "not mounted", func(n *Node) {
		n.BPFFS = errors.New(`bpf root "/sys/fs/bpf/sluice": not on a bpf file system (mount -t bpf bpf /sys/fs/bpf)`)
	}},
	{"pins", "of another layout", func(n *Node) {
		n.Pins.Value = Pins{Folders: []string{"/sys/fs/bpf/sluice/v1"}, Others: []string{"/sys/fs/bpf/sluice/v1"}}
	}},
	{"pins", "of another bpf root in charge", func(n *Node) {
		n.Others.Value = []datapath.Other{{BPFRoot: "/sys/fs/bpf/former", Hooks: []string{"connect4", "eth0 ingress"}, Links: []uint32{7, 8}}}
	}},
	{"pins", "which cannot be read", func(n *Node) {
		n.Pins.Value = Pins{Folders: []string{"/sys/fs/bpf/sluice/v3"}, Unreadable: maps.ErrStale}
	}},
	{"cgroup-hooks", "one that excludes others", func(n *Node) {
		n.CgroupPrograms = foreign(datapath.Foreign{Hook: "connect4", Program: "policy", Excludes: true})
	}},
	{"cgroup-hooks", "one that decides", func(n *Node) { n.CgroupPrograms = foreign(datapath.Foreign{Hook: "sendmsg6", Program: "policy"}) }},
	{"cgroup-hooks", "one that watches", func(n *Node) { n.CgroupPrograms = foreign(datapath.Foreign{Hook: "sock_ops", Program: "observe"}) }},
	{"device-hooks", "no uplink", func(n *Node) { n.Devices.Value = n.Devices.Value[:1] }},
	{"device-hooks", "one that ends the chain, as the agent has seen", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{Version: "v1", Devices: []datapath.DeviceState{{
			Name: "eth0", Problem: "ingress: packets pass that the program of Sluice does not see: what runs before it ends the chain (ends_chain)",
		}}}}
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "ends_chain", Ahead: true})
	}},
	{"device-hooks", "one ahead, without an agent", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "ends_chain", Ahead: true})
	}},
	{"device-hooks", "XDP", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 xdp", Program: "lb", Ahead: true})
	}},
	{"device-hooks", "the qdisc ingress, before tcx", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "qdisc ingress", Excludes: true})
		n.Config.Attachment = datapath.Clsact
	}},
	{"device-hooks", "the qdisc ingress at a pod's device, before tcx, as an agent sees it as well", func(n *Node) {
		n.Config.Attachment = datapath.Clsact
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "veth1a ingress", Program: "qdisc ingress", Excludes: true})
		n.Agent = Fact[status.Status]{Value: status.Status{Version: "v1", Devices: []datapath.DeviceState{
			{Name: "veth1a", Class: "pods", Problem: "egress: there is a qdisc ingress, which leaves no room for clsact"},
		}}}
	}},
	{"device-hooks", "the qdisc ingress, beside tcx", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "qdisc ingress", Excludes: true})
	}},
	{"device-hooks", "one behind ours at the ingress of an uplink", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "firewall"})
	}},
	{"device-hooks", "one behind ours, where all passes the stack", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 ingress", Program: "firewall"})
		n.Config.ThroughStack = true
	}},
	{"device-hooks", "one before ours at egress, where ours is the last", func(n *Node) {
		n.DevicePrograms = foreign(datapath.Foreign{Hook: "eth0 egress", Program: "shaper", Ahead: true})
	}},
	{"kube-proxy", "runs", func(n *Node) {
		n.Processes.Value = map[string][]int{"kube-proxy": {4711}}
		n.Netfilter.Value.Chains = []node.NetfilterChain{
			{Table: "nftables ip kube-proxy", Name: "services"}, {Table: "nftables ip kube-proxy", Name: "nat-prerouting"},
		}
	}},
	{"kube-proxy", "has left rules", func(n *Node) {
		n.Netfilter.Value.Chains = []node.NetfilterChain{{Table: "legacy iptables nat", Name: "KUBE-SERVICES"}, {Table: "nftables ip6 nat", Name: "KUBE-SERVICES"}}
	}},
	{"kube-proxy", "only the kubelet's chains", func(n *Node) {
		n.Netfilter.Value.Chains = []node.NetfilterChain{{Table: "nftables ip mangle", Name: "KUBE-KUBELET-CANARY"}}
	}},
	{"kube-proxy", "in another PID namespace", func(n *Node) { n.AllProcesses = false }},
	{"kube-proxy", "not looked at without root", func(n *Node) { n.Netfilter.Err = fmt.Errorf("nftables: %w", unix.EPERM) }},
	{"ipvs", "left", func(n *Node) {
		n.IPVS.Value, n.Devices.Value = 3, append(n.Devices.Value, device(9, "kube-ipvs0", "dummy", node.ClassNone, 1500))
	}},
	{"cilium", "in kube-proxy's place", func(n *Node) {
		n.CgroupPrograms = foreign(datapath.Foreign{Hook: "connect4", Program: "cil_sock4_conne"})
	}},
	{"cilium", "as the CNI", func(n *Node) {
		n.Processes.Value = map[string][]int{"cilium-agent": {99}}
		n.Devices.Value = append(n.Devices.Value, device(9, "cilium_host", "veth", node.ClassNone, 1500))
	}},
	{"cilium", "removed", func(n *Node) { n.CiliumPins = []string{"/sys/fs/bpf/tc/globals/cilium_lb4_services_v2"} }},
	{"calico", "with its eBPF dataplane", func(n *Node) {
		n.Devices.Value = append(n.Devices.Value, device(9, "bpfin.cali", "veth", node.ClassNone, 1500))
	}},
	{"calico", "with iptables", func(n *Node) {
		n.Devices.Value = append(n.Devices.Value, device(9, "cali12345", "veth", node.ClassPods, 1450))
	}},
	{"mesh", "with pods that opt out, and others", func(n *Node) {
		n.Agent.Value.OptedOut = []status.OptedOutPod{{UID: "a"}}
		for _, uid := range []string{"a", "b", ""} {
			n.Namespaces.Value = append(n.Namespaces.Value, Namespace{Namespace: node.Namespace{Inode: 7, PodUID: uid, Mesh: "nftables ip nat ISTIO_OUTPUT"}})
		}
		n.Namespaces.Value[2].Pod = "shop/web-1"
	}},
	{"mesh", "of which no pod opts out", func(n *Node) {
		n.Namespaces.Value = append(n.Namespaces.Value, Namespace{Namespace: node.Namespace{Inode: 7, Mesh: "iptables nat PROXY_INIT_OUTPUT"}})
	}},
	{"mesh", "all opted out", func(n *Node) {
		n.Agent.Value.OptedOut = []status.OptedOutPod{{UID: "a"}}
		n.Namespaces.Value = append(n.Namespaces.Value, Namespace{Namespace: node.Namespace{PodUID: "a", Mesh: "iptables nat ISTIO_OUTPUT"}})
	}},
	{"node-port-firewall", "a node port", func(n *Node) { n.Netfilter = rules(selects(nodePort, "drops")) }},
	{"node-port-firewall", "an address that the node does not have", func(n *Node) {
		n.Netfilter = rules(selects(node.Match{Destination: netip.MustParsePrefix("192.0.2.7/32"), Ports: []bpf.PortRange{{Low: 80, High: 80}}}, "rejects"))
	}},
	{"node-port-firewall", "the original port", func(n *Node) {
		n.Netfilter = rules(selects(node.Match{Original: true, Ports: []bpf.PortRange{{Low: 80, High: 80}}}, "drops"))
	}},
	{"node-port-firewall", "four of them", func(n *Node) {
		r := selects(nodePort, "drops")
		n.Netfilter = rules(r, r, r, r)
	}},
	{"node-port-firewall", "the address of a container, as Docker drops what comes from outside, and a node port", func(n *Node) {
		docker := device(9, "docker0", "bridge", node.ClassNone, 1500)
		docker.Network = netip.MustParsePrefix("172.17.0.1/16")
		n.Devices.Value = append(n.Devices.Value, docker)
		n.Netfilter = rules(selects(node.Match{Destination: netip.MustParsePrefix("172.17.0.2/32")}, "drops"), selects(nodePort, "drops"))
	}},
	{"node-port-firewall", "ssh, the node's own address, multicast", func(n *Node) {
		ssh := []bpf.PortRange{{Low: 22, High: 22}}
		n.Netfilter = rules(
			selects(node.Match{Ports: ssh}, "drops"),
			selects(node.Match{Ports: ssh, Destination: netip.MustParsePrefix("192.168.50.1/32")}, "drops"),
			selects(node.Match{Destination: netip.MustParsePrefix("224.0.0.0/4")}, "drops"),
		)
	}},
	{"node-port-firewall", "marks of connections, which have a check of their own", func(n *Node) {
		n.Netfilter = rules(selects(nodePort, node.MarksConnections))
	}},
	{"connection-marks", "of a VPC CNI", func(n *Node) {
		n.Netfilter, n.MarkRules.Value = rules(selects(node.Match{}, node.MarksConnections)), []int{1024}
	}},
	{"connection-marks", "on which no route depends", func(n *Node) {
		n.Netfilter = rules(selects(node.Match{}, node.MarksConnections))
	}},
	{"connection-marks", "of packets, for routes", func(n *Node) { n.MarkRules.Value = []int{32764} }},
	{"ipsec", "with policies", func(n *Node) { n.IPsecPolicies.Value = 4 }},
	{"ipsec", "with policies, through the stack", func(n *Node) { n.IPsecPolicies.Value, n.Config.ThroughStack = 4, true }},
	{"ip-forward", "off", func(n *Node) { n.IPForward.Value.V4 = false }},
	{"ip-forward", "off for devices", func(n *Node) {
		for i := range n.Devices.Value {
			n.Devices.Value[i].NotForwarding = i == 0 || i == 1
		}
	}},
	{"forward-firewall", "with a policy", func(n *Node) {
		at := node.NetfilterChain{Table: "nftables ip filter", Name: "FORWARD"}
		n.Netfilter = Fact[node.Netfilter]{Value: node.Netfilter{Drops: []node.NetfilterRule{
			{NetfilterChain: at, Does: "by its policy drops"}, {NetfilterChain: at, Match: nodePort, Does: "drops"},
		}}}
	}},
	{"ip-forward", "off for IPv6", func(n *Node) { n.Addresses = append(n.Addresses, netip.MustParseAddr("fd00:50::1")) }},
	{"rp-filter", "strict on the only uplink", func(n *Node) { n.Devices.Value[1].RPFilter = 1 }},
	{"rp-filter", "strict on one of two", func(n *Node) {
		n.Devices.Value = append(n.Devices.Value, uplink(9, "eth1"))
		n.Devices.Value[4].RPFilter = 1
	}},
	{"ports", "of sockets among node ports", func(n *Node) { n.Ephemeral.Value = []bpf.PortRange{{Low: 10000, High: 65535}} }},
	{"ports", "few to masquerade with", func(n *Node) { n.Masquerade.Value.Ranges = []bpf.PortRange{{Low: 65000, High: 65535}} }},
	{"ports", "to masquerade with, which sockets get as well", func(n *Node) { n.Masquerade.Value.Ephemeral = true }},
	{"ports", "to masquerade with, which are reserved", func(n *Node) { n.Masquerade.Value.Ephemeral, n.Masquerade.Value.Reserved = true, true }},
	{"mtu", "of a tunnel too large", func(n *Node) { n.Devices.Value[2].MTU = 1500 }},
	{"mtu", "of pods too large for the tunnel", func(n *Node) { n.Devices.Value[3].MTU = 1500 }},
	{"mtu", "small on an uplink without a gateway", func(n *Node) {
		n.Devices.Value[1].Gateway = netip.MustParseAddr("192.168.50.254")
		n.Devices.Value = append(n.Devices.Value, uplink(9, "eth1"))
		n.Devices.Value[4].MTU = 1400
	}},
	{"mtu", "without an uplink", func(n *Node) { n.Devices.Value = n.Devices.Value[:1] }},
	{"api-server", "not given", func(n *Node) { n.APIServer = Fact[APIServer]{Err: errNotConfigured} }},
	{"api-server", "a kubeconfig that is not there", func(n *Node) {
		n.APIServer = Fact[APIServer]{Err: errors.New(`kubeconfig "/etc/none", --master "": no such file`)}
	}},
	{"api-server", "not reached", func(n *Node) {
		n.APIServer.Err = &net.OpError{Op: "dial", Net: "tcp", Err: unix.ECONNREFUSED}
	}},
	{"api-server", "of another authority", func(n *Node) { n.APIServer.Err = certificateError(x509.UnknownAuthorityError{}) }},
	{"api-server", "of another name", func(n *Node) {
		n.APIServer.Err = certificateError(x509.HostnameError{
			Host: "192.168.50.10", Certificate: &x509.Certificate{DNSNames: []string{"kubernetes"}, IPAddresses: []net.IP{net.IPv4(10, 96, 0, 1)}},
		})
	}},
	{"api-server", "with an expired certificate", func(n *Node) {
		day := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		n.APIServer.Err = certificateError(x509.CertificateInvalidError{
			Reason: x509.Expired, Cert: &x509.Certificate{NotBefore: day, NotAfter: day.AddDate(0, 1, 0)},
		})
	}},
	{"api-server", "an expired token", func(n *Node) { n.APIServer.Value.Status = 401 }},
	{"api-server", "not ready", func(n *Node) { n.APIServer.Value.Status = 503 }},
	{"api-server", "which may not list Services", func(n *Node) { n.APIServer.Value = APIServer{URL: "https://192.168.50.10:6443", Status: 403} }},
	{"api-server", "by its ClusterIP", func(n *Node) { n.APIServer.Value.URL = "https://10.96.0.1:443" }},
	{"api-server", "by its Service's name", func(n *Node) { n.APIServer.Value.URL = "https://kubernetes.default.svc" }},
	{"service-cidrs", "with hosts and pods inside", func(n *Node) {
		n.Routes.Value = append(n.Routes.Value, route("10.100.0.0/16", "docker0"))
		n.APIServer.Value.PodCIDRs = []PodCIDR{{"node-2", netip.MustParsePrefix("10.96.0.0/11")}}
	}},
	{"service-cidrs", "with a VPN in a pod", func(n *Node) {
		n.Namespaces.Value = append(n.Namespaces.Value, Namespace{
			Namespace: node.Namespace{PodUID: "b"}, Routes: []node.Route{route("0.0.0.0/0", "eth0"), route("0.0.0.0/1", "tun0"), route("fd00::/16", "net1")},
		})
	}},
	{"service-cidrs", "without ServiceCIDRs", func(n *Node) { n.APIServer.Value.ServiceCIDRs = nil }},
	{"service-cidrs", "that may not be listed", func(n *Node) { n.APIServer.Value.CIDRStatus = 403 }},
	{"service-cidrs", "without an API server", func(n *Node) { n.APIServer.Err = unix.ECONNREFUSED }},
	{"clock", "a little behind", func(n *Node) { n.APIServer.Value.Skew = 7 * time.Second }},
	{"clock", "far ahead", func(n *Node) { n.APIServer.Value.Skew = -time.Hour }},
	{"clock", "without an API server", func(n *Node) { n.APIServer.Err = unix.ECONNREFUSED }},
	{"configuration", "of another node name", func(n *Node) {
		n.APIServer.Value.SelfStatus, n.APIServer.Value.SelfIPs = 404, nil
	}},
	{"configuration", "of an address that no device has", func(n *Node) {
		n.Config.Model.NodeIP = netip.MustParseAddr("192.168.50.9")
	}},
	{"configuration", "of a Node that may not be read", func(n *Node) {
		n.APIServer.Value.SelfStatus, n.APIServer.Value.SelfIPs = 403, nil
	}},
	{"configuration", "of an agent that runs", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{Running: true, Synced: true, Version: "v1", Problems: []lb.Problem{
			{Object: "Service ns/web", Field: "spec.ports[0]", Message: "left out"},
			{Object: lb.Configuration, Field: "metricsBindAddress", Value: "127.0.0.1:10249", Message: "nothing answers there", Remedy: "End the other", Effect: lb.Degraded},
		}}}
	}},
	{"agent", "which is well but for its configuration", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{Running: true, Synced: true, Version: "v1", Problems: []lb.Problem{
			{Object: lb.Configuration, Field: "metricsBindAddress", Message: "nothing answers there", Effect: lb.Degraded},
		}}}
	}},
	{"agent", "which is well, and has left out parts of objects", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{Running: true, Synced: true, Version: "v1", Problems: []lb.Problem{
			{Object: "Namespace shop", Field: "metadata.labels[sluice-lb.io/socket]", Message: `"no" is neither on nor off, so it is as if there were none`},
			{Object: "Pod shop/web-1", Field: "metadata.annotations[sluice-lb.io/socket]", Message: `"no" is neither on nor off, so it is as if there were none`},
		}}}
	}},
	{"agent", "which is well", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{Version: "v1", Running: true, Synced: true}}
	}},
	{"agent", "which is not well", func(n *Node) {
		n.Agent = Fact[status.Status]{Value: status.Status{
			Version: "v1", Running: true, Synced: true, Hooks: []datapath.HookState{{Name: "connect4", Problem: "not attached: there is no link"}},
			Errors: []status.ServiceError{{Service: "default/web", Error: "no room"}},
		}}
	}},
	{"agent", "which hangs", func(n *Node) { n.Agent.Err = fmt.Errorf("%w within 2s", status.ErrHung) }},
	{"agent", "which has ended", func(n *Node) { n.Pins.Value.Folders = []string{"/sys/fs/bpf/sluice/v3"} }},
}

// What each check finds, word by word: first on a node that is healthy, then where one thing differs.
func TestFindings(t *testing.T) {
	var got strings.Builder
	report := Diagnose(healthy())
	if report.Problems+report.Warnings > 0 {
		t.Errorf("a healthy node has %d problems and %d warnings", report.Problems, report.Warnings)
	}
	for _, f := range report.Findings {
		fmt.Fprintf(&got, "%s: %s: %s\n", f.Check, f.State, f.Seen)
	}
	for _, p := range patients {
		n := healthy()
		p.fall(&n)
		fmt.Fprintf(&got, "\n# %s: %s\n", p.check, p.name)
		for _, f := range Diagnose(n).Findings {
			if f.Check == p.check {
				fmt.Fprintf(&got, "%s: %s\n", f.State, f.Seen)
				if f.Remedy != "" {
					fmt.Fprintf(&got, "  -> %s\n", f.Remedy)
				}
			}
		}
	}
	golden.Match(t, "testdata/findings.txt", got.String())
}

// Each check can find something, and what it finds comes with a remedy and with a link. What one
// check finds is no problem of another, but for those that depend on it.
func TestEachCheckFindsSomething(t *testing.T) {
	found := make(map[string]bool)
	for _, p := range patients {
		n := healthy()
		p.fall(&n)
		for _, f := range Diagnose(n).Findings {
			if f.State != OK && (f.Remedy == "" || f.Link != page+"#"+f.Check) {
				t.Errorf("%s: %s: %q has the remedy %q and the link %q", p.check, p.name, f.Seen, f.Remedy, f.Link)
			}
			if f.State != OK && f.Check == p.check {
				found[f.Check] = true
			}
		}
	}
	for _, c := range checks {
		if !found[c.name] {
			t.Errorf("no patient of the check %s", c.name)
		}
	}
}

// What could not be seen is reported by the checks that need it, and by no others.
func TestUnseen(t *testing.T) {
	lost := errors.New("lost")
	for _, test := range []struct {
		checks string
		lose   func(*Node)
	}{
		{"kernel memlock", func(n *Node) { n.Kernel.Err = lost }},
		{"jit", func(n *Node) { n.JIT.Err = lost }},
		{"capabilities seccomp", func(n *Node) { n.Process.Err = lost }},
		{"memory", func(n *Node) { n.Memory.Err = lost }},
		{"pins", func(n *Node) { n.Pins.Err = lost }},
		{"pins", func(n *Node) { n.Others.Err = lost }},
		{"descriptors", func(n *Node) { n.Files.Err = lost }},
		{"cgroup-hooks cilium calico", func(n *Node) { n.CgroupPrograms.Err = lost }},
		{"device-hooks cilium calico", func(n *Node) { n.DevicePrograms.Err = lost }},
		{"device-hooks ipvs rp-filter mtu", func(n *Node) { n.Devices.Err = lost }},
		{"kube-proxy", func(n *Node) { n.Processes.Err = lost }},
		{"kube-proxy node-port-firewall connection-marks forward-firewall", func(n *Node) { n.Netfilter.Err = lost }},
		{"ipvs", func(n *Node) { n.IPVS.Err = lost }},
		{"connection-marks", func(n *Node) { n.MarkRules.Err = lost }},
		{"ipsec", func(n *Node) { n.IPsecPolicies.Err = lost }},
		{"mesh service-cidrs", func(n *Node) { n.Namespaces.Err = lost }},
		{"ip-forward", func(n *Node) { n.IPForward.Err = lost }},
		{"ports", func(n *Node) { n.Ephemeral.Err = lost }},
		{"ports", func(n *Node) { n.Masquerade.Err = lost }},
		{"configuration", func(n *Node) { n.State.Err = lost }},
	} {
		n := healthy()
		test.lose(&n)
		var got []string
		report := Diagnose(n)
		for _, f := range report.Findings {
			if f.State == Warning && f.Seen == "not looked at: lost" {
				got = append(got, f.Check)
			}
		}
		if report.Unseen != len(got) {
			t.Errorf("%s: %d checks are counted as not made", test.checks, report.Unseen)
		}
		if diff := cmp.Diff(strings.Fields(test.checks), got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// A node of which nothing could be seen is no reason to crash, and not reported as healthy.
func TestNothingSeen(t *testing.T) {
	err := fmt.Errorf("nothing: %w", unix.EPERM)
	n := Node{
		Kernel: Fact[Kernel]{Err: err}, Features: Fact[datapath.Features]{Err: err}, JIT: Fact[int]{Err: err},
		Memory: Fact[node.Memory]{Err: err}, Files: Fact[uint64]{Err: err}, Process: Fact[Process]{Err: err}, Pins: Fact[Pins]{Err: err},
		CgroupPrograms: foreign(), Devices: Fact[[]Device]{Err: err}, Netfilter: Fact[node.Netfilter]{Err: err},
		IPsecPolicies: Fact[int]{Err: err}, IPForward: Fact[Forwarding]{Err: err}, Ephemeral: Fact[[]bpf.PortRange]{Err: err},
		APIServer: Fact[APIServer]{Err: err}, Agent: Fact[status.Status]{Err: err}, State: Fact[node.State]{Err: err},
		Namespaces: Fact[[]Namespace]{Err: err},
	}
	n.CgroupPrograms.Err, n.DevicePrograms.Err, n.MarkRules.Err = err, err, err
	for _, f := range Diagnose(n).Findings {
		unaffected := slices.Contains([]string{"btf", "cgroup", "bpffs"}, f.Check)
		if f.State == OK && !unaffected {
			t.Errorf("%s is ok: %s", f.Check, f.Seen)
		}
	}
}

// Every check has a heading in docs/doctor.md, and every heading there is that of a check, in the
// same order.
func TestEveryCheckHasItsHeading(t *testing.T) {
	text, err := os.ReadFile("../../docs/doctor.md")
	lab.Must(t, err)
	var headings, names []string
	for _, found := range regexp.MustCompile(`(?m)^### (.+)$`).FindAllStringSubmatch(string(text), -1) {
		headings = append(headings, found[1])
	}
	for _, c := range checks {
		names = append(names, c.name)
	}
	if diff := cmp.Diff(names, headings); diff != "" {
		t.Errorf("headings of docs/doctor.md (-checks +headings):\n%s", diff)
	}
}
