package lb

import (
	"reflect"
	"slices"
)

// equal says whether two Services say the same. Lists that are nil and empty
// are not the same: that costs a resolution and changes nothing.
func (s *Service) equal(t *Service) bool {
	if !s.Created.Equal(t.Created) {
		return false
	}
	u := *t
	u.Created = s.Created // the same moment in another time zone
	return reflect.DeepEqual(s, &u)
}

// equal says whether two slices say the same. (It is not left to reflect: a
// relist compares every endpoint of the cluster.)
func (s *EndpointSlice) equal(t *EndpointSlice) bool {
	return s.Name == t.Name && s.Service == t.Service && s.Family == t.Family &&
		slices.Equal(s.Ports, t.Ports) &&
		slices.EqualFunc(s.Endpoints, t.Endpoints, Endpoint.equal)
}

func (e Endpoint) equal(f Endpoint) bool {
	return e.Addr == f.Addr && e.NodeName == f.NodeName && e.Zone == f.Zone &&
		e.Ready == f.Ready && e.Serving == f.Serving && e.Terminating == f.Terminating &&
		slices.Equal(e.ForZones, f.ForZones) && slices.Equal(e.ForNodes, f.ForNodes)
}

func (n *Node) equal(m *Node) bool {
	return n.Name == m.Name && n.Zone == m.Zone && n.MasqueradeAll == m.MasqueradeAll &&
		n.Algorithm == m.Algorithm && n.IgnoreExternalIPs == m.IgnoreExternalIPs &&
		slices.Equal(n.PrimaryIPs, m.PrimaryIPs)
}
