package lb

// externalPolicy returns the external traffic policy, which only counts for a
// Service that clients outside the cluster may reach, by its type or because it has
// external IPs of any family.
func (s *Service) externalPolicy() TrafficPolicy {
	if s.ExternalPolicy != Local || s.Type == ClusterIP && len(s.ExternalIPs) == 0 {
		return Cluster
	}
	return Local
}

// internalPolicy returns the internal traffic policy. It only counts for
// ClusterIPs.
func (s *Service) internalPolicy() TrafficPolicy {
	if s.InternalPolicy == Local {
		return Local
	}
	return Cluster
}

// wantsLocal reports whether one of the policies is Local.
func (s *Service) wantsLocal() bool {
	return s.internalPolicy() == Local || s.externalPolicy() == Local
}
