package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

// A decision about a device becomes an entry of the map.
func TestDeviceEntries(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("fd00:50::1")
	for _, test := range []struct {
		name     string
		decision node.Decision
		entry    maps.Device
	}{
		{
			"an uplink with addresses",
			node.Decision{Device: node.Device{Index: 2, LinkLayer: node.LinkEthernet, TakesFrames: true, SourceV4: v4, SourceV6: v6}, Class: node.ClassUplink},
			maps.Device{SourceV4: maps.AddrOf(v4), SourceV6: maps.AddrOf(v6), Flags: maps.DeviceTurns},
		},
		{
			"a pod's",
			node.Decision{Device: node.Device{Index: 5, LinkLayer: node.LinkEthernet, TakesFrames: true, PeerNetns: 3}, Class: node.ClassPods},
			maps.Device{PeerNetns: 3},
		},
		{
			"a tunnel without addresses",
			node.Decision{Device: node.Device{Index: 3, LinkLayer: node.LinkIP}, Class: node.ClassUplink},
			maps.Device{},
		},
		{
			"a pod's on a bridge",
			node.Decision{Device: node.Device{Index: 4, LinkLayer: node.LinkEthernet, SourceV4: v4}, Class: node.ClassPods, Bridge: 7},
			maps.Device{SourceV4: maps.AddrOf(v4), Bridge: 7},
		},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			want := map[uint32]maps.Device{uint32(test.decision.Index): test.entry}
			if diff := cmp.Diff(want, deviceEntries([]node.Decision{test.decision}, true)); diff != "" {
				t.Errorf("maps (-want +got):\n%s", diff)
			}
			test.entry.Flags = 0
			want[uint32(test.decision.Index)] = test.entry
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
	m := newModel(Config{}, parts{})
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
