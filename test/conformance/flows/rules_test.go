package flows

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// What these tests are about are the tests: the rules by which outcomes are checked.

func TestReadNamesWhatItCannotRead(t *testing.T) {
	for _, test := range []struct{ name, old, new, want string }{
		{"a field that it does not know", "zone: za", "zoen: za", `scenario "x": `},
		{"and which one", "zone: za", "zoen: za", `"zoen"`},
		{"a field of a Service", "type: ClusterIP", "typ: ClusterIP", `"typ"`},
		{"a value of the wrong type", "destPort: 80", "destPort: eighty", "destPort"},
		{"a flow without output", ", output: [DROP]", "", `flow "f": output: missing`},
		{"a protocol that it does not know", "protocol: TCP", "protocol: TPC", `flow "f": protocol`},
		{"an output that is none", "[DROP]", "[LOST]", `flow "f": output[0]`},
	} {
		t.Run(test.name, func(t *testing.T) {
			const text = `name: x
node: {name: n, zone: za}
services: [{namespace: ns1, name: s, type: ClusterIP}]
flows: [{name: f, sourceIP: 10.0.0.2, destIP: 1.2.3.4, destPort: 80, protocol: TCP, output: [DROP]}]
`
			if _, err := read(strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
			_, err := read(strings.NewReader(strings.Replace(text, test.old, test.new, 1)))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	two := []string{"10.0.0.1:80", "10.0.0.2:80"}
	for _, test := range []struct {
		name string
		want expected
		seen map[string]int
		ok   bool
	}{
		{"all that may be", expected{outcomes: two}, map[string]int{two[0]: 20, two[1]: 34}, true},
		{"one of two only", expected{outcomes: two}, map[string]int{two[0]: 54}, false},
		{"one too many", expected{outcomes: two[:1]}, map[string]int{two[0]: 30, two[1]: 1}, false},
		{"a rejection", expected{outcomes: []string{reject}}, map[string]int{reject: 31}, true},
		{"dropped instead of rejected", expected{outcomes: []string{reject}}, map[string]int{drop: 31}, false},
		{"rejected late", expected{outcomes: []string{reject}}, map[string]int{reject + " after 2s": 1}, false},
		{"remembered", expected{outcomes: two, sticky: true}, map[string]int{two[1]: 54}, true},
		{"forgotten", expected{outcomes: two, sticky: true}, map[string]int{two[0]: 1, two[1]: 53}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if wrong := test.want.check(test.seen); (wrong == "") != test.ok {
				t.Errorf("check returns %q", wrong)
			}
		})
	}
}

// A refusal and a drop are counted with their reason. Those that are not counted have
// another cause than Sluice.
func TestCheckCounts(t *testing.T) {
	rejected, dropped := expected{outcomes: []string{reject}}, expected{outcomes: []string{drop}}
	for _, test := range []struct {
		name    string
		want    expected
		reason  maps.Reason
		counted uint64
		ok      bool
	}{
		{"rejections", rejected, maps.ReasonRejectNoPort, 31, true},
		{"one rejection too few", rejected, maps.ReasonRejectNoPort, 30, false},
		{"drops", dropped, maps.ReasonDropSourceRange, 31, true},
		{"drops for another reason", dropped, maps.ReasonDropFlowTable, 31, false},
		{"rejections instead of drops", dropped, maps.ReasonRejectNoBackend, 31, false},
		{"connections", expected{outcomes: []string{"10.0.0.1:80"}}, maps.ReasonTranslated, 0, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := map[maps.Reason]uint64{test.reason: 7}
			after := map[maps.Reason]uint64{test.reason: 7 + test.counted}
			if wrong := test.want.checkCounts(31, before, after); (wrong == "") != test.ok {
				t.Errorf("check returns %q", wrong)
			}
		})
	}
}

// One case in 10⁹ may be unlucky: with n+1 targets and k connections, one of them
// stays unseen with a chance of (n+1)·(1-1/(n+1))^k.
func TestAttempts(t *testing.T) {
	for n, want := range map[int]int{1: 31, 2: 54, 3: 77} {
		if got := attempts(n); got != want {
			t.Errorf("attempts(%d) = %d, want %d", n, got, want)
		}
	}
}

// A listed difference needs backends that no fixture names. Where the fixtures
// name them, the rule must have the same result.
func TestNodePortRuleAgreesWithFixtures(t *testing.T) {
	checked := 0
	for _, path := range []string{"../testdata/packetflows.yaml", "../testdata/extra.yaml"} {
		for _, s := range mustRead(t, path) {
			for _, f := range s.Flows {
				svc, port, found := s.nodePort(familyOf(f.DestIP), f.Protocol, f.DestPort)
				if !found || f.DestIP != s.Node.PrimaryIP || !slices.Contains(s.Node.LocalIPs, f.SourceIP) {
					continue
				}
				checked++
				got := s.clusterBackends(svc, port, familyOf(f.DestIP))
				if len(got) == 0 {
					got = []string{reject}
				}
				if !slices.Equal(got, f.Output) {
					t.Errorf("%s / %s: the rule yields %v, the fixture %v", s.Name, f.Name, got, f.Output)
				}
			}
		}
	}
	if checked == 0 {
		t.Error("no flow from the node to a node port")
	}
}

// So must the rule of the Local policy.
func TestLocalRuleAgreesWithFixtures(t *testing.T) {
	checked := 0
	for _, path := range []string{"../testdata/packetflows.yaml", "../testdata/extra.yaml"} {
		for _, s := range mustRead(t, path) {
			for _, f := range s.Flows {
				claims := s.claims(f)
				isOutsider := s.Node.LocalCIDR.IsValid() && !s.Node.LocalCIDR.Contains(f.SourceIP) && !s.Node.has(f.SourceIP)
				if !isOutsider || len(claims) != 1 || claims[0].internal || !claims[0].service.isExternalLocal() || slices.ContainsFunc(f.Output, isRefusal) {
					continue
				}
				checked++
				if got := s.localBackends(claims[0].service, claims[0].port, familyOf(f.DestIP)); !slices.Equal(got, f.Output) {
					t.Errorf("%s / %s: the rule yields %v, the fixture %v", s.Name, f.Name, got, f.Output)
				}
			}
		}
	}
	if checked == 0 {
		t.Error("no flow from outside with a Local policy")
	}
}

func TestSCTPPacket(t *testing.T) {
	p := sctpPacket(61000, 38412, chunkInitAck, "odd")
	from, to, chunk, cookie, err := parseSCTP(slices.Clone(p))
	if err != nil || from != 61000 || to != 38412 || chunk != chunkInitAck || cookie != "odd" || len(p)%4 != 0 {
		t.Errorf("%d to %d, chunk %d, cookie %q: %v", from, to, chunk, cookie, err)
	}
	p[3]++ // a port that was rewritten without its checksum
	if _, _, _, _, err := parseSCTP(p); err == nil {
		t.Error("taken with a wrong checksum")
	}
}
