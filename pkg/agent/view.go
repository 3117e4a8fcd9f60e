package agent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Status is the state of an agent and its node, which `sluice status` shows.
type Status struct {
	Running bool      `json:"running"` // an agent has answered
	Version string    `json:"version,omitempty"`
	Node    string    `json:"node,omitempty"`
	Source  string    `json:"source,omitempty"` // where Services come from
	Started time.Time `json:"started,omitzero"`
	// Synced is set once all Services and endpoints are known, and programmed except
	// for Errors.
	Synced bool `json:"synced"`

	CgroupRoot string `json:"cgroupRoot"`
	// NotCovered are the sockets of processes that are not below CgroupRoot; empty if
	// all of the machine are.
	NotCovered string `json:"notCovered,omitempty"`
	BPFRoot    string `json:"bpfRoot"`
	// Unpinned is why pins are missing below BPFRoot, empty if none is.
	Unpinned string               `json:"unpinned,omitempty"`
	Hooks    []datapath.HookState `json:"hooks"`
	// Effective is empty if our programs refuse a connection to a reserved address, else
	// it is what happened instead.
	Effective string `json:"effective,omitempty"`

	Devices []Device `json:"devices"`
	// ThroughStack is why packets to backends on other nodes pass this node's network stack;
	// empty if they need not. Only an agent knows it.
	ThroughStack string `json:"throughStack,omitempty"`

	Services int               `json:"services"`
	Maps     []MapFill         `json:"maps"`
	Counts   map[string]uint64 `json:"counts"` // by reason
	Flows    flow.Status       `json:"flows"`
	// Writes is how often the agent wrote to each map since it started.
	Writes map[string]uint64 `json:"writes,omitempty"`

	Problems []lb.Problem   `json:"problems"` // parts of objects that were left out
	Errors   []ServiceError `json:"errors"`   // Services that are not as they should be in the maps
}

// MapFill is how full a map is.
type MapFill struct {
	Name     string `json:"name"`
	Entries  int    `json:"entries"`
	Capacity int    `json:"capacity"`
}

// ServiceError is a Service that could not be programmed in full.
type ServiceError struct {
	Service string    `json:"service"`
	Error   string    `json:"error"`
	Retry   time.Time `json:"retry,omitzero"`
}

// Service is one Service as it is programmed.
type Service struct {
	Name     string        `json:"name"` // namespace/name
	Type     string        `json:"type,omitempty"`
	Ports    []ServicePort `json:"ports"`
	Problems []lb.Problem  `json:"problems,omitempty"`
	Error    string        `json:"error,omitempty"`
}

// ServicePort is one port of a Service.
type ServicePort struct {
	Name      string      `json:"name"` // namespace/name:port
	Protocol  lb.Protocol `json:"protocol"`
	Frontends []Frontend  `json:"frontends"`
	Backends  []Backend   `json:"backends"`
}

// Frontend is one address that clients can dial.
type Frontend struct {
	Service  string         `json:"service"` // namespace/name:port
	Address  netip.AddrPort `json:"address"`
	Protocol lb.Protocol    `json:"protocol"`
	Scope    lb.Scope       `json:"scope"`
	Kind     lb.Kind        `json:"kind"`
	// Backends are the addresses that new flows go to. If there are none, WhenEmpty
	// is how clients are refused: "reject" or "drop".
	Backends  []netip.AddrPort `json:"backends"`
	WhenEmpty string           `json:"whenEmpty,omitempty"`
	// Algorithm chooses among Backends; a catch-all has none.
	Algorithm       string         `json:"algorithm,omitempty"`
	AffinitySeconds uint32         `json:"affinitySeconds,omitempty"`
	SourceRanges    []netip.Prefix `json:"sourceRanges,omitempty"`
	// NodeInRanges is set if SourceRanges contain the node's own address.
	NodeInRanges bool `json:"nodeInRanges,omitempty"`
	// Masquerade is set if backends see this node as the client.
	Masquerade bool `json:"masquerade,omitempty"`
}

// Backend is one endpoint of a service port.
type Backend struct {
	Service  string         `json:"service"` // namespace/name:port
	Protocol lb.Protocol    `json:"protocol"`
	Address  netip.AddrPort `json:"address"`
	Node     string         `json:"node,omitempty"`
	Zone     string         `json:"zone,omitempty"`
	Local    bool           `json:"local"`
	Active   bool           `json:"active"`
	Reason   string         `json:"reason,omitempty"` // why it is not active
	// Connections are those that clients translated by this node have to it, by any
	// address of the Service: see [maps.BackendLoad].
	Connections int `json:"connections"`
}

// frontendKey identifies a Frontend.
type frontendKey struct {
	address  netip.AddrPort
	protocol lb.Protocol
	scope    lb.Scope
}

func (f Frontend) key() frontendKey { return frontendKey{f.Address, f.Protocol, f.Scope} }

func (k frontendKey) String() string {
	return fmt.Sprintf("%s/%s %s", k.address, k.protocol, k.scope)
}

// frontendOf converts a frontend of the model.
func frontendOf(f lb.Frontend) Frontend {
	view := Frontend{
		Service:         f.Port.String(),
		Address:         netip.AddrPortFrom(f.Key.Addr, f.Key.Port),
		Protocol:        f.Key.Protocol,
		Scope:           f.Key.Scope,
		Kind:            f.Kind,
		AffinitySeconds: uint32(f.Affinity / time.Second),
		SourceRanges:    slices.SortedFunc(slices.Values(f.SourceRanges), netip.Prefix.Compare),
		NodeInRanges:    f.NodeInRanges,
		Masquerade:      f.Masquerade,
	}
	for _, b := range f.Backends {
		view.Backends = append(view.Backends, b.Addr)
	}
	if f.Key.Port != 0 {
		view.Algorithm = f.Algorithm.String()
	}
	slices.SortFunc(view.Backends, netip.AddrPort.Compare)
	view.WhenEmpty = whenEmpty(len(f.Backends), f.DropIfEmpty)

	return view
}

func whenEmpty(backends int, drop bool) string {
	switch {
	case backends > 0:
		return ""
	case drop:
		return "drop"
	default:
		return "reject"
	}
}

func backendOf(e lb.EndpointState) Backend {
	b := Backend{
		Service:  e.Port.String(),
		Protocol: e.Port.Protocol,
		Address:  e.Addr,
		Node:     e.NodeName,
		Zone:     e.Zone,
		Local:    e.Local,
		Active:   e.Use == lb.Used,
	}
	if !b.Active {
		b.Reason = e.Use.String()
	}

	return b
}

// serviceOf converts a Service of the model.
func serviceOf(svc *lb.Service, res lb.Resolution) Service {
	view := Service{Name: svc.Name.String(), Type: svc.Type.String(), Problems: res.Problems}
	for _, port := range svc.Ports {
		name := lb.PortName{Service: svc.Name, Port: port.Name, Protocol: port.Protocol}
		p := ServicePort{Name: name.String(), Protocol: port.Protocol}
		for _, f := range res.Frontends {
			if f.Port == name {
				p.Frontends = append(p.Frontends, frontendOf(f))
			}
		}
		for _, e := range res.Endpoints {
			if e.Port == name {
				p.Backends = append(p.Backends, backendOf(e))
			}
		}
		view.Ports = append(view.Ports, p)
	}

	return view
}

func countsOf(counts map[maps.Reason]uint64) map[string]uint64 {
	named := make(map[string]uint64, len(counts))
	for reason, n := range counts {
		named[reason.String()] = n
	}

	return named
}

func compareFrontends(a, b Frontend) int {
	return cmp.Or(
		cmp.Compare(a.Service, b.Service),
		cmp.Compare(a.Kind, b.Kind),
		a.Address.Compare(b.Address),
		cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Scope, b.Scope),
	)
}
