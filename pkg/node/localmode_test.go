package node

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseClusterCIDRs(t *testing.T) {
	got, err := ParseClusterCIDRs("10.244.0.0/16, fd00::/48")
	want := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/48")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("a pair is read as %v, %v", got, err)
	}
	if got, err := ParseClusterCIDRs(""); got != nil || err != nil {
		t.Errorf("nothing is read as %v, %v", got, err)
	}
	for _, text := range []string{"10.244.0.0", "10.244.0.0/16,", "here"} {
		if got, err := ParseClusterCIDRs(text); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

// Some local modes go by the client's address, and some that go by device become rules.
func TestLocalDetector(t *testing.T) {
	only := []Pattern{{Glob: "eth*"}}
	for _, test := range []struct {
		mode     LocalMode
		bySource bool
		rules    Rules
	}{
		{LocalByDevice, false, Rules{Only: only}},
		{LocalClusterCIDR, true, Rules{Only: only}},
		{LocalNodeCIDR, true, Rules{Only: only}},
		{LocalBridgeInterface, false, Rules{Only: only, PodBridge: "cbr0"}},
		{LocalInterfaceNamePrefix, false, Rules{Only: only, PodPrefix: "cali"}},
	} {
		detector := LocalDetector{Mode: test.mode, BridgeInterface: "cbr0", InterfaceNamePrefix: "cali"}
		if got := detector.BySource(); got != test.bySource {
			t.Errorf("%q: by source is %t, want %t", test.mode, got, test.bySource)
		}
		if diff := cmp.Diff(test.rules, detector.Rules(Rules{Only: only})); diff != "" {
			t.Errorf("%q (-want +got):\n%s", test.mode, diff)
		}
	}
}
