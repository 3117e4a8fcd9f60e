package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// row is a row of kube-proxy's contract and what shows it: tests of this package,
// and of others by their folder. A row without tests has the reason.
type row struct {
	number, feature string
	tests           string
	why             string
}

// rows are those of CONTRACT.md, 1.6 to 1.12, and those on topology.
var rows = []row{
	{number: "1.4.1", feature: "Inputs", tests: "TestZoneHints TestNodeHints TestTrafficDistributions"},
	{number: "1.4.2", feature: "Mode decision", tests: "TestZoneHints TestNodeHints pkg/lb.TestHints"},
	{number: "1.4.3", feature: "Filter", tests: "TestZoneHints TestNodeHints"},
	{number: "1.4.4", feature: "Fallback list", tests: "TestZoneHints TestNodeHints"},
	{number: "1.4.5", feature: "Scope", tests: "TestZoneHints TestNodeHints"},
	{number: "1.4.6", feature: "Producer rules", tests: "TestZoneHints TestNodeHints TestTrafficDistributions"},
	{number: "1.4.7", feature: "Zone label change", tests: "TestZoneHints"},

	{number: "1.6.1", feature: "Unused port of a live ClusterIP", tests: "TestUnusedPorts TestPing"},
	{number: "1.6.2", feature: "Unallocated address in a ServiceCIDR", tests: "TestUnallocatedAddress TestServiceCIDRAtRunTime TestPing"},
	{number: "1.6.3", feature: "No endpoints", tests: "TestNoEndpoints"},
	{number: "1.6.4", feature: "ClusterIP from outside the cluster", tests: "TestClusterIPFromOutside"},
	{number: "1.6.5", feature: "Protocols", tests: "TestProtocols test/devices.TestSCTP"},

	{number: "1.7.1", feature: "Addresses", tests: "TestNodePortAddresses TestNodePortsEverywhere"},
	{number: "1.7.2", feature: "primary", tests: "TestNodePortAddresses TestNodePortsWithoutNodeIPs"},
	{number: "1.7.3", feature: "Per-family default", tests: "TestNodePortAddresses TestNodePortsWithoutNodeIPs"},
	{number: "1.7.4", feature: "match-all", tests: "TestNodePortsEverywhere"},
	{number: "1.7.5", feature: "CIDR list", tests: "TestNodePortAddresses"},
	{number: "1.7.6", feature: "localhost NodePorts", tests: "TestLocalhostNodePorts TestLocalhostNodePortsOfAList TestNodePortsEverywhere"},
	{number: "1.7.7", feature: "Source ranges", tests: "TestSourceRanges"},
	{number: "1.7.8", feature: "No endpoints", tests: "TestNodePortWithoutEndpoints TestNodePortAddresses"},
	{number: "1.7.9", feature: "Precedence", tests: "TestNodePortPrecedence TestNodePortAddresses"},
	{number: "1.7.10", feature: "Other node's NodePort", tests: "TestOtherNodesNodePort"},

	{number: "1.8.1", feature: "Short-circuit", tests: "TestLoadBalancer"},
	{number: "1.8.2", feature: "Unused port on VIP/external IP", tests: "TestUnusedPortsOfVirtualIPs"},
	{number: "1.8.3", feature: "VIP:nodePort", tests: "TestUnusedPortsOfVirtualIPs TestNodePortsEverywhere"},
	// Garbage does not pass a real API server.
	{number: "1.8.4", feature: "Source ranges: parsing", tests: "TestSourceRanges pkg/lb.TestSourceRanges"},
	{number: "1.8.5", feature: "Source ranges: scope", tests: "TestSourceRanges"},
	{number: "1.8.6", feature: "Source ranges: cluster-internal sources", tests: "TestSourceRanges"},
	{number: "1.8.7", feature: "Node's own traffic", tests: "TestSourceRangesOfTheNode TestSourceRanges"},
	{number: "1.8.8", feature: "Order versus endpoints", tests: "TestSourceRangesWithoutEndpoints"},
	{number: "1.8.9", feature: "healthCheckNodePort – when", tests: "TestHealthCheckNodePort TestHealthCheckNodePortComesAndGoes"},
	{number: "1.8.10", feature: "– listen addresses", tests: "TestHealthCheckNodePortComesAndGoes"},
	{number: "1.8.11", feature: "– answer", tests: "TestHealthCheckNodePort pkg/health.TestServiceAnswer"},
	{number: "1.8.12", feature: "– count", tests: "TestHealthCheckNodePort"},
	{number: "1.8.13", feature: "– life cycle", tests: "TestHealthCheckNodePortComesAndGoes TestHealthCheckNodePortIsTaken"},
	{number: "1.8.14", feature: "– firewall",
		why: "it is a rule of kube-proxy's iptables mode; Sluice has no rules, and nftables mode has none for this"},

	{number: "1.9.1", feature: "Key", tests: "TestAffinityIsShared"},
	{number: "1.9.2", feature: "Timeout", tests: "TestAffinityTimeout"},
	{number: "1.9.3", feature: "Lookup", tests: "TestAffinityWithinPolicies"},
	{number: "1.9.4", feature: "Terminating", tests: "TestAffinityOfLeavingBackends"},
	{number: "1.9.5", feature: "Several memories", tests: "TestAffinityWithinPolicies"},
	{number: "1.9.6", feature: "Masqueraded clients", tests: "TestAffinityIsShared"},
	{number: "1.9.7", feature: "Scope", tests: "TestAffinityOutlivesTheAgent"},
	{number: "1.9.8", feature: "Switching", tests: "TestAffinitySwitch TestConnectionsOutlivePolicies"},
	{number: "1.9.9", feature: "Limits",
		why: "it is the size of a kernel set that Sluice does not have; its own map forgets the oldest client, see maps.TestCapacities"},
	{number: "1.9.10", feature: "UDP", tests: "TestAffinityUDP"},

	{number: "1.10.1", feature: "Algorithm", tests: "TestEvenShares"},
	{number: "1.10.2", feature: "Per flow", tests: "TestOneBackendPerFlow bpf.TestFirstPacketAgain"},
	{number: "1.10.3", feature: "ICMP errors / fragments", tests: "TestBigDatagrams test/devices.TestPathMTUToBackend test/devices.TestPathMTUToClient"},
	{number: "1.10.4", feature: "Both directions", tests: "TestLoadBalancer TestClusterIPFromOutside test/devices.TestServices"},

	{number: "1.11.1", feature: "Start gate", tests: "TestStartWaitsForServicesAndSlices"},
	{number: "1.11.2", feature: "TCP/SCTP on endpoint removal", tests: "TestConnectionsOutliveEndpoints"},
	{number: "1.11.3", feature: "Policy/affinity/range changes", tests: "TestConnectionsOutlivePolicies TestProxyName TestFamiliesOfAService"},
	{number: "1.11.4", feature: "Atomicity", tests: "TestSwitchUnderLoad TestRollingUpdate"},
	{number: "1.11.5", feature: "External tampering", tests: "TestTampering"},

	{number: "1.12.1", feature: "Trigger", tests: "TestUDPMoves TestUDPServiceGoes"},
	{number: "1.12.2", feature: "What is deleted", tests: "TestUDPMoves TestUDPBeforeReady TestAddressReuse"},
	{number: "1.12.3", feature: "What is kept", tests: "TestUDPMoves TestUDPServiceGoes"},
	{number: "1.12.4", feature: "Side effects", tests: "TestUDPStays"},
	{number: "1.12.5", feature: "Timing seen", tests: "TestUDPMoves TestRollingUpdate"},
	{number: "1.12.6", feature: "Errors",
		why: "it is a dump of netfilter's table, which Sluice does not read; its own sweep goes on where it was, see pkg/flow.TestStalePutBack"},
	{number: "1.12.7", feature: `"unready → ready" race`, tests: "TestUDPBeforeReady"},

	// What the other sections have that only real objects can show.
	{number: "1.1.1", feature: "Services watched", tests: "TestProxyName"},
	{number: "1.1.4", feature: "Family selection", tests: "TestFamiliesOfAService"},
	{number: "1.1.7", feature: "LB VIPs", tests: "TestIPModeProxy"},
	{number: "1.1.8", feature: "allocateLoadBalancerNodePorts=false", tests: "TestNoNodePorts"},
	{number: "1.2.7", feature: "Duplicates", tests: "TestAddressListedTwice TestAddressReuse"},
	{number: "1.3.1", feature: "Cluster endpoints", tests: "TestAllPodsLeave TestRollingUpdate"},
}

// counts are how many rows the sections have that are here as a whole.
var counts = map[string]int{"1.4": 7, "1.6": 5, "1.7": 10, "1.8": 14, "1.9": 10, "1.10": 4, "1.11": 5, "1.12": 7}

func TestRows(t *testing.T) {
	seen := make(map[string]int)
	var numbers []string
	for _, r := range rows {
		if slices.Contains(numbers, r.number) {
			t.Errorf("%s is here twice", r.number)
		}
		numbers = append(numbers, r.number)
		seen[r.number[:strings.LastIndex(r.number, ".")]]++
		if (r.tests == "") == (r.why == "") {
			t.Errorf("%s: want tests, or why there are none", r.number)
		}
		for name := range strings.FieldsSeq(r.tests) {
			if !exists(t, name) {
				t.Errorf("%s: there is no test %s", r.number, name)
			}
		}
		t.Logf("%s %s: %s%s", r.number, r.feature, r.tests, r.why)
	}
	for section, want := range counts {
		if seen[section] != want {
			t.Errorf("%s has %d rows here, want %d", section, seen[section], want)
		}
	}
}

// Where the contract lies beside the tree, its rows are those here, by number and
// by name.
func TestRowsAreTheContracts(t *testing.T) {
	text, err := os.ReadFile("../../../shared/CONTRACT.md")
	if err != nil {
		t.Skipf("the contract is not here: %v", err)
	}
	features := make(map[string]string)
	for _, match := range regexp.MustCompile(`(?m)^\| (1\.\d+\.\d+) \| ([^|]+) \|`).FindAllStringSubmatch(string(text), -1) {
		features[match[1]] = match[2]
	}
	for _, r := range rows {
		if features[r.number] != r.feature {
			t.Errorf("%s is %q here, %q there", r.number, r.feature, features[r.number])
		}
		delete(features, r.number)
	}
	for number, feature := range features {
		if _, whole := counts[number[:strings.LastIndex(number, ".")]]; whole {
			t.Errorf("%s (%s) is not here", number, feature)
		}
	}
}

// exists finds a test by its name in a row.
func exists(t *testing.T, name string) bool {
	t.Helper()
	folder, function, elsewhere := strings.Cut(name, ".")
	if !elsewhere {
		folder, function = "test/conformance", name
	}
	files, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func ` + function + `\(t \*testing\.T\)`)

	return slices.ContainsFunc(files, func(path string) bool {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}

		return declared.Match(text)
	})
}
