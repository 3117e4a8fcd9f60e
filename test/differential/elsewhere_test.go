package differential

import (
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// elsewhere is the server that answers by every address that no proxy has
// translated. It is at the default gateway of all: what is untouched is not
// silence.
const (
	elsewhere     = "elsewhere"
	elsewherePort = 7
)

// Its server takes everything to Services that comes to the gateway.
const elsewhereRules = `table inet elsewhere {
	chain prerouting {
		type nat hook prerouting priority dstnat
		iifname "br0" ip daddr { 10.96.0.0/16, 192.168.60.0/24, 192.168.61.0/24 } meta l4proto { tcp, udp } redirect to :%[1]d
		iifname "br0" ip6 daddr { fd00:10:96::/112, fd00:60::/64, fd00:61::/64 } meta l4proto { tcp, udp } redirect to :%[1]d
	}
}
`

// mustAnswerElsewhere starts that server, and shows the gateway the ways back.
func (s *side) mustAnswerElsewhere(t testing.TB) {
	t.Helper()
	lab.Must(t, s.Uplink.Netfilter(fmt.Sprintf(elsewhereRules, elsewherePort)))
	lab.MustServe(t, s.Uplink, elsewhere, fmt.Sprintf("[::]:%d", elsewherePort))
	node := s.Nodes[0]
	for i, via := range hostAddresses(1) {
		lab.Must(t, s.Uplink.AddRoute(node.PodCIDRs[i], via))
	}
	lab.Must(t,
		s.Uplink.AddRoute(outsiders[0], s.Client.IPv4),
		s.Uplink.AddRoute(outsiders[1], s.Client.IPv6))
}
