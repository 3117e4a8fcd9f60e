package explain

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// An answer promises no more than was looked at: a rule at a hook that is not judged drops every packet, which is not found,
// and the answer says that it did not look there.
func TestNotLookedAt(t *testing.T) {
	ns, other := lab.MustNamespace(t, "beyond"), lab.MustNamespace(t, "other")
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "lan0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.1/24")}},
		lab.End{Namespace: other, Device: "lan0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.2/24")}})
	i := &inquiry{isHost: true}
	i.answer.Reason, i.Protocol = maps.ReasonTranslated, lb.TCP
	i.Endpoints = []Endpoint{{Odds: 1}}
	i.Endpoints[0].Address = netip.MustParseAddrPort("10.244.1.2:8080")
	lab.Must(t, ns.Netfilter("table ip raw { chain POSTROUTING { type filter hook postrouting priority -300; drop; }; }\n"))
	lab.MustDo(t, ns, i.lookBeyond)
	const want = "what rules at PREROUTING, POSTROUTING and ingress hooks, and programs of others at devices (tc, XDP), drop on this node"
	if len(i.Beyond) > 0 || !slices.Contains(i.NotLooked, want) {
		t.Errorf("found: %q; not looked at: %q, want %s", i.Beyond, i.NotLooked, want)
	}
}
