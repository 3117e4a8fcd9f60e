package realproxy

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Addresses are in the order of the chain's rules, of which an address may have
// several.
func TestSortByChain(t *testing.T) {
	const chain = `-N KUBE-SERVICES
-A KUBE-SERVICES -d 10.97.0.9/32 -p tcp -m comment --comment "team-9/service-9:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.97.0.0/32 -p udp -m udp --dport 53 -j KUBE-SVC-B
-A KUBE-SERVICES -d 10.97.0.3/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-C
-A KUBE-SERVICES -d 10.97.0.0/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-D
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
`
	got, err := sortByChain(addresses("10.97.0.0", "10.97.0.3", "10.97.0.9"), chain)
	lab.Must(t, err)
	if want := addresses("10.97.0.9", "10.97.0.0", "10.97.0.3"); !slices.Equal(got, want) {
		t.Errorf("the order is %v, want %v", got, want)
	}
	if _, err := sortByChain(addresses("10.97.0.4"), chain); err == nil {
		t.Error("an address without a rule has a place")
	}
}

func addresses(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}

	return all
}
