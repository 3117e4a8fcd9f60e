package lb

import (
	"reflect"
	"slices"
	"time"
)

// equal says whether two Services say the same. (Lists may be long: reflect would
// take some milliseconds for them. What has no list is left to it.)
func (s *Service) equal(t *Service) bool {
	if !s.Created.Equal(t.Created) ||
		!slices.Equal(s.ClusterIPs, t.ClusterIPs) ||
		!slices.Equal(s.Families, t.Families) ||
		!slices.Equal(s.ExternalIPs, t.ExternalIPs) ||
		!slices.Equal(s.LoadBalancers, t.LoadBalancers) ||
		!slices.Equal(s.SourceRanges, t.SourceRanges) ||
		!slices.Equal(s.Ports, t.Ports) {
		return false
	}
	u, v := *s, *t
	for _, w := range []*Service{&u, &v} {
		w.Created = time.Time{} // may be the same moment in another time zone
		w.ClusterIPs, w.Families, w.ExternalIPs = nil, nil, nil
		w.LoadBalancers, w.SourceRanges, w.Ports = nil, nil, nil
	}
	return reflect.DeepEqual(&u, &v)
}

// equal says whether two slices say the same. (It is not left to reflect: a
// relist compares every endpoint of the cluster.)
func (s *EndpointSlice) equal(t *EndpointSlice) bool {
	return s.Name == t.Name && s.Service == t.Service && s.Family == t.Family &&
		slices.Equal(s.Ports, t.Ports) &&
		slices.Equal(s.Endpoints, t.Endpoints)
}

func (n *Node) equal(m *Node) bool {
	return n.Name == m.Name && n.Zone == m.Zone && n.MasqueradeAll == m.MasqueradeAll &&
		n.Algorithm == m.Algorithm && n.IgnoreExternalIPs == m.IgnoreExternalIPs && n.Limits == m.Limits &&
		slices.Equal(n.PrimaryIPs, m.PrimaryIPs)
}
