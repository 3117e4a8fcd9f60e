package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/test/lab"
)

// A decision about a device becomes a device of programs and an entry of the map.
func TestDeviceToProgramsAndMaps(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("fd00:50::1")
	for _, test := range []struct {
		name     string
		decision node.Decision
		device   datapath.Device
		entry    maps.Device
	}{
		{
			"an uplink with addresses",
			node.Decision{Device: node.Device{Index: 2, LinkLayer: node.LinkEthernet, TakesFrames: true, SourceV4: v4, SourceV6: v6}, Class: node.ClassUplink},
			datapath.Device{Index: 2, Class: maps.DeviceUplink},
			maps.Device{SourceV4: maps.AddrOf(v4), SourceV6: maps.AddrOf(v6), Flags: maps.DeviceTurns},
		},
		{
			"a pod's",
			node.Decision{Device: node.Device{Index: 5, LinkLayer: node.LinkEthernet, TakesFrames: true}, Class: node.ClassPods},
			datapath.Device{Index: 5, Class: maps.DevicePods},
			maps.Device{},
		},
		{
			"a tunnel without addresses",
			node.Decision{Device: node.Device{Index: 3, LinkLayer: node.LinkIP}, Class: node.ClassUplink},
			datapath.Device{Index: 3, Class: maps.DeviceUplink, NoEthernet: true},
			maps.Device{},
		},
		{
			"a pod's on a bridge",
			node.Decision{Device: node.Device{Index: 4, LinkLayer: node.LinkEthernet, SourceV4: v4}, Class: node.ClassPods, Bridge: 7},
			datapath.Device{Index: 4, Class: maps.DevicePods, BridgePort: true},
			maps.Device{SourceV4: maps.AddrOf(v4), Bridge: 7},
		},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.device, deviceOf(test.decision)); diff != "" {
				t.Errorf("programs (-want +got):\n%s", diff)
			}
			want := map[uint32]maps.Device{uint32(test.device.Index): test.entry}
			if diff := cmp.Diff(want, deviceEntries([]node.Decision{test.decision}, true)); diff != "" {
				t.Errorf("maps (-want +got):\n%s", diff)
			}
			test.entry.Flags = 0
			want[uint32(test.device.Index)] = test.entry
			if diff := cmp.Diff(want, deviceEntries([]node.Decision{test.decision}, false)); diff != "" {
				t.Errorf("maps, through the stack (-want +got):\n%s", diff)
			}
		})
	}
}

// Packets bypass the stack unless the configuration forbids it, the kernel cannot do it, or a rule
// there concerns them.
func TestThroughStack(t *testing.T) {
	for _, test := range []struct {
		always, knowsMTU bool
		concern, want    string
	}{
		{false, true, "", ""},
		{false, true, "a rule", "a rule"},
		{false, false, "", "the kernel's lookup of routes knows no MTU (Linux 5.12)"},
		{true, true, "", "--forwarding stack"},
	} {
		if got := throughStack(test.always, test.knowsMTU, test.concern); got != test.want {
			t.Errorf("%+v: got %q", test, got)
		}
	}
}

// A change of the rules that concern packets makes new decisions about devices.
func TestConcernChangesDevices(t *testing.T) {
	m := newModel(Config{})
	for i, test := range []struct {
		concern string
		decides bool
	}{{"", false}, {"a rule", true}, {"a rule", false}, {"", true}} {
		m.setConcern(test.concern)
		if _, decides := m.newDecisions(); decides != test.decides {
			t.Errorf("step %d: decided anew is %v", i, decides)
		}
	}
}

// Of the local modes, those that go by device become rules.
func TestDeviceRules(t *testing.T) {
	only := []node.Pattern{{Glob: "eth*"}}
	for mode, want := range map[LocalMode]node.Rules{
		LocalByDevice:            {Only: only},
		LocalClusterCIDR:         {Only: only},
		LocalNodeCIDR:            {Only: only},
		LocalBridgeInterface:     {Only: only, PodBridge: "cbr0"},
		LocalInterfaceNamePrefix: {Only: only, PodPrefix: "cali"},
	} {
		got, err := deviceRules(Config{
			Devices: node.Rules{Only: only},
			Local:   LocalDetector{Mode: mode, BridgeInterface: "cbr0", InterfaceNamePrefix: "cali"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", mode, diff)
		}
	}
	wrong := node.Rules{Never: []node.Pattern{{Glob: "eth0", Class: node.ClassPods}}}
	if _, err := deviceRules(Config{Devices: wrong}); err == nil {
		t.Error("no error for rules that make no sense")
	}
}

func TestMasqueradePortsAreChosen(t *testing.T) {
	for _, test := range []struct {
		name       string
		ephemeral  string
		want, more bpf.PortRange
		log        string
	}{
		{"those that are free", "32768 60999", bpf.PortRange{Low: 1024, High: 29999}, bpf.PortRange{Low: 61000, High: 65535}, "1024-29999 61000-65535"},
		{"the default, with a warning, if none is", "1024 65535", bpf.DefaultMasqueradePorts, bpf.PortRange{}, "level=WARN"},
		{"the only range that is free", "1024 29999", bpf.PortRange{Low: 32768, High: 65535}, bpf.PortRange{}, "32768-65535"},
	} {
		t.Run("they are "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			var out bytes.Buffer
			m := newDeviceMonitor(nil, slog.New(slog.NewTextHandler(&out, nil)), time.Minute, nil)
			calls := 0
			follow := func() {
				t.Helper()
				lab.MustDo(t, ns, func() error {
					return m.followPorts(func(got, more bpf.PortRange) error {
						calls++
						if got != test.want || more != test.more {
							t.Errorf("ports are %v and %v, want %v and %v", got, more, test.want, test.more)
						}

						return nil
					})
				})
			}
			set := func(ephemeral string) {
				t.Helper()
				if err := ns.Sysctl("net/ipv4/ip_local_port_range", ephemeral); err != nil {
					t.Fatal(err)
				}
			}
			set(test.ephemeral)
			follow()
			follow()
			if text := out.String(); calls != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, test.log) {
				t.Errorf("ports were set %d times, want once; log is %q, want %q", calls, text, test.log)
			}
			set("40000 50000")
			test.want, test.more = bpf.PortRange{Low: 1024, High: 29999}, bpf.PortRange{Low: 50001, High: 65535}
			follow()
			if calls != 2 {
				t.Error("a change was not followed")
			}
		})
	}
}

// Where packets pass that our programs do not see, the node is not ready, and an Event is recorded for what is new.
func TestUnreachedDevicesAreReported(t *testing.T) {
	cfg, events := recordingConfig()
	m := newDeviceMonitor(nil, cfg.Log, time.Minute, cfg.record)
	m.attached = true
	m.set([]node.Decision{{Device: node.Device{Index: 2, Name: "eth0"}, Class: node.ClassUplink}})
	in := datapath.Unreached{Index: 2, Hook: "ingress", Ahead: []string{"theirs"}}
	out := datapath.Unreached{Index: 2, Hook: "egress", Ahead: []string{"theirs"}}
	for _, found := range [][]datapath.Unreached{nil, {in}, {in}, {out, in}} {
		m.setUnreached(found)
	}
	if _, problems := m.count(); problems != 1 {
		t.Errorf("%d devices have problems, want one", problems)
	}
	want := []string{"device eth0: " + out.String() + "; " + in.String()}
	if got := m.obstacles(); !slices.Equal(got, want) {
		t.Errorf("obstacles are %q, want %q", got, want)
	}
	m.setUnreached(nil)
	if got := m.obstacles(); len(got) > 0 {
		t.Errorf("obstacles are %q, want none", got)
	}
	action := func(reason, note string) kube.Event {
		return kube.Event{Reason: reason, Action: "Check", Note: note, Normal: reason == "DevicesEffective"}
	}
	if diff := cmp.Diff([]kube.Event{
		action("DevicesNotEffective", "device eth0: "+in.String()),
		action("DevicesNotEffective", want[0]),
		action("DevicesEffective", "all devices are effective again"),
	}, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
