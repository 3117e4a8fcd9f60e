package lb

import (
	"reflect"
	"slices"
	"time"
)

// equal reports whether two Services are equal. Lists are compared without reflect, which
// would take some milliseconds for long ones.
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
		w.Created = time.Time{} // compared above: it may be the same moment in another time zone
		w.ClusterIPs, w.Families, w.ExternalIPs = nil, nil, nil
		w.LoadBalancers, w.SourceRanges, w.Ports = nil, nil, nil
	}
	return reflect.DeepEqual(&u, &v)
}

// equal reports whether two slices are equal. It does without reflect, because a relist
// compares every endpoint of the cluster.
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
