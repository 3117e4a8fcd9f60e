package flows

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestMasquerades(t *testing.T) {
	const (
		local  = "10.180.0.1:80"
		remote = "10.180.1.1:80"
		node   = "192.168.0.2:80"
	)
	pod, twin, socket := path{inPod, false}, path{beyond, false}, path{inPod, true}
	for _, test := range []struct {
		name   string
		source string
		path   path
		target string
		all    bool // masqueradeAll
		masq   bool // of the fixture
		want   bool
	}{
		{"nothing for a pod and a backend here", "10.0.0.2", pod, local, false, false, false},
		{"nothing for a pod and a backend elsewhere", "10.0.0.2", pod, remote, false, false, false},
		{"nothing for a pod, though kube-proxy does", "10.0.0.2", pod, remote, false, true, false},
		{"nothing for an outsider and a backend here", "203.0.113.2", twin, local, false, true, false},
		{"something for an outsider and a backend elsewhere", "203.0.113.2", twin, remote, false, true, true},
		{"something for another node's pod and a backend elsewhere", "10.0.0.2", twin, remote, false, false, true},
		{"nothing for another node's pod and a backend here", "10.0.0.2", twin, local, false, false, false},
		{"something for who is its own backend", "10.180.0.1", pod, local, false, true, true},
		{"nothing for who has another one", "10.180.0.1", pod, remote, false, true, false},
		{"nothing where the node answers", "203.0.113.2", twin, node, false, true, false},
		{"nothing where the node answers, with masqueradeAll", "203.0.113.2", twin, node, true, true, false},
		{"something for a pod with masqueradeAll", "10.0.0.2", pod, local, true, true, true},
		{"nothing for a pod where masqueradeAll means nothing", "10.0.0.2", pod, local, true, false, false},
		{"something for an outsider with masqueradeAll", "203.0.113.2", twin, local, true, true, true},
		{"nothing for a socket", "10.0.0.2", socket, remote, true, true, false},
		{"nothing for what is untouched", "203.0.113.2", twin, "1.2.3.4:80", false, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := masqueradeScenario(test.all)
			f := flow{
				SourceIP: netip.MustParseAddr(test.source), DestIP: netip.MustParseAddr("1.2.3.4"), DestPort: 80,
				Protocol: corev1.ProtocolTCP, Output: []string{local, remote, node}, Masq: test.masq,
			}
			if got := s.masquerades(f, test.path, netip.MustParseAddrPort(test.target)); got != test.want {
				t.Errorf("masquerades: %t", got)
			}
		})
	}
}

func masqueradeScenario(all bool) *scenario {
	here, other := "n", "other"

	return &scenario{
		Node: node{
			Name: here, MasqueradeAll: all,
			LocalCIDR: netip.MustParsePrefix("10.0.0.0/8"),
			LocalIPs:  []netip.Addr{netip.MustParseAddr("192.168.0.2")},
		},
		EndpointSlices: []slice{{Endpoints: []endpoint{
			{Addresses: []string{"10.180.0.1"}, NodeName: &here},
			{Addresses: []string{"10.180.1.1"}, NodeName: &other},
			{Addresses: []string{"192.168.0.2"}, NodeName: &here},
		}}},
	}
}

// Where Sluice and kube-proxy masquerade differently, it must be known why; and
// the fixtures must agree with CONTRACT.md.
func TestMasqueradeRuleAgreesWithFixtures(t *testing.T) {
	why := map[string]int{}
	for _, file := range []string{"../testdata/packetflows.yaml", "../testdata/extra.yaml"} {
		for _, s := range mustRead(t, file) {
			for _, f := range s.Flows {
				if want, sure := s.kubeProxyMasquerades(f); !sure || want != f.Masq {
					t.Errorf("%s / %s: masq is %t, the rule yields %t, sure: %t", s.Name, f.Name, f.Masq, want, sure)
				}
				for _, p := range s.paths(f) {
					for _, text := range slices.DeleteFunc(slices.Clone(f.Output), isRefusal) {
						reason := s.masqueradeDiffers(f, p, netip.MustParseAddrPort(text))
						why[reason]++
						if reason == unknownMasquerade {
							t.Errorf("%s / %s, %s, to %s: masq is %t", s.Name, f.Name, p, text, f.Masq)
						}
					}
				}
			}
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(why)) {
		t.Logf("%4d %s", why[reason], reason)
	}
	for _, reason := range []string{sameMasquerade, preservedBackend, preservedClient, otherNodesPod} {
		if why[reason] == 0 {
			t.Errorf("never: %q", reason)
		}
	}
}

// A path that is missing here would be a flow that is never sent.
func TestPaths(t *testing.T) {
	detected := masqueradeScenario(false)
	undetected := masqueradeScenario(false)
	undetected.Node.LocalCIDR = netip.Prefix{}
	socketNode, deviceNode := path{onNode, true}, path{onNode, false}
	socketPod, devicePod, deviceBeyond := path{inPod, true}, path{inPod, false}, path{beyond, false}
	for _, test := range []struct {
		name           string
		s              *scenario
		source, dialed string
		protocol       corev1.Protocol
		want           []path
	}{
		{"the node's sockets", detected, "192.168.0.2", "1.2.3.4", "TCP", []path{socketNode}},
		{"the node's loopback", detected, "127.0.0.1", "127.0.0.1", "UDP", []path{socketNode}},
		{"the node's packets without hooks", detected, "192.168.0.2", "1.2.3.4", "SCTP", []path{deviceNode}},
		{"a pod, wherever it is", detected, "10.0.0.2", "1.2.3.4", "TCP", []path{socketPod, devicePod, deviceBeyond}},
		{"a pod's packets without hooks", detected, "10.0.0.2", "1.2.3.4", "ICMP", []path{devicePod, deviceBeyond}},
		{"a pod that is surely here", detected, "10.180.0.1", "1.2.3.4", "UDP", []path{socketPod, devicePod}},
		{"an outsider", detected, "203.0.113.2", "1.2.3.4", "TCP", []path{deviceBeyond}},
		{"an outsider that dials itself", detected, "1.2.3.4", "1.2.3.4", "TCP", []path{deviceBeyond}},
		{"any client without a detector", undetected, "203.0.113.2", "1.2.3.4", "TCP", []path{socketPod, devicePod, deviceBeyond}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := flow{SourceIP: netip.MustParseAddr(test.source), DestIP: netip.MustParseAddr(test.dialed), Protocol: test.protocol}
			if got := test.s.paths(f); !slices.Equal(got, test.want) {
				t.Errorf("paths: %v, want %v", got, test.want)
			}
		})
	}
}
