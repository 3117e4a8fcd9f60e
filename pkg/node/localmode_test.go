package node

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func mustPrefixes(t *testing.T, list ...string) []netip.Prefix {
	t.Helper()
	prefixes, err := ParseClusterCIDRs(strings.Join(list, ","))
	if err != nil {
		t.Fatal(err)
	}

	return prefixes
}

func TestParseLocalMode(t *testing.T) {
	for _, text := range []string{"", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"} {
		if mode, err := ParseLocalMode(text); err != nil || string(mode) != text {
			t.Errorf("%q is read as %q, %v", text, mode, err)
		}
	}
	for _, text := range []string{"clustercidr", "ByDevice", " "} {
		if mode, err := ParseLocalMode(text); err == nil {
			t.Errorf("%q is read as %q", text, mode)
		}
	}
}

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

func TestLocalDetector(t *testing.T) {
	cidrs := mustPrefixes(t, "10.244.0.0/16", "fd00::/48")
	twice := mustPrefixes(t, "10.244.0.0/16", "10.245.0.0/16")
	three := mustPrefixes(t, "10.244.0.0/16", "fd00::/48", "fd01::/48")
	for _, test := range []struct {
		name     string
		detector LocalDetector
		mode     LocalMode
		bySource bool
		wrong    string // the flag that the error names; empty: none
	}{
		{"by device if nothing is said", LocalDetector{}, LocalByDevice, false, ""},
		{"by cluster CIDR if only that is said", LocalDetector{ClusterCIDRs: cidrs}, LocalClusterCIDR, true, ""},
		{"by cluster CIDR", LocalDetector{Mode: LocalClusterCIDR, ClusterCIDRs: cidrs[1:]}, LocalClusterCIDR, true, ""},
		{"by cluster CIDR, which is missing", LocalDetector{Mode: LocalClusterCIDR}, LocalClusterCIDR, true, "--cluster-cidr"},
		{"by two of a family", LocalDetector{Mode: LocalClusterCIDR, ClusterCIDRs: twice}, LocalClusterCIDR, true, "--cluster-cidr"},
		{"by two of a family without a mode", LocalDetector{ClusterCIDRs: twice}, LocalClusterCIDR, true, "--cluster-cidr"},
		{"by more than two", LocalDetector{Mode: LocalClusterCIDR, ClusterCIDRs: three}, LocalClusterCIDR, true, "--cluster-cidr"},
		{"by the Node's CIDRs", LocalDetector{Mode: LocalNodeCIDR}, LocalNodeCIDR, true, ""},
		{"by the Node's CIDRs, whatever the cluster's", LocalDetector{Mode: LocalNodeCIDR, ClusterCIDRs: three}, LocalNodeCIDR, true, ""},
		{"by bridge", LocalDetector{Mode: LocalBridgeInterface, BridgeInterface: "cni0"}, LocalBridgeInterface, false, ""},
		{"by bridge, whatever the cluster's CIDRs", LocalDetector{Mode: LocalBridgeInterface, BridgeInterface: "cni0", ClusterCIDRs: twice}, LocalBridgeInterface, false, ""},
		{"by bridge, which is missing", LocalDetector{Mode: LocalBridgeInterface, InterfaceNamePrefix: "veth"}, LocalBridgeInterface, false, "--pod-bridge-interface"},
		{"by name", LocalDetector{Mode: LocalInterfaceNamePrefix, InterfaceNamePrefix: "veth"}, LocalInterfaceNamePrefix, false, ""},
		{"by name, which is missing", LocalDetector{Mode: LocalInterfaceNamePrefix, BridgeInterface: "cni0"}, LocalInterfaceNamePrefix, false, "--pod-interface-name-prefix"},
		{"by no mode there is", LocalDetector{Mode: "Magic"}, "Magic", false, "--detect-local-mode"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.detector.Effective(); got != test.mode {
				t.Errorf("it goes by %q, want %q", got, test.mode)
			}
			if got := test.detector.BySource(); got != test.bySource {
				t.Errorf("by source is %t, want %t", got, test.bySource)
			}
			err := test.detector.Validate()
			if test.wrong == "" && err != nil {
				t.Error(err)
			}
			if test.wrong != "" && (err == nil || !strings.HasPrefix(err.Error(), test.wrong+":")) {
				t.Errorf("the error is %v, want one that begins with %s", err, test.wrong)
			}
		})
	}
}

// Of the local modes, those that go by device become rules.
func TestLocalModeBecomesRules(t *testing.T) {
	only := []Pattern{{Glob: "eth*"}}
	for mode, want := range map[LocalMode]Rules{
		LocalByDevice:            {Only: only},
		LocalClusterCIDR:         {Only: only},
		LocalNodeCIDR:            {Only: only},
		LocalBridgeInterface:     {Only: only, PodBridge: "cbr0"},
		LocalInterfaceNamePrefix: {Only: only, PodPrefix: "cali"},
	} {
		detector := LocalDetector{Mode: mode, BridgeInterface: "cbr0", InterfaceNamePrefix: "cali"}
		if diff := cmp.Diff(want, detector.Rules(Rules{Only: only})); diff != "" {
			t.Errorf("%q (-want +got):\n%s", mode, diff)
		}
	}
}
