package lb

import (
	"iter"
	"net/netip"
	"slices"
)

// State is the model: the Services, EndpointSlices and the node as last reported, and
// which Services have been touched by changes. One goroutine at a time may use it.
//
// A State owns the values that it is given: the caller must not change memory that they
// refer to.
type State struct {
	node     *Node // replaced, never changed in place
	services map[ServiceName]*serviceState
	slices   map[SliceName]*EndpointSlice
	touched  []ServiceName // some of them twice
	sctp     int           // Services that have a port of SCTP
	count    int           // of services that are not nil
}

// serviceState is what is known about one name of a Service. Slices may come before the
// Service and stay after it.
type serviceState struct {
	service *Service         // nil: there is none
	slices  []*EndpointSlice // sorted by name; replaced, never changed in place
	touched bool             // its name is among the State's
}

// KubernetesService is the Service whose endpoints are the API servers: each of these keeps itself among them.
var KubernetesService = ServiceName{Namespace: "default", Name: "kubernetes"}

// NewState returns the model of a cluster of which only the node is known.
func NewState(node Node) *State {
	return &State{
		node:     &node,
		services: make(map[ServiceName]*serviceState),
		slices:   make(map[SliceName]*EndpointSlice),
	}
}

// SetService creates or replaces a Service. It does nothing if the Service is equal to
// the known one.
func (s *State) SetService(service Service) {
	known := s.at(service.Name)
	if known.service != nil && known.service.equal(&service) {
		return
	}
	s.countSCTP(known.service, -1)
	s.countSCTP(&service, 1)
	if known.service == nil {
		s.count++
	}
	known.service = &service
	s.touch(service.Name)
}

func (s *State) countSCTP(service *Service, n int) {
	if service != nil && slices.ContainsFunc(service.Ports, func(p ServicePort) bool { return p.Protocol == SCTP }) {
		s.sctp += n
	}
}

// HasSCTP reports whether a Service has a port of SCTP.
func (s *State) HasSCTP() bool { return s.sctp > 0 }

// DeleteService removes a Service, if it is known. Its slices stay.
func (s *State) DeleteService(name ServiceName) {
	known := s.services[name]
	if known == nil || known.service == nil {
		return
	}
	s.touch(name)
	s.countSCTP(known.service, -1)
	known.service = nil
	s.count--
	s.forget(name)
}

// SetSlice creates or replaces an EndpointSlice. It touches its Service, and the one that
// the slice belonged to before. It does nothing if the slice is equal to the known one.
func (s *State) SetSlice(slice EndpointSlice) {
	old := s.slices[slice.Name]
	if old != nil && old.equal(&slice) {
		return
	}
	if old != nil && old.Service != slice.Service {
		s.DeleteSlice(slice.Name)
	}
	s.slices[slice.Name] = &slice
	known := s.at(slice.Service)
	i, found := known.find(slice.Name)
	rest := known.slices[i:]
	if found {
		rest = rest[1:]
	}
	known.slices = slices.Concat(known.slices[:i], []*EndpointSlice{&slice}, rest)
	s.touchSlices(slice.Service)
}

// DeleteSlice removes an EndpointSlice, if it is known.
func (s *State) DeleteSlice(name SliceName) {
	slice := s.slices[name]
	if slice == nil {
		return
	}
	delete(s.slices, name)
	known := s.services[slice.Service]
	if i, found := known.find(name); found {
		known.slices = slices.Concat(known.slices[:i], known.slices[i+1:])
	}
	s.touchSlices(slice.Service)
	s.forget(slice.Service)
}

// SetNode replaces the node. Unless it is equal to the known one, every Service is
// touched.
func (s *State) SetNode(node Node) {
	node.APIServers = s.node.APIServers
	s.replaceNode(node)
}

func (s *State) replaceNode(node Node) {
	if s.node.equal(&node) {
		return
	}
	s.node = &node
	for name := range s.services {
		s.touch(name)
	}
}

// Touched returns the Services that may resolve differently than at the last
// call, sorted by name, including deleted ones.
func (s *State) Touched() []ServiceName {
	names := s.touched
	s.touched = nil
	slices.SortFunc(names, ServiceName.compare)
	names = slices.Compact(names)
	for _, name := range names {
		if known := s.services[name]; known != nil {
			known.touched = false
		}
	}
	return names
}

// Resolve resolves a Service as [Resolve] does. It returns false if there is no such
// Service.
func (s *State) Resolve(name ServiceName) (Resolution, bool) {
	snapshot, exists := s.Snapshot(name)
	if !exists {
		return Resolution{}, false
	}
	return snapshot.Resolve(), true
}

// Snapshot returns a Service with everything that it is resolved from. It returns false if
// there is no such Service.
func (s *State) Snapshot(name ServiceName) (Snapshot, bool) {
	known := s.services[name]
	if known == nil || known.service == nil {
		return Snapshot{}, false
	}
	return Snapshot{known.service, known.slices, s.node}, true
}

// Service returns a Service, or nil if there is none of that name. It is the
// State's own: read only.
func (s *State) Service(name ServiceName) *Service {
	known := s.services[name]
	if known == nil {
		return nil
	}
	return known.service
}

// Slice returns an EndpointSlice, or nil if there is none of that name. It is the
// State's own: read only. Setting one that is equal leaves it as it is.
func (s *State) Slice(name SliceName) *EndpointSlice { return s.slices[name] }

// Len returns the number of Services.
func (s *State) Len() int { return s.count }

// Snapshot is a Service with everything that it is resolved from, as it was at one
// moment. It is small and read only: it refers to memory of the State, which is never
// changed in place. Any goroutine may use it.
type Snapshot struct {
	Service *Service
	slices  []*EndpointSlice
	node    *Node
}

// Resolve resolves the Service as it was then.
func (s Snapshot) Resolve() Resolution { return Resolve(s.Service, s.slices, s.node) }

// ResolveIn is Resolve in memory that was used before: what was resolved in it last is not valid any more.
func (s Snapshot) ResolveIn(m *Memory) Resolution { return resolve(s.Service, s.slices, s.node, m) }

// Size estimates the work of resolving the Service: the number of its frontends, source
// ranges and endpoints, each counted once per port.
func (s Snapshot) Size() int {
	return s.Frontends() + len(s.Service.SourceRanges) + s.Endpoints()
}

// Frontends estimates how many frontends the Service has, without node ports.
func (s Snapshot) Frontends() int {
	addrs := len(s.Service.ClusterIPs) + len(s.Service.LoadBalancers) + len(s.Service.ExternalIPs)
	return scopes * (len(s.Service.Ports)*addrs + len(s.Service.ClusterIPs))
}

// Endpoints estimates how many endpoints the Service has, each counted once per port.
func (s Snapshot) Endpoints() int {
	endpoints := 0
	for _, slice := range s.slices {
		endpoints += len(slice.Endpoints) * max(1, min(len(slice.Ports), len(s.Service.Ports)))
	}
	return endpoints
}

// Snapshots yields every Service, in no order. The State may change between two of them: a Service that is set or deleted
// meanwhile may be left out. The Snapshots stay valid when it changes later.
func (s *State) Snapshots() iter.Seq[Snapshot] {
	return func(yield func(Snapshot) bool) {
		for _, known := range s.services {
			if known.service != nil && !yield(Snapshot{known.service, known.slices, s.node}) {
				return
			}
		}
	}
}

// Compare orders Snapshots by the names of their Services.
func (s Snapshot) Compare(other Snapshot) int { return s.Service.Name.compare(other.Service.Name) }

// at returns the state of a name, which it creates if there is none.
func (s *State) at(name ServiceName) *serviceState {
	known := s.services[name]
	if known == nil {
		known = &serviceState{}
		s.services[name] = known
	}
	return known
}

// touch marks a Service as changed, if there is one of that name.
func (s *State) touch(name ServiceName) {
	if known := s.services[name]; known.service != nil && !known.touched {
		known.touched = true
		s.touched = append(s.touched, name)
	}
}

// touchSlices marks a Service as changed because its slices are. If they are the API servers', all
// others must keep off these.
func (s *State) touchSlices(name ServiceName) {
	s.touch(name)
	if name == KubernetesService {
		node := *s.node
		node.APIServers = endpointAddrs(s.services[name].slices)
		s.replaceNode(node)
	}
}

// endpointAddrs returns the addresses of all endpoints at all ports of slices, sorted, each once.
func endpointAddrs(of []*EndpointSlice) []netip.AddrPort {
	var addrs []netip.AddrPort
	for _, slice := range of {
		for i := range slice.Endpoints {
			for _, port := range slice.Ports {
				addrs = append(addrs, netip.AddrPortFrom(slice.Endpoints[i].Addr, port.Port))
			}
		}
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	return slices.Compact(addrs)
}

// forget deletes the state of a name that has neither a Service nor slices.
func (s *State) forget(name ServiceName) {
	if known := s.services[name]; known.service == nil && len(known.slices) == 0 {
		delete(s.services, name)
	}
}

// find returns the index of a slice, or the index to insert it at and false.
func (s *serviceState) find(name SliceName) (int, bool) {
	return slices.BinarySearchFunc(s.slices, name, func(slice *EndpointSlice, name SliceName) int {
		return slice.Name.compare(name)
	})
}

// The equal methods compare every field by hand: reflect would take some milliseconds for
// long lists, and a relist compares every endpoint of the cluster.

func (s *Service) equal(t *Service) bool {
	return s.Name == t.Name && s.Created.Equal(t.Created) && s.Type == t.Type && s.OtherProxy == t.OtherProxy &&
		s.InternalPolicy == t.InternalPolicy && s.ExternalPolicy == t.ExternalPolicy && s.Failover == t.Failover &&
		s.Affinity == t.Affinity && s.Algorithm == t.Algorithm && s.OptedOut == t.OptedOut && s.Healing == t.Healing && s.HealthCheckNodePort == t.HealthCheckNodePort &&
		slices.Equal(s.ClusterIPs, t.ClusterIPs) && slices.Equal(s.Families, t.Families) &&
		slices.Equal(s.ExternalIPs, t.ExternalIPs) && slices.Equal(s.LoadBalancers, t.LoadBalancers) &&
		slices.Equal(s.SourceRanges, t.SourceRanges) && slices.Equal(s.Ports, t.Ports)
}

func (s *EndpointSlice) equal(t *EndpointSlice) bool {
	return s.Name == t.Name && s.Service == t.Service && s.Family == t.Family &&
		slices.Equal(s.Ports, t.Ports) &&
		slices.Equal(s.Endpoints, t.Endpoints)
}

func (n *Node) equal(m *Node) bool {
	return n.Name == m.Name && n.Zone == m.Zone && n.MasqueradeAll == m.MasqueradeAll &&
		n.Algorithm == m.Algorithm && n.IgnoreExternalIPs == m.IgnoreExternalIPs && n.Limits == m.Limits &&
		slices.Equal(n.PrimaryIPs, m.PrimaryIPs) && slices.Equal(n.Dialed, m.Dialed) && slices.Equal(n.APIServers, m.APIServers)
}
