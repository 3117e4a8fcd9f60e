package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

var (
	primary   = netip.MustParseAddr("10.1.1.1")
	secondary = netip.MustParseAddr("10.1.2.1")
	loopback  = netip.MustParseAddr("127.0.0.1")
)

func local() []Address {
	return []Address{
		{Addr: primary, IfIndex: 2}, {Addr: secondary, IfIndex: 3},
		{Addr: loopback, IfIndex: 1, IsLoopback: true},
	}
}

// Node ports must neither be lost nor answer on too many addresses because
// something is not known yet.
func TestNodeAddrs(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(*Model)
		want []netip.Addr // nil: not known yet
	}{
		{"too early without local addresses", func(m *Model) { m.SetObject([]netip.Addr{primary}, nil, true) }, nil},
		{"none before the Node is received", func(m *Model) { m.SetState(State{Addresses: local()}) }, []netip.Addr{}},
		{"none before the Node has addresses", func(m *Model) {
			m.SetState(State{Addresses: local()})
			m.SetObject(nil, nil, true)
			m.ObjectReceived()
		}, []netip.Addr{}},
		{"the address of an earlier agent's node ports before the Node is received", func(m *Model) {
			m.cfg.HadNodePorts = map[netip.Addr]bool{secondary: true, netip.MustParseAddr("192.0.2.9"): true}
			m.SetState(State{Addresses: local()})
		}, []netip.Addr{secondary}},
		{"those of ranges beside the primary address before the Node is received", func(m *Model) {
			m.cfg.NodePortAddresses = lb.NodePortAddresses{Primary: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}}
			m.SetState(State{Addresses: local()})
		}, []netip.Addr{secondary}},
		{"those of ranges and the primary address", func(m *Model) {
			m.cfg.NodePortAddresses = lb.NodePortAddresses{Primary: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}}
			m.SetState(State{Addresses: local()})
			m.SetObject([]netip.Addr{primary}, nil, true)
		}, []netip.Addr{primary, secondary}},
		{"the primary address, whatever an earlier agent's was", func(m *Model) {
			m.cfg.HadNodePorts = map[netip.Addr]bool{secondary: true}
			m.SetState(State{Addresses: local()})
			m.SetObject([]netip.Addr{primary}, nil, true)
		}, []netip.Addr{primary}},
		{"the primary address", func(m *Model) {
			m.SetState(State{Addresses: local()})
			m.SetObject([]netip.Addr{primary}, nil, true)
		}, []netip.Addr{primary}},
		{"the primary address still when the Node is gone", func(m *Model) {
			m.SetState(State{Addresses: local()})
			m.SetObject([]netip.Addr{primary}, nil, true)
			m.SetObject(nil, nil, false)
			m.ObjectReceived()
		}, []netip.Addr{primary}},
		{"every address if there is no Node", func(m *Model) {
			m.SetState(State{Addresses: local()})
			m.ObjectReceived()
		}, []netip.Addr{primary, secondary}},
		{"every address when waiting is over", func(m *Model) {
			m.SetState(State{Addresses: local()})
			m.SetObject(nil, nil, true)
			m.StopWaiting()
		}, []netip.Addr{primary, secondary}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := NewModel(ModelConfig{})
			test.do(m)
			addrs, ok := m.NewAddrs()
			if ok != (test.want != nil) {
				t.Fatalf("known is %t, want %t", ok, test.want != nil)
			}
			for i, addr := range []netip.Addr{primary, secondary, loopback} {
				if use, has := addrs[addr]; has != ok || ok && use.Ifindex != []uint32{2, 3, 1}[i] {
					t.Errorf("the node has %s: %t, on device %d", addr, has, use.Ifindex)
				}
				have := addrs[addr].Flags&maps.AddrNodePort != 0
				want := false
				for _, a := range test.want {
					want = want || a == addr
				}
				if have != want {
					t.Errorf("node ports answer on %s: %t, want %t", addr, have, want)
				}
			}
			if _, again := m.NewAddrs(); again {
				t.Error("unchanged addresses count as new")
			}
		})
	}
}

// Whose traffic is that of pods: no pod may count as an external client because something is
// not known yet.
func TestLocalCIDRs(t *testing.T) {
	cluster := mustPrefixes(t, "10.244.0.0/16", "fd00::/48")
	podCIDRs := mustPrefixes(t, "10.244.1.0/24", "10.244.2.0/24", "fd00:1::/64")
	first := mustPrefixes(t, "10.244.1.0/24", "fd00:1::/64")
	byNode := LocalDetector{Mode: LocalNodeCIDR}
	for _, test := range []struct {
		name     string
		detector LocalDetector
		do       func(*Model)
		known    bool
		want     []netip.Prefix
	}{
		{"none by device, at once", LocalDetector{}, func(*Model) {}, true, nil},
		{"none by device, whatever the Node has", LocalDetector{}, func(m *Model) { m.SetObject([]netip.Addr{primary}, podCIDRs, true) }, true, nil},
		{"none by bridge, whatever the cluster has", LocalDetector{Mode: LocalBridgeInterface, ClusterCIDRs: cluster}, func(*Model) {}, true, nil},
		{"the cluster's, at once", LocalDetector{Mode: LocalClusterCIDR, ClusterCIDRs: cluster}, func(*Model) {}, true, cluster},
		{"the cluster's, whatever the Node has", LocalDetector{Mode: LocalClusterCIDR, ClusterCIDRs: cluster}, func(m *Model) { m.SetObject([]netip.Addr{primary}, podCIDRs, true) }, true, cluster},
		{"too early before the Node is received", byNode, func(*Model) {}, false, nil},
		{"too early before the Node has them", byNode, func(m *Model) { m.SetObject([]netip.Addr{primary}, nil, true); m.ObjectReceived() }, false, nil},
		{"the Node's first of each family", byNode, func(m *Model) { m.SetObject([]netip.Addr{primary}, podCIDRs, true) }, true, first},
		{"the Node's, not the cluster's", LocalDetector{Mode: LocalNodeCIDR, ClusterCIDRs: cluster}, func(m *Model) { m.SetObject([]netip.Addr{primary}, podCIDRs, true) }, true, first},
		{"the Node's new ones", byNode, func(m *Model) {
			m.SetObject([]netip.Addr{primary}, podCIDRs, true)
			m.NewLocalCIDRs()
			m.SetObject([]netip.Addr{primary}, podCIDRs[1:], true)
		}, true, podCIDRs[1:]},
		{"the Node's still when it is gone", byNode, func(m *Model) {
			m.SetObject([]netip.Addr{primary}, podCIDRs, true)
			m.SetObject(nil, nil, false)
			m.ObjectReceived()
		}, true, first},
		{"none if there is no Node", byNode, (*Model).ObjectReceived, true, nil},
		{"the Node's when they come after all", byNode, func(m *Model) {
			m.StopWaiting()
			m.NewLocalCIDRs()
			m.SetObject([]netip.Addr{primary}, podCIDRs, true)
		}, true, first},
		{"none when waiting is over", byNode, func(m *Model) { m.SetObject([]netip.Addr{primary}, nil, true); m.StopWaiting() }, true, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := NewModel(ModelConfig{Local: test.detector})
			test.do(m)
			got, known := m.NewLocalCIDRs()
			if known != test.known || !slices.Equal(got, test.want) {
				t.Errorf("they are %v (known: %t), want %v (%t)", got, known, test.want, test.known)
			}
			m.SetObject([]netip.Addr{primary}, m.podCIDRs, true)
			if again, changed := m.NewLocalCIDRs(); changed && known {
				t.Errorf("unchanged ranges count as new: %v", again)
			}
		})
	}
}

func mustPrefixes(t *testing.T, list ...string) []netip.Prefix {
	t.Helper()
	prefixes, err := ParseClusterCIDRs(strings.Join(list, ","))
	if err != nil {
		t.Fatal(err)
	}

	return prefixes
}

// Where health check node ports answer follows the node's addresses.
func TestCheckAddrs(t *testing.T) {
	linkLocal := netip.MustParseAddr("fe80::1")
	global := netip.MustParseAddr("2001:db8::1")
	dual := append(local(), Address{Addr: linkLocal, IfIndex: 2}, Address{Addr: linkLocal, IfIndex: 3}, Address{Addr: global, IfIndex: 2})
	for _, test := range []struct {
		name    string
		ranges  string
		local   []Address
		primary []netip.Addr
		want    string
	}{
		{"the primary one", "primary", local(), []netip.Addr{primary}, "[10.1.1.1]"},
		{"the primary one of each family", "primary", dual, []netip.Addr{primary, global}, "[10.1.1.1 2001:db8::1]"},
		{"all of a family without a primary one", "primary", dual, []netip.Addr{primary}, "[10.1.1.1 ::]"},
		{"all of the families that the node has", "primary", local(), nil, "[0.0.0.0]"},
		{"all", "0.0.0.0/0,::/0", dual, []netip.Addr{primary}, "[0.0.0.0 ::]"},
		{"those in ranges, link-local ones with their device", "10.1.0.0/16,fe80::/10", dual, nil, "[10.1.1.1 10.1.2.1 fe80::1%2 fe80::1%3]"},
		{"none if the primary one is not the node's", "primary", local(), []netip.Addr{netip.MustParseAddr("192.0.2.9")}, "[]"},
		{"the primary one and loopback", "primary,localhost", dual, []netip.Addr{primary, global}, "[10.1.1.1 127.0.0.1 2001:db8::1]"},
		{"the primary one and a range", "primary,10.1.2.0/24", dual, []netip.Addr{primary, global}, "[10.1.1.1 10.1.2.1 2001:db8::1]"},
		{"one that two devices have", "10.1.1.1/32", append(local(), Address{Addr: primary, IfIndex: 9}), nil, "[10.1.1.1]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ranges, err := lb.ParseNodePortAddresses(strings.Split(test.ranges, ","))
			if err != nil {
				t.Fatal(err)
			}
			m := NewModel(ModelConfig{NodePortAddresses: ranges})
			m.SetState(State{Addresses: test.local})
			m.SetObject(test.primary, nil, true)
			m.StopWaiting()
			addrs, known := m.CheckAddrs()
			if got := fmt.Sprint(addrs); !known || got != test.want {
				t.Errorf("they are %s (known: %t), want %s", got, known, test.want)
			}
		})
	}
}

// The configured address takes the place of the Node's, whatever the Node has.
// As long as Nodes cannot be listed, it is not known whether the cluster has one of this name.
func TestNodeThatIsNotKnown(t *testing.T) {
	m := NewModel(ModelConfig{NodeName: "node-1"})
	m.SetState(State{Addresses: []Address{}})
	m.StopWaiting()
	if problems, _ := m.NewUnmet(); len(problems) > 0 {
		t.Errorf("before Nodes are listed: %v", problems)
	}
	m.ObjectReceived()
	if problems, _ := m.NewUnmet(); len(problems) != 1 || problems[0].Field != "hostnameOverride" {
		t.Errorf("after Nodes are listed: %v, want one of hostnameOverride", problems)
	}
}

func TestNodeIP(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00::1")
	other4, other6 := netip.MustParseAddr("10.1.1.9"), netip.MustParseAddr("fd00::9")
	type object []netip.Addr // of the Node, nil: it is gone
	for _, test := range []struct {
		name   string
		nodeIP netip.Addr
		nodes  []object
		want   []netip.Addr
	}{
		{"the Node's", netip.Addr{}, []object{{v4, v6}}, []netip.Addr{v4, v6}},
		{"the Node's new ones", netip.Addr{}, []object{{v4, v6}, {other6, other4}}, []netip.Addr{other6, other4}},
		{"the Node's still when it has none", netip.Addr{}, []object{{v4, v6}, {}}, []netip.Addr{v4, v6}},
		{"the Node's still when it is gone", netip.Addr{}, []object{{v4, v6}, nil}, []netip.Addr{v4, v6}},
		{"that of a family of which the Node has none any more", netip.Addr{}, []object{{v4, v6}, {other4}}, []netip.Addr{other4, v6}},
		{"the new ones of a Node that is back", netip.Addr{}, []object{{v4, v6}, nil, {other4, other6}}, []netip.Addr{other4, other6}},
		{"the configured one alone", other4, nil, []netip.Addr{other4}},
		{"the configured one for that of its family", other4, []object{{v4, v6}}, []netip.Addr{other4, v6}},
		{"the configured one first", other6, []object{{v4, v6}}, []netip.Addr{other6, v4}},
		{"the configured one, whatever the Node has next", other6, []object{{v4, v6}, {other4}, nil}, []netip.Addr{other6, other4}},
		{"the configured one beside the one that is left", other4, []object{{v6}}, []netip.Addr{other4, v6}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := NewModel(ModelConfig{NodeIP: test.nodeIP})
			for _, n := range test.nodes {
				m.SetObject(n, nil, n != nil)
			}
			if !slices.Equal(m.PrimaryIPs(), test.want) {
				t.Errorf("they are %v, want %v", m.PrimaryIPs(), test.want)
			}
		})
	}
}

// A decision about a device becomes an entry of the map.
func TestDeviceEntries(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("fd00:50::1")
	for _, test := range []struct {
		name     string
		decision Decision
		entry    maps.Device
	}{
		{
			"an uplink with addresses",
			Decision{Device: Device{Index: 2, LinkLayer: LinkEthernet, TakesFrames: true, SourceV4: v4, SourceV6: v6}, Class: ClassUplink, LeadsOut: true},
			maps.Device{SourceV4: maps.AddrOf(v4), SourceV6: maps.AddrOf(v6), Flags: maps.DeviceTurns | maps.DeviceLeadsOut},
		},
		{
			"a pod's",
			Decision{Device: Device{Index: 5, LinkLayer: LinkEthernet, TakesFrames: true, PeerNetns: 3}, Class: ClassPods},
			maps.Device{PeerNetns: 3},
		},
		{
			"a tunnel without addresses",
			Decision{Device: Device{Index: 3, LinkLayer: LinkIP}, Class: ClassUplink},
			maps.Device{},
		},
		{
			"a pod's on a bridge",
			Decision{Device: Device{Index: 4, LinkLayer: LinkEthernet, SourceV4: v4}, Class: ClassPods, Bridge: 7},
			maps.Device{SourceV4: maps.AddrOf(v4), Bridge: 7},
		},
		{
			"that of a CNI from which packets go on to pods' devices, as Cilium's cilium_host",
			Decision{Device: Device{Index: 6, LinkLayer: LinkEthernet}},
			maps.Device{Flags: maps.DeviceUnseen},
		},
		{
			"an excluded one that leads out",
			Decision{Device: Device{Index: 8, LinkLayer: LinkEthernet}, LeadsOut: true},
			maps.Device{Flags: maps.DeviceLeadsOut},
		},
		{
			"an ipvlan",
			Decision{Device: Device{Index: 9, LinkLayer: LinkEthernet}, Class: ClassUplink, LeadsOut: true, Above: true},
			maps.Device{Flags: maps.DeviceLeadsOut | maps.DeviceAbove},
		},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			want := map[uint32]maps.Device{uint32(test.decision.Index): test.entry}
			if diff := cmp.Diff(want, entriesOf([]Decision{test.decision}, true, false)); diff != "" {
				t.Errorf("maps (-want +got):\n%s", diff)
			}
			test.entry.Flags &^= maps.DeviceTurns
			want[uint32(test.decision.Index)] = test.entry
			if diff := cmp.Diff(want, entriesOf([]Decision{test.decision}, false, false)); diff != "" {
				t.Errorf("maps, through the stack (-want +got):\n%s", diff)
			}
			test.entry.Flags |= maps.DeviceEncrypts
			want[uint32(test.decision.Index)] = test.entry
			if diff := cmp.Diff(want, entriesOf([]Decision{test.decision}, false, true)); diff != "" {
				t.Errorf("maps, with IPsec (-want +got):\n%s", diff)
			}
		})
	}
}

// Packets bypass the stack unless the configuration or the kernel forbids it, or a rule there
// concerns them.
func TestThroughStack(t *testing.T) {
	const atIngress = `"their_filter" runs at the ingress of eth0`
	for _, test := range []struct{ always, concern, bypassed, want string }{
		{want: ""},
		{concern: "a rule", want: "a rule"},
		{bypassed: "eth0", want: atIngress},
		{bypassed: "veth0", want: ""}, // of a pod
		{bypassed: "eth1", want: ""},  // a port of a bridge, where nothing is turned around
		{concern: "a rule", bypassed: "eth0", want: "a rule"},
		{always: "--forwarding stack", bypassed: "eth0", want: "--forwarding stack"},
		{always: "no MTU", concern: "a rule", want: "no MTU"},
	} {
		m := NewModel(ModelConfig{ThroughStack: test.always})
		devices := []Device{
			{Index: 2, Name: "eth0", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true},
			{Index: 3, Name: "veth0", Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true},
			{Index: 4, Name: "eth1", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Master: 5},
			{Index: 5, Name: "br0", Kind: "bridge", LinkLayer: LinkEthernet, IsUp: true},
		}
		for i := range devices {
			if devices[i].Name == test.bypassed {
				devices[i].Bypassed = "their_filter"
			}
		}
		m.SetState(State{Addresses: []Address{}, Devices: devices, Concern: test.concern})
		_, entries, ok := m.NewDecisions()
		if got := m.ThroughStack(); !ok || got != test.want {
			t.Errorf("%+v: got %q, decided: %t", test, got, ok)
		}
		if turns := entries[2].Flags&maps.DeviceTurns != 0; turns != (test.want == "") {
			t.Errorf("%+v: eth0 turns packets around: %t", test, turns)
		}
		if _, _, again := m.NewDecisions(); again {
			t.Error("unchanged devices count as new")
		}
	}
}

// The node's own processes are clients by its primary addresses, by those that they had before while these are not
// known, and else by the first of a device.
func TestClientIPs(t *testing.T) {
	addr := netip.MustParseAddr
	nat, other6, primary6, had := addr("10.0.2.15"), addr("fd00:51::15"), addr("fd00:50::1"), addr("192.168.50.9")
	state := State{Addresses: []Address{}, Devices: []Device{
		{Name: "lo", Index: 1, IsLoopback: true, SourceV4: addr("127.0.0.1"), SourceV6: addr("::1")},
		{Name: "eth0", Index: 2, SourceV4: nat},
		{Name: "eth1", Index: 3, SourceV4: primary, SourceV6: other6},
	}}
	for _, test := range []struct {
		name   string
		config ModelConfig
		do     func(*Model)
		v4, v6 netip.Addr
	}{
		{"the first of a device, before the Node is known", ModelConfig{}, func(*Model) {}, nat, other6},
		{"those that they had, before the Node is known", ModelConfig{HadClientIPs: []netip.Addr{had}}, func(*Model) {}, had, other6},
		{"the Node's", ModelConfig{HadClientIPs: []netip.Addr{had}}, func(m *Model) { m.SetObject([]netip.Addr{primary, primary6}, nil, true) }, primary, primary6},
		{"the Node's of one family", ModelConfig{HadClientIPs: []netip.Addr{had}}, func(m *Model) { m.SetObject([]netip.Addr{primary}, nil, true) }, primary, other6},
		{"the configured one", ModelConfig{NodeIP: had}, func(m *Model) { m.SetObject([]netip.Addr{primary, primary6}, nil, true) }, had, primary6},
		{"the first of a device, if the cluster has no such Node", ModelConfig{HadClientIPs: []netip.Addr{had}}, (*Model).ObjectReceived, nat, other6},
		{"the first of a device, if the Node does not arrive", ModelConfig{HadClientIPs: []netip.Addr{had}}, (*Model).StopWaiting, nat, other6},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := NewModel(test.config)
			test.do(m)
			if _, _, changed := m.NewDecisions(); changed {
				t.Error("devices are decided about before they are known")
			}
			m = NewModel(test.config)
			m.SetState(state)
			m.NewDecisions()
			test.do(m)
			_, entries, changed := m.NewDecisions()
			if !changed {
				m.SetState(state)
				_, entries, _ = m.NewDecisions()
			}
			here := entries[maps.DeviceOfNode]
			if here.SourceV4.IP() != test.v4 || here.SourceV6.IP() != test.v6 {
				t.Errorf("they are %s and %s, want %s and %s", here.SourceV4.IP(), here.SourceV6.IP(), test.v4, test.v6)
			}
			if len(entries) != 1+len(state.Devices) {
				t.Errorf("there are %d entries, want that of the node and of %d devices", len(entries), len(state.Devices))
			}
		})
	}
}

// Where the configuration leaves no node ports is a limit, of families that the node has.
func TestNodePortLimits(t *testing.T) {
	v4, v6 := Address{Addr: netip.MustParseAddr("192.168.1.1")}, Address{Addr: netip.MustParseAddr("fd00::1")}
	both, only4 := []Address{v4, v6}, []Address{v4, {Addr: netip.MustParseAddr("fe80::1")}}
	const (
		localhost = "node ports on loopback addresses of %s: nodePortAddresses (--nodeport-addresses) or iptables.localhostNodePorts " +
			"(--iptables-localhost-nodeports) leaves them out"
		elsewhere = "node ports on all but loopback addresses of %s: nodePortAddresses (--nodeport-addresses) has no others"
	)
	for _, test := range []struct {
		ranges    string
		off       []lb.Family
		addresses []Address
		want      []string
	}{
		{"all", nil, both, nil},
		{"primary", []lb.Family{lb.IPv4, lb.IPv6}, both, []string{fmt.Sprintf(localhost, "IPv4 and IPv6")}},
		{"primary", []lb.Family{lb.IPv4, lb.IPv6}, only4, []string{fmt.Sprintf(localhost, "IPv4")}},
		{"localhost", nil, both, []string{fmt.Sprintf(elsewhere, "IPv4 and IPv6")}},
		{"127.0.0.0/8 fd00::/16", []lb.Family{lb.IPv6}, both, []string{fmt.Sprintf(localhost, "IPv6"), fmt.Sprintf(elsewhere, "IPv4")}},
		{"127.0.0.0/8", nil, both, []string{fmt.Sprintf(elsewhere, "IPv4")}},
		{"192.168.0.0/16 localhost", nil, only4, nil},
	} {
		ranges, err := lb.ParseNodePortAddresses(strings.Fields(test.ranges))
		if err != nil {
			t.Fatal(err)
		}
		m := NewModel(ModelConfig{NodePortAddresses: ranges, NoLocalhostNodePorts: test.off})
		m.SetState(State{Addresses: test.addresses})
		if diff := cmp.Diff(test.want, m.Limits()); diff != "" {
			t.Errorf("%q without localhost of %v, with %v (-want +got):\n%s", test.ranges, test.off, test.addresses, diff)
		}
	}
}
