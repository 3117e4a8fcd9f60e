package reconcile

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// nameless stands for the Service of everything in the maps whose frontend id
// has no name. It is never Set, so it goes at the first Prune.
var nameless = lb.ServiceName{}

// service is one Service: what it claims, and what of it is in the maps.
type service struct {
	name    lb.ServiceName
	created time.Time
	wanted  bool // it was Set, and not deleted since
	adopted bool // found in the maps, and neither Set nor deleted yet

	ports   []*port
	claims  []*claim    // catch-alls last
	leaving []*frontend // in the maps as ours, and maybe claimed by nobody; nil: an empty place

	dirty    bool // publish has something to do
	retry    backoff
	failures []Failure
	place    place
}

// port is one service port in one family: all that a frontend id stands for.
type port struct {
	svc      *service
	name     string
	protocol lb.Protocol
	family   lb.Family

	id    uint32
	named bool // service_ports says so

	wanted    bool // a claim of it has its address
	short     bool // backends that it wants could not be written
	claims    int
	frontends int // in the map with this id
	fenced    int // of these, those with source ranges

	backends []backend // sorted by address
	extents  []*extent
	ranges   []sourceRange
	left     []leftFrontend
	due      instant
}

// sourceRange is one prefix from which the frontends of a port may be dialled.
type sourceRange struct {
	key     maps.SourceRangeKey
	wanted  bool
	written bool
	due     instant
}

// leftFrontend is a UDP frontend that does not lead to its port any more.
type leftFrontend struct {
	key maps.FrontendKey
	due instant
}

// service returns the Service with this name, after making it if need be.
func (r *Reconciler) service(name lb.ServiceName) *service {
	svc := r.services[name]
	if svc == nil {
		svc = &service{name: name}
		r.services[name] = svc
	}

	return svc
}

// portName identifies one port of a Service.
type portName struct {
	name     string
	protocol lb.Protocol
	family   lb.Family
}

func (p *port) portName() portName { return portName{p.name, p.protocol, p.family} }

func (r *Reconciler) addPort(p *port) *port {
	p.svc.ports = append(p.svc.ports, p)
	r.ports[p.id] = p

	return p
}

// empty says whether nothing of svc is in the maps.
func (svc *service) empty() bool { return len(svc.ports) == 0 && len(svc.leaving) == 0 }

// inUse says whether clients can reach p, or should.
func (p *port) inUse() bool { return p.claims > 0 || p.frontends > 0 }

// empty says whether nothing hangs on p's id any more.
func (p *port) empty() bool {
	return !p.inUse() && len(p.backends)+len(p.extents)+len(p.ranges)+len(p.left) == 0
}

// needsRange says whether frontends of p have or shall have source range g.
// Where there shall be no restriction any more, those that still have one need
// all ranges: without, they would let nobody in. WantsRanges is that of p.
func (p *port) needsRange(g *sourceRange, wantsRanges bool) bool {
	if g.wanted {
		return p.wanted || p.fenced > 0
	}

	return p.fenced > 0 && !wantsRanges
}

// replacesRange says whether frontends of p are restricted to other ranges than g.
func (p *port) replacesRange(g *sourceRange, wantsRanges bool) bool {
	return !g.wanted && p.fenced > 0 && wantsRanges
}

// wantsRanges says whether any source range of p is wanted. It goes through them.
func (p *port) wantsRanges() bool {
	return slices.ContainsFunc(p.ranges, func(g sourceRange) bool { return g.wanted })
}

// mayBeUDP says whether connected UDP sockets may have dialled p. Of a port
// without a name, nothing is known.
func (p *port) mayBeUDP() bool { return p.protocol == lb.UDP || p.svc.name == nameless }

// label is what service_ports says of p's id.
func (p *port) label() maps.ServicePort {
	return maps.ServicePortOf(p.svc.name.Namespace, p.svc.name.Name, p.name, uint8(p.protocol), uint8(p.family))
}

// indexRanges returns where in p.ranges each key is.
func (p *port) indexRanges() map[maps.SourceRangeKey]int {
	index := make(map[maps.SourceRangeKey]int, len(p.ranges))
	for i := range p.ranges {
		index[p.ranges[i].key] = i
	}

	return index
}

func compareNames(a, b lb.ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareServices(a, b *service) int { return compareNames(a.name, b.name) }
