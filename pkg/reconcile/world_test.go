package reconcile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// world makes random Services that collide, roll and change their policies, and a
// node that has some of their addresses.
type world struct {
	*rand.Rand
	services [6]*worldService
	node     map[netip.Addr]maps.AddrUse
}

// worldService is one Service of a world.
type worldService struct {
	name      lb.ServiceName
	created   time.Time
	exists    bool
	clusterIP int
	ports     int
	dual      bool // IPv6, too
	bare      bool // no ClusterIP
	external  bool
	balancer  bool
	nodePort  bool
	local     bool // externalTrafficPolicy
	ranges    int  // bits: which source ranges
	affinity  time.Duration
	algorithm lb.Algorithm
	endpoints [5]worldEndpoint
}

type worldEndpoint uint8

const (
	absent worldEndpoint = iota
	ready
	draining // serving and terminating
	dead
)

func newWorld(seed uint64) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 0))}
	for i := range w.services {
		w.services[i] = &worldService{name: lb.ServiceName{Namespace: "default", Name: fmt.Sprint("s", i)}}
	}

	return w
}

// chance is true in n of 100 cases.
func (w *world) chance(n int) bool { return w.IntN(100) < n }

// changeNode makes up which addresses the node has.
func (w *world) changeNode() {
	w.node = make(map[netip.Addr]maps.AddrUse)
	for range w.IntN(6) {
		addr := w.services[0].addr(w.IntN(2), 96+w.IntN(3), w.IntN(4))
		use := maps.AddrUse{Ifindex: uint32(1 + w.IntN(2))}
		if w.chance(50) {
			use.Flags = maps.AddrNodePort
		}
		w.node[addr] = use
	}
}

// change makes up something that happens to a Service.
func (w *world) change(i int) *worldService {
	s := w.services[i]
	if !s.exists {
		*s = worldService{name: s.name, exists: true, clusterIP: w.IntN(4), ports: 1 + w.IntN(2)}
		s.created = time.Unix(int64(w.IntN(3)), 0)
	}
	for range 1 + w.IntN(3) {
		w.changeOne(s)
	}

	return s
}

func (w *world) changeOne(s *worldService) {
	switch w.IntN(16) {
	case 0:
		s.ports = w.IntN(3)
	case 1:
		s.dual = !s.dual
	case 2:
		s.external = !s.external
	case 3:
		s.balancer = !s.balancer
	case 4:
		s.nodePort = !s.nodePort
	case 5:
		s.local = !s.local
	case 6:
		s.ranges = w.IntN(8)
	case 7:
		s.affinity = time.Duration(w.IntN(3)) * time.Hour
	case 8: // everything is rolled
		for i := range s.endpoints {
			s.endpoints[i] = worldEndpoint(w.IntN(4))
		}
	case 9:
		s.bare = !s.bare
	case 10, 11:
		s.algorithm = lb.Random + lb.Algorithm(w.IntN(int(lb.Maglev)))
	default:
		s.endpoints[w.IntN(len(s.endpoints))] = worldEndpoint(w.IntN(4))
	}
}

// resolve returns what follows from s.
func (s *worldService) resolve() lb.Resolution {
	var res lb.Resolution
	families := 1
	if s.dual {
		families = 2
	}
	for family := range families {
		for port := range s.ports {
			s.resolvePort(&res, family, port)
		}
		if s.ports > 0 && !s.bare {
			s.catchAll(&res, family)
		}
	}

	return res
}

func (s *worldService) addr(family, net, host int) netip.Addr {
	if family == 0 {
		return netip.AddrFrom4([4]byte{10, byte(net), 0, byte(host)})
	}

	return netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(net), 15: byte(host)})
}

func (s *worldService) portName(port int) lb.PortName {
	return lb.PortName{
		Service: s.name, Port: []string{"http", "dns"}[port],
		Protocol: []lb.Protocol{lb.TCP, lb.UDP}[port],
	}
}

func (s *worldService) resolvePort(res *lb.Resolution, family, port int) {
	all, local := s.backends(res, family, port)
	add := func(kind lb.Kind, addr netip.Addr, number uint16, ranges []netip.Prefix) {
		for _, scope := range []lb.Scope{lb.Internal, lb.External} {
			f := lb.Frontend{
				Key:  lb.FrontendKey{Addr: addr, Port: number, Protocol: s.portName(port).Protocol, Scope: scope},
				Kind: kind, Port: s.portName(port), Backends: all,
				Affinity: s.affinity, Algorithm: s.algorithm, SourceRanges: ranges,
			}
			if s.local && kind != lb.KindClusterIP && scope == lb.External {
				f.Backends, f.DropIfEmpty = local, len(local) == 0
			}
			res.Frontends = append(res.Frontends, f)
		}
	}
	if !s.bare {
		add(lb.KindClusterIP, s.addr(family, 96, s.clusterIP), 80, nil)
	}
	if s.external { // of the same addresses: collisions of kinds
		add(lb.KindExternalIP, s.addr(family, 96, (s.clusterIP+1)%4), 80, nil)
	}
	if s.balancer {
		add(lb.KindLoadBalancer, s.addr(family, 97, s.clusterIP/2), 80, s.sourceRanges(family))
	}
	if s.nodePort {
		addr := netip.IPv4Unspecified()
		if family == 1 {
			addr = netip.IPv6Unspecified()
		}
		add(lb.KindNodePort, addr, uint16(30000+s.clusterIP), nil)
	}
}

func (s *worldService) sourceRanges(family int) []netip.Prefix {
	var ranges []netip.Prefix
	for bit := range 3 {
		if s.ranges&(1<<bit) != 0 {
			ranges = append(ranges, netip.PrefixFrom(s.addr(family, 100+bit, 0), []int{24, 112}[family]))
		}
	}

	return ranges
}

// backends returns which endpoints new flows may use, and reports all.
func (s *worldService) backends(res *lb.Resolution, family, port int) (all, local []lb.Backend) {
	use := draining
	for _, e := range s.endpoints {
		if e == ready {
			use = ready
		}
	}
	name := s.portName(port)
	for i, e := range s.endpoints {
		if e == absent {
			continue
		}
		addr := netip.AddrPortFrom(s.addr(family, int(s.name.Name[1]), i), uint16(8080+port))
		res.Endpoints = append(res.Endpoints, lb.EndpointState{Port: &name, Addr: addr, Alive: e != dead})
		if e != use {
			continue
		}
		b := lb.Backend{Addr: addr, Local: i%2 == 0, Terminating: e == draining}
		all = append(all, b)
		if b.Local {
			local = append(local, b)
		}
	}

	return all, local
}

func (s *worldService) catchAll(res *lb.Resolution, family int) {
	for _, scope := range []lb.Scope{lb.Internal, lb.External} {
		res.Frontends = append(res.Frontends, lb.Frontend{
			Key:  lb.FrontendKey{Addr: s.addr(family, 96, s.clusterIP), Scope: scope},
			Kind: lb.KindClusterIP, Port: lb.PortName{Service: s.name},
		})
	}
}
