package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A topology is written as one device a line, with the decision:
//
//	NAME KIND [net=PREFIX] [gw=ADDR] [master=NAME] [peer=NAME] [on=NAME] [layer=ip|other] -> CLASS: REASON
//
// KIND "-" is hardware; CLASS "-" is not attached.
var topologies = []struct {
	name  string
	rules string // as flags
	lines string
}{
	{"flannel", "", `
lo        -      layer=other -> -: loopback
eth0      -      net=192.168.50.1/24 gw=192.168.50.254 -> uplink: physical device
cni0      bridge net=10.244.1.1/24 -> -: bridge: its ports are attached
veth1a2b  veth   master=cni0 -> pods: host end of a veth pair, port of cni0
flannel.1 vxlan  gw=10.244.2.0 -> uplink: vxlan device
`},
	{"Calico", "", `
eth0         -     net=192.168.50.1/24 gw=192.168.50.254 -> uplink: physical device
cali0123     veth  -> pods: host end of a veth pair
cali4567     veth  -> pods: host end of a veth pair
vxlan.calico vxlan gw=10.244.2.0 -> uplink: vxlan device
tunl0        ipip  layer=ip -> uplink: ipip device
wireguard.cali wireguard layer=ip -> uplink: wireguard device
`},
	{"kindnet, where the node is a container", "", `
eth0  veth net=172.18.0.2/16 gw=172.18.0.1 -> uplink: veth with the network of 172.18.0.2/16
veth1 veth -> pods: host end of a veth pair
veth2 veth -> pods: host end of a veth pair
`},
	{"an uplink of a container with a /32", "", `
eth0 veth gw=10.0.0.1 -> uplink: veth to the gateway 10.0.0.1
`},
	{"bridge CNI on a bridge that has the uplink", "", `
br0   bridge net=192.168.50.1/24 gw=192.168.50.254 -> -: bridge: its ports are attached
eth0  -      master=br0 -> uplink: physical device, port of br0
vxlan0 vxlan master=br0 -> uplink: vxlan device, port of br0
veth1 veth   master=br0 -> pods: host end of a veth pair, port of br0
tap0  tun    master=br0 -> pods: tap of a virtual machine, port of br0
`},
	{"bond, and a vlan on it", "", `
eth0      -    master=bond0 -> -: slave of bond0
eth1      -    master=bond0 -> -: slave of bond0
bond0     bond -> uplink: bond device
bond0.100 vlan net=192.168.50.1/24 -> uplink: vlan device
p1        -    master=team0 -> -: slave of team0
team0     team net=192.168.60.1/24 -> uplink: team device
`},
	{"a virtual function below a synthetic device", "", `
eth0   - net=10.224.0.4/16 -> uplink: physical device
enP1s1 - master=eth0 -> -: slave of eth0
`},
	{"Open vSwitch with Antrea", "", `
eth0       -           net=192.168.50.1/24 -> uplink: physical device
ovs-system openvswitch -> -: openvswitch: its internal ports are attached
antrea-gw0 openvswitch net=10.10.1.1/24 -> uplink: openvswitch device
web-1a2b   veth        master=ovs-system -> -: port of ovs-system: its internal ports are attached
genev_sys  geneve      master=ovs-system -> -: port of ovs-system: its internal ports are attached
`},
	{"Open vSwitch without ports", "", `
ovs-system openvswitch -> -: openvswitch: its internal ports are attached
br-int     openvswitch -> uplink: openvswitch device
`},
	{"Open vSwitch under another name", "", `
dp0  openvswitch -> -: openvswitch: its internal ports are attached
eth0 - master=dp0 -> -: port of dp0: its internal ports are attached
br-ex openvswitch net=192.168.50.1/24 gw=192.168.50.254 -> uplink: openvswitch device
`},
	{"Docker", "", `
docker0 bridge net=172.17.0.1/16 -> -: bridge: its ports are attached
veth77  veth   master=docker0 -> pods: host end of a veth pair, port of docker0
`},
	{"AWS", "", `
eth0    -    net=10.0.1.7/24 gw=10.0.1.1 -> uplink: physical device
eth1    -    net=10.0.1.9/24 -> uplink: physical device
eni0ab1 veth -> pods: host end of a veth pair
vlan.eth.1 vlan -> uplink: vlan device
`},
	{"Cilium", "", `
cilium_net  veth peer=cilium_host -> -: both ends of the veth pair are on the node: the other is cilium_host
cilium_host veth peer=cilium_net -> -: both ends of the veth pair are on the node: the other is cilium_net
lxc0123     veth -> pods: host end of a veth pair
lxc_health  veth -> pods: host end of a veth pair
lxc4567     netkit -> pods: host end of a netkit pair
cilium_vxlan vxlan -> uplink: vxlan device
`},
	{"a pair on the node of which one end is the uplink", "", `
veth0 veth peer=veth1 net=192.168.50.1/24 -> uplink: veth with the network of 192.168.50.1/24
veth1 veth peer=veth0 master=br0 -> -: both ends of the veth pair are on the node: the other is veth0
br0   bridge -> -: bridge: its ports are attached
`},
	{"what carries nothing", "", `
kube-ipvs0   dummy -> -: dummy: what is sent there is gone
nodelocaldns dummy net=169.254.20.10/32 -> -: dummy: what is sent there is gone
ifb0         ifb   -> -: ifb: packets pass the device that it shapes
macvtap0     macvtap -> -: macvtap: its packets pass the device below, and not the stack
nlmon0       nlmon layer=other -> -: neither Ethernet nor IP
vcan0        vcan  layer=other -> -: neither Ethernet nor IP
ib0          ipoib layer=other -> -: neither Ethernet nor IP
`},
	{"macvlan and VRF", "", `
macvlan0 macvlan net=192.168.50.9/24 -> uplink: macvlan device
ipvlan0  ipvlan  net=192.168.50.8/24 -> uplink: ipvlan device
blue     vrf     -> -: vrf: its members are attached
eth2     -       master=blue net=192.168.70.1/24 -> uplink: physical device
veth5    veth    master=blue -> pods: host end of a veth pair
`},
	{"virtual machines and tunnels of users", "", `
tap0       tun  -> pods: tap of a virtual machine
tap1       tun  net=10.8.0.2/24 -> uplink: tap with the network of 10.8.0.2/24
tailscale0 tun  layer=ip -> uplink: tun device
tun0       tun  layer=ip net=10.8.0.2/24 -> uplink: tun device
ppp0       -    layer=ip -> uplink: physical device
`},
	{"--exclude-devices wins", "--devices=* --exclude-devices=cali*,docker?", `
eth0    -      -> uplink: physical device
cali1   veth   -> -: excluded by --exclude-devices cali*
docker0 bridge -> -: excluded by --exclude-devices docker?
`},
	{"--devices leaves all others out", "--devices=eth0,lxc*", `
eth0 -    -> uplink: physical device
eth1 -    -> -: not among --devices
lxc1 veth -> pods: host end of a veth pair
`},
	{"--devices and VLANs", "--devices=eth0,eth1=pods,eth1.7=uplink", `
eth0      -    -> uplink: physical device
eth0.100  vlan on=eth0 net=192.168.50.1/24 -> uplink: vlan device
eth0.1.2  vlan on=eth0.100 -> uplink: vlan device
eth1.5    vlan on=eth1 -> pods: --devices eth1=pods
eth1.7    vlan on=eth1 -> uplink: --devices eth1.7=uplink
eth1      -    -> pods: --devices eth1=pods
eth2.100  vlan on=eth2 -> -: not among --devices
eth2      -    -> -: not among --devices
eth3.100  vlan -> -: not among --devices
eth4.1    vlan on=eth4.1 -> -: not among --devices
eth5.1    vlan on=eth5.2 -> -: not among --devices
eth5.2    vlan on=eth5.1 -> -: not among --devices
`},
	{"a VLAN that is excluded", "--devices=eth0 --exclude-devices=eth0.?", `
eth0   -    -> uplink: physical device
eth0.1 vlan on=eth0 -> -: excluded by --exclude-devices eth0.?
`},
	{"--devices fixes classes, the first that matches", "--devices=eth1=pods,eth*=uplink,gw=pods,*", `
lo    -      layer=other -> -: loopback
eth0  veth   -> uplink: --devices eth*=uplink
eth1  -      net=192.168.50.1/24 -> pods: --devices eth1=pods
gw    veth   peer=gw2 -> pods: --devices gw=pods
gw2   veth   peer=gw -> -: both ends of the veth pair are on the node: the other is gw
`},
	{"--devices does not make sense of a bridge", "--devices=*=uplink", `
br0  bridge -> -: bridge: its ports are attached
eth0 - master=br0 -> uplink: --devices *=uplink
eth1 - master=bond0 -> -: slave of bond0
bond0 bond -> uplink: --devices *=uplink
`},
	{"BridgeInterface", "--pod-bridge-interface=cbr0", `
cbr0  bridge net=10.244.1.1/24 -> -: bridge: its ports are attached
veth1 veth   master=cbr0 -> pods: --detect-local-mode BridgeInterface: cbr0
eth2  -      master=cbr0 -> uplink: physical device, port of cbr0
veth2 veth   master=cbr01 -> uplink: --detect-local-mode BridgeInterface: not cbr0
cbr01 bridge -> -: bridge: its ports are attached
veth3 veth   -> uplink: --detect-local-mode BridgeInterface: not cbr0
eth0  -      net=192.168.50.1/24 -> uplink: physical device
`},
	{"BridgeInterface that is none", "--pod-bridge-interface=antrea-gw0", `
antrea-gw0 openvswitch net=10.10.1.1/24 -> pods: --detect-local-mode BridgeInterface: antrea-gw0
br-ex      openvswitch net=192.168.50.1/24 -> uplink: --detect-local-mode BridgeInterface: not antrea-gw0
eth0       - -> uplink: physical device
`},
	{"a mode makes no pods of uplinks and tunnels", "--pod-interface-name-prefix=e", `
eth0   -     net=192.168.50.1/24 -> uplink: physical device
eth1   veth  net=172.18.0.2/16 gw=172.18.0.1 -> uplink: veth with the network of 172.18.0.2/16
evx0   vxlan gw=10.244.2.0 -> uplink: vxlan device
eni1   veth  -> pods: --detect-local-mode InterfaceNamePrefix: eni1
`},
	{"InterfaceNamePrefix", "--pod-interface-name-prefix=cali --devices=calico=uplink,*", `
cali1  veth -> pods: --detect-local-mode InterfaceNamePrefix: cali1
calico veth -> uplink: --devices calico=uplink
veth1  veth master=calibr -> pods: --detect-local-mode InterfaceNamePrefix: calibr
calibr bridge -> -: bridge: its ports are attached
lxc1   veth -> uplink: --detect-local-mode InterfaceNamePrefix: not cali
xcali  veth -> uplink: --detect-local-mode InterfaceNamePrefix: not cali
cali2  veth peer=cali3 -> -: both ends of the veth pair are on the node: the other is cali3
cali3  dummy -> -: dummy: what is sent there is gone
`},
}

func TestDecide(t *testing.T) {
	for _, test := range topologies {
		t.Run(test.name, func(t *testing.T) {
			devices, want := parseTopology(t, test.lines)
			var got []string
			for _, d := range Decide(devices, parseRules(t, test.rules)) {
				class := d.Class.String()
				if class == "" {
					class = "-"
				}
				got = append(got, fmt.Sprintf("%s %s: %s", d.Name, class, d.Reason))
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("decisions (-want +got):\n%s", diff)
			}
		})
	}
}

// Bridge is set for all ports, also for those that are not attached.
func TestDecideReportsTheBridge(t *testing.T) {
	devices, _ := parseTopology(t, `
br0   bridge -> x
bond0 bond -> x
a     veth master=br0 -> x
b     veth peer=a master=br0 -> x
c     - master=bond0 -> x
d     veth -> x`)
	var got []int
	for _, d := range Decide(devices, Rules{}) {
		got = append(got, d.Bridge)
	}
	if want := []int{0, 0, 10, 10, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("bridges are %v, want %v", got, want)
	}
}

// A device leads out if only other hosts are behind it, whatever its class is by configuration.
func TestDecideReportsWhatLeadsOut(t *testing.T) {
	devices, _ := parseTopology(t, `
lo      - -> x
eth0    - net=192.168.50.1/24 -> x
flannel vxlan -> x
pod0    veth -> x
cni0    bridge net=10.244.1.1/24 -> x
pod1    veth master=cni0 -> x
lan0    bridge net=192.168.51.1/24 -> x
nic1    - master=lan0 -> x
mixed0  bridge net=192.168.52.1/24 -> x
nic2    - master=mixed0 -> x
pod2    veth master=mixed0 -> x
empty0  bridge net=172.17.0.1/16 -> x
gw0     openvswitch net=10.244.3.1/24 -> x
shim0   macvlan net=192.168.53.1/24 -> x
host0   veth peer=net0 -> x
net0    veth peer=host0 -> x
dummy0  dummy -> x`)
	for _, rules := range []Rules{{}, {PodPrefix: "other"}} {
		var got []string
		for _, d := range Decide(devices, rules) {
			if d.LeadsOut {
				got = append(got, d.Name)
			}
		}
		if want := []string{"eth0", "flannel", "lan0", "nic1", "nic2", "shim0"}; !slices.Equal(got, want) {
			t.Errorf("%+v: %v lead out, want %v", rules, got, want)
		}
	}
}

// What comes from the wire passes the devices below a macvlan, an ipvlan, a VLAN of a bridge, and one end of a pair, first.
func TestDevicesAboveOthers(t *testing.T) {
	devices, _ := parseTopology(t, `
eth0      - net=192.168.50.1/24 -> x
eth0.1    vlan on=eth0 net=192.168.51.1/24 -> x
eth0.1.2  vlan on=eth0.1 -> x
shim0     macvlan on=eth0 net=192.168.52.1/24 -> x
shim1     ipvlan on=eth0.1 -> x
shim1.3   vlan on=shim1 -> x
far0      macvlan net=192.168.53.1/24 -> x
flannel.1 vxlan gw=10.244.2.0 -> x
br0       bridge net=192.168.54.1/24 -> x
nic0      - master=br0 -> x
br0.4     vlan on=br0 -> x
br0.4.5   vlan on=br0.4 -> x
nic0.6    vlan on=nic0 -> x
net0      veth peer=host0 net=10.244.1.1/24 -> x
host0     veth peer=net0 -> x
pod0      veth -> x`)
	var got []string
	for _, d := range Decide(devices, Rules{}) {
		if d.Above {
			got = append(got, d.Name)
		}
	}
	want := []string{"shim0", "shim1", "shim1.3", "br0.4", "br0.4.5", "nic0.6", "net0", "host0"}
	if !slices.Equal(got, want) {
		t.Errorf("%v are above others, want %v", got, want)
	}
}

// parseTopology gives devices the indices 10, 11 and so on.
func parseTopology(t *testing.T, text string) ([]Device, []string) {
	t.Helper()
	var lines []string
	index := make(map[string]int)
	for line := range strings.Lines(strings.TrimSpace(text)) {
		lines = append(lines, line)
		index[strings.Fields(line)[0]] = 9 + len(lines)
	}
	var devices []Device
	var want []string
	for _, line := range lines {
		left, decision, _ := strings.Cut(strings.TrimSpace(line), " -> ")
		fields := strings.Fields(left)
		device := Device{Name: fields[0], Index: index[fields[0]], LinkLayer: LinkEthernet, IsLoopback: fields[0] == "lo"}
		if fields[1] != "-" {
			device.Kind = fields[1]
		}
		for _, attr := range fields[2:] {
			setAttr(t, &device, index, attr)
		}
		devices = append(devices, device)
		want = append(want, device.Name+" "+decision)
	}

	return devices, want
}

func setAttr(t *testing.T, device *Device, index map[string]int, attr string) {
	t.Helper()
	key, value, _ := strings.Cut(attr, "=")
	switch key {
	case "net":
		// A whole address is no network: see addAddress.
		if prefix := netip.MustParsePrefix(value); !prefix.IsSingleIP() {
			device.Network = prefix
		}
	case "gw":
		device.Gateway = netip.MustParseAddr(value)
	case "master":
		device.Master = index[value]
	case "peer":
		device.Peer = index[value]
	case "on":
		device.Lower = index[value]
	case "layer":
		device.LinkLayer = map[string]LinkLayer{"ip": LinkIP, "other": LinkOther}[value]
	default:
		t.Fatalf("unknown attribute %q", attr)
	}
}

// parseRules reads flags as the agent does.
func parseRules(t *testing.T, flags string) Rules {
	t.Helper()
	var rules Rules
	for flag := range strings.FieldsSeq(flags) {
		name, value, _ := strings.Cut(flag, "=")
		switch name {
		case "--devices":
			rules.Only = mustPatterns(t, value)
		case "--exclude-devices":
			rules.Never = mustPatterns(t, value)
		case "--pod-bridge-interface":
			rules.PodBridge = value
		case "--pod-interface-name-prefix":
			rules.PodPrefix = value
		}
	}
	if err := rules.Validate(); err != nil {
		t.Fatal(err)
	}

	return rules
}

func mustPatterns(t *testing.T, list string) []Pattern {
	t.Helper()
	var patterns []Pattern
	for text := range strings.SplitSeq(list, ",") {
		p, err := ParsePattern(text)
		if err != nil {
			t.Fatal(err)
		}
		if p.String() != text {
			t.Errorf("pattern %q prints as %q", text, p)
		}
		patterns = append(patterns, p)
	}

	return patterns
}

func TestRulesAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":              "the pattern of the name is empty",
		"=pods":         "the pattern of the name is empty",
		"eth0=":         "pods or uplink",
		"eth0=internal": "pods or uplink",
		"eth[":          "syntax error",
	} {
		if _, err := ParsePattern(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("pattern %q: %v, want %q", text, err, want)
		}
	}
	for _, rules := range []Rules{
		{Never: []Pattern{{Glob: "eth0", Class: ClassPods}}},
		{PodBridge: "cbr0", PodPrefix: "cali"},
	} {
		if err := rules.Validate(); err == nil {
			t.Errorf("no error for %+v", rules)
		}
	}
}
