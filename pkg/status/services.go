package status

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Service is one Service as it is programmed.
type Service struct {
	Name string `json:"name"` // namespace/name
	Type string `json:"type,omitempty"`
	// HealthCheckNodePort is where the agent answers load balancers, 0 if it does not, or if no agent was asked.
	HealthCheckNodePort uint16        `json:"healthCheckNodePort,omitempty"`
	Ports               []ServicePort `json:"ports"`
	Problems            []lb.Problem  `json:"problems,omitempty"`
	Error               string        `json:"error,omitempty"`
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
	// is how clients are refused: "reject" or "drop", or "pass" if their packets go where routes lead them.
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
	// OptedOut is set if sockets of pods are left alone, and devices translate instead.
	OptedOut bool `json:"optedOut,omitempty"`
	// Healing is "off" or "eject" if the Service limits that of the node.
	Healing string `json:"healing,omitempty"`
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
	// Suspect is set while the backend does not answer clients of this node.
	Suspect *Suspect `json:"suspect,omitempty"`
}

// Suspect is why a backend gets no new connections from this node for a while, as long as at most
// half of the backends of a frontend are suspects: see docs/healing.md.
type Suspect struct {
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
	// Until is when it gets the next connection, as a probe.
	Until time.Time `json:"until"`
}

// String returns what the backend does, and for how long it is passed over.
func (s Suspect) String() string {
	if pause := time.Until(s.Until).Round(time.Second); pause > 0 {
		return fmt.Sprintf("suspect: %s; passed over for %v", s.Reason, pause)
	}

	return fmt.Sprintf("suspect: %s; the next connection is a probe", s.Reason)
}

// Selection is how the backends of one frontend were selected among the endpoints of its service
// port.
type Selection struct {
	Policy    string     `json:"trafficPolicy"`
	Endpoints []Endpoint `json:"endpoints"`
	// Error is why the Service is not in the maps as it should be, empty if it is.
	Error string `json:"error,omitempty"`
	// Contested are texts that say what other Services have there, or claim.
	Contested []string `json:"contested,omitempty"`
}

// Endpoint is an endpoint, and whether new flows by one frontend may choose it.
type Endpoint struct {
	Address  netip.AddrPort `json:"address"`
	Node     string         `json:"node,omitempty"`
	Zone     string         `json:"zone,omitempty"`
	Local    bool           `json:"local,omitempty"` // on this node
	Eligible bool           `json:"eligible"`
	Reason   string         `json:"reason,omitempty"` // why it is not
}

// Key returns what identifies the frontend.
func (f Frontend) Key() lb.FrontendKey {
	return lb.FrontendKey{Addr: f.Address.Addr(), Port: f.Address.Port(), Protocol: f.Protocol, Scope: f.Scope}
}

// views converts what the model has of one Service after the other: what it has returned for one is not valid any more when
// the next one begins. Frontends share backends and source ranges in the model, and so do their views: a Service may have
// 65,536 frontends with hundreds of backends.
type views struct {
	memory   lb.Memory // of the resolution
	backends map[list][]netip.AddrPort
	ranges   map[*netip.Prefix][]netip.Prefix
	names    map[lb.PortName]string
	places   map[lb.PortName]int // of the ports

	// The memory of what is returned.
	addrs []netip.AddrPort
	ports []ServicePort
	ends  []portEnds
	front []Frontend
	back  []Backend
}

// portEnds is how many frontends and backends a port has.
type portEnds struct{ frontends, backends int }

// list identifies a list of backends by its memory.
type list struct {
	first *lb.Backend
	len   int
}

func newViews() *views {
	return &views{
		backends: make(map[list][]netip.AddrPort), ranges: make(map[*netip.Prefix][]netip.Prefix),
		names: make(map[lb.PortName]string), places: make(map[lb.PortName]int),
	}
}

// begin begins a Service.
func (v *views) begin() {
	v.backends, v.ranges, v.names, v.places = emptyMap(v.backends), emptyMap(v.ranges), emptyMap(v.names), emptyMap(v.places)
	v.addrs = v.addrs[:0]
}

// emptyMap returns an empty map, which is this one unless it was so large that it takes long to clear.
func emptyMap[K comparable, V any](m map[K]V) map[K]V {
	if len(m) > 100 {
		return make(map[K]V)
	}
	clear(m)

	return m
}

func (v *views) backendsOf(f lb.Frontend) []netip.AddrPort {
	if len(f.Backends) == 0 {
		return []netip.AddrPort{}
	}
	key := list{&f.Backends[0], len(f.Backends)}
	if _, known := v.backends[key]; !known {
		first := len(v.addrs)
		for _, b := range f.Backends {
			v.addrs = append(v.addrs, b.Addr)
		}
		addrs := v.addrs[first:len(v.addrs):len(v.addrs)]
		slices.SortFunc(addrs, netip.AddrPort.Compare)
		v.backends[key] = addrs
	}

	return v.backends[key]
}

// rangesOf returns the source ranges of a frontend, sorted. All frontends of a Service and a family have the same.
func (v *views) rangesOf(f lb.Frontend) []netip.Prefix {
	if len(f.SourceRanges) == 0 {
		return nil
	}
	first := &f.SourceRanges[0]
	if _, known := v.ranges[first]; !known {
		v.ranges[first] = slices.SortedFunc(slices.Values(f.SourceRanges), netip.Prefix.Compare)
	}

	return v.ranges[first]
}

func (v *views) nameOf(port lb.PortName) string {
	name, known := v.names[port]
	if !known {
		name = port.String()
		v.names[port] = name
	}

	return name
}

func (v *views) frontend(f lb.Frontend) Frontend {
	view := Frontend{
		Service:         v.nameOf(f.Port),
		Address:         netip.AddrPortFrom(f.Key.Addr, f.Key.Port),
		Protocol:        f.Key.Protocol,
		Scope:           f.Key.Scope,
		Kind:            f.Kind,
		AffinitySeconds: uint32(f.Affinity / time.Second),
		SourceRanges:    v.rangesOf(f),
		NodeInRanges:    f.NodeInRanges,
		Masquerade:      f.Masquerade,
		OptedOut:        f.OptedOut,
		Backends:        v.backendsOf(f),
	}
	if f.Healing == lb.HealOff || f.Healing == lb.HealEject {
		view.Healing = f.Healing.String()
	}
	if f.Key.Port != 0 {
		view.Algorithm = f.Algorithm.String()
	}
	view.WhenEmpty = whenEmpty(len(f.Backends), f.PassIfEmpty, f.DropIfEmpty)

	return view
}

func whenEmpty(backends int, pass, drop bool) string {
	switch {
	case backends > 0:
		return ""
	case pass:
		return "pass"
	case drop:
		return "drop"
	default:
		return "reject"
	}
}

func (v *views) backend(e lb.EndpointState) Backend {
	b := Backend{
		Service:  v.nameOf(*e.Port),
		Protocol: e.Port.Protocol,
		Address:  e.Addr,
		Node:     e.Place().NodeName,
		Zone:     e.Place().Zone,
		Local:    e.Local,
		Active:   e.Use == lb.Used,
	}
	if !b.Active {
		b.Reason = e.Use.String()
	}

	return b
}

// service converts a Service of the model.
func (v *views) service(snapshot lb.Snapshot, res lb.Resolution) Service {
	v.begin()
	svc := snapshot.Service
	v.ends = slices.Grow(v.ends[:0], len(svc.Ports))[:len(svc.Ports)]
	clear(v.ends)
	for i, port := range svc.Ports {
		v.places[lb.PortName{Service: svc.Name, Port: port.Name, Protocol: port.Protocol}] = i
	}
	for i := range res.Frontends {
		if at, known := v.places[res.Frontends[i].Port]; known { // those of the whole address are of no port
			v.ends[at].frontends++
		}
	}
	for i := range res.Endpoints {
		v.ends[v.places[*res.Endpoints[i].Port]].backends++
	}
	v.ports = slices.Grow(v.ports[:0], 1+len(svc.Ports))
	v.front, v.back = slices.Grow(v.front[:0], 1+len(res.Frontends)), slices.Grow(v.back[:0], 1+len(res.Endpoints)) // never nil
	front, back := v.front[:len(res.Frontends)], v.back[:len(res.Endpoints)]
	for i, port := range svc.Ports {
		n := v.ends[i]
		v.ports = append(v.ports, ServicePort{
			Name: v.nameOf(lb.PortName{Service: svc.Name, Port: port.Name, Protocol: port.Protocol}), Protocol: port.Protocol,
			Frontends: front[:0:n.frontends], Backends: back[:0:n.backends],
		})
		front, back = front[n.frontends:], back[n.backends:]
	}
	view := Service{
		Name: svc.Name.String(), Type: svc.Type.String(), HealthCheckNodePort: svc.HealthCheckNodePort, Ports: v.ports, Problems: res.Problems,
	}
	for i := range res.Frontends {
		if at, known := v.places[res.Frontends[i].Port]; known {
			view.Ports[at].Frontends = append(view.Ports[at].Frontends, v.frontend(res.Frontends[i]))
		}
	}
	for i := range res.Endpoints {
		at := v.places[*res.Endpoints[i].Port]
		view.Ports[at].Backends = append(view.Ports[at].Backends, v.backend(res.Endpoints[i]))
	}
	unjoined := 0
	for i, port := range svc.Ports {
		p, name := &view.Ports[i], lb.PortName{Service: svc.Name, Port: port.Name, Protocol: port.Protocol}
		if len(p.Backends) > 0 || unjoined > mostUnjoined {
			continue // the others are those of a rollout, or of another protocol's port
		}
		for _, family := range svc.Families {
			for _, u := range snapshot.Unjoined(name, family) {
				p.Backends = append(p.Backends, Backend{
					Service: p.Name, Protocol: port.Protocol, Address: u.Addr, Node: u.Place().NodeName, Zone: u.Place().Zone,
					Local: u.Local, Reason: u.Why,
				})
			}
		}
		unjoined += len(p.Backends)
	}

	return view
}

// mostUnjoined is how many endpoints that join with no port are listed, before no other port of the Service lists its own.
const mostUnjoined = 1000

// Compare orders frontends by Service, kind and address.
func (f Frontend) Compare(other Frontend) int {
	return cmp.Or(
		cmp.Compare(f.Service, other.Service),
		cmp.Compare(f.Kind, other.Kind),
		f.Address.Compare(other.Address),
		cmp.Compare(f.Protocol, other.Protocol),
		cmp.Compare(f.Scope, other.Scope),
	)
}

// NameError is the error of a name that no Service has, or several have.
type NameError string

func (e NameError) Error() string { return string(e) }

// OnlyNamed returns only the Service that is called name, see [ServiceNamed].
func OnlyNamed(services []Service, name string) ([]Service, error) {
	var names []string
	for _, svc := range services {
		names = append(names, svc.Name)
	}
	full, err := ServiceNamed(names, name)
	if err != nil {
		return nil, err
	}
	at := slices.Index(names, full)

	return services[at : at+1], nil
}

// ServiceNamed returns NAMESPACE/NAME of the one of these Services that is called name: NAMESPACE/NAME, NAME if no
// other is called so, svc/NAME as for kubectl, or NAME.NAMESPACE, which may end with .svc and the domain of the cluster. Of a
// port behind it, as tables have it, nothing depends. The error is a [NameError] with what there is.
func ServiceNamed(services []string, name string) (string, error) {
	if slices.Contains(services, name) {
		return name, nil
	}
	asked := nameOf(name)
	var found []string
	for _, full := range services {
		if full == asked {
			return full, nil
		}
		if _, short, _ := strings.Cut(full, "/"); short == asked {
			found = append(found, full)
		}
	}
	switch len(found) {
	case 0:
		return "", NameError(fmt.Sprintf("no Service is called %q; there are %s", name, NamesText(similar(slices.Sorted(slices.Values(services)), asked))))
	case 1:
		return found[0], nil
	default:
		return "", NameError(fmt.Sprintf("%d Services are called %q: choose one of %s", len(found), name, NamesText(slices.Sorted(slices.Values(found)))))
	}
}

// nameOf returns [NAMESPACE/]NAME of a Service as [ServiceNamed] understands it, and a text of no such form as it is.
func nameOf(text string) string {
	name, _, _ := strings.Cut(withoutKind(text), ":")
	labels := strings.Split(strings.TrimSuffix(name, "."), ".")
	if !strings.Contains(name, "/") && (len(labels) == 2 || len(labels) > 2 && labels[2] == "svc") {
		return labels[1] + "/" + labels[0]
	}

	return name
}

// InNamespace returns a name that [ServiceNamed] understands with this namespace, if it has none.
func InNamespace(namespace, text string) string {
	short := withoutKind(text)
	if name, _, _ := strings.Cut(short, ":"); strings.ContainsAny(name, "/.") {
		return text
	}

	return namespace + "/" + short
}

// withoutKind returns a name without what kubectl has before it.
func withoutKind(name string) string {
	for _, kind := range []string{"svc/", "service/", "services/"} {
		name = strings.TrimPrefix(name, kind)
	}

	return name
}

// similar returns the names that have most in common with the one that was asked for, the most similar first: those of
// the same Namespace, with a part of the name or the same beginning, or else all.
func similar(services []string, asked string) []string {
	namespace, short, has := strings.Cut(asked, "/")
	if !has {
		namespace, short = "", asked
	}
	begins := func(full string) (n int) { // as the name that was asked for
		_, name, _ := strings.Cut(full, "/")
		for n < min(len(name), len(short)) && name[n] == short[n] {
			n++
		}

		return n
	}
	var found []string
	for _, full := range services {
		of, name, _ := strings.Cut(full, "/")
		if of == namespace || strings.Contains(name, short) || strings.Contains(short, name) || begins(full) > len(short)/2 {
			found = append(found, full)
		}
	}
	switch {
	case len(found) > 0:
		slices.SortStableFunc(found, func(a, b string) int { return cmp.Compare(begins(b), begins(a)) })

		return found
	case len(services) == 0:
		return []string{"none"}
	}

	return services
}

// NamesText returns the first of these names, with the number of the others.
func NamesText(names []string) string {
	const most = 5
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}

	return strings.Join(names, ", ")
}

// ProbeService owns the frontends that [datapath.Verify] dials. No Service of
// the cluster can have its name: a namespace has no dot.
var ProbeService = lb.ServiceName{Namespace: "sluice.internal", Name: "probe"}

// ProbeFrontends returns the reserved frontends of the instance with this [datapath.ProbePort]: one for this port, one for
// that of all instances, and one that refuses all others.
func ProbeFrontends(port uint16) []lb.Frontend {
	frontend := func(port uint16, protocol lb.Protocol) lb.Frontend {
		return lb.Frontend{
			Key:  lb.FrontendKey{Addr: datapath.ProbeAddr, Port: port, Protocol: protocol, Scope: lb.Internal},
			Kind: lb.KindClusterIP,
			Port: lb.PortName{Service: ProbeService, Protocol: protocol},
		}
	}
	frontends := []lb.Frontend{frontend(port, lb.TCP), frontend(datapath.CommonProbePort, lb.TCP), frontend(0, lb.AnyProtocol)}
	for i := range frontends[:2] {
		f := &frontends[i]
		f.Backends, f.Algorithm = []lb.Backend{{Addr: datapath.ProbeBackend}}, lb.Random
		f.Healing = lb.HealOff // no connection to it is answered
	}

	return frontends
}

// Model is a copy of what an agent knows of Services at one moment. Answers are computed from
// it without the agent: thousands of Services take too long for its loop.
type Model struct {
	Snapshots []lb.Snapshot // sorted by name, of all Services or of those that were asked for
	// Resolve returns the resolution of a Service. Any goroutine may call it.
	Resolve  func(lb.Snapshot, *lb.Memory) lb.Resolution
	Problems map[string][]lb.Problem // that were found when objects were read, by object
	Errors   []ServiceError
	Own      []lb.Frontend // the agent's own: see [ProbeFrontends]
	// Owners are the Services that own frontends which another Service claims as well.
	Owners map[lb.FrontendKey]lb.ServiceName
	// Contested are texts that say what other Services than its owner have at a frontend, or claim.
	Contested map[lb.FrontendKey][]string
}

// NewModel returns a Model of Services in these states, without the fields that do not follow from them.
func NewModel(statuses iter.Seq[reconcile.Status]) Model {
	m := Model{
		Errors: ErrorsOf(statuses), Owners: make(map[lb.FrontendKey]lb.ServiceName), Contested: make(map[lb.FrontendKey][]string),
	}
	for s := range statuses {
		for _, l := range s.Lost {
			m.Owners[l.Frontend] = l.Owner
			m.Contested[l.Frontend] = append(m.Contested[l.Frontend], fmt.Sprintf("Service %s claims it, too", s.Service))
		}
		for _, o := range s.Overlaps {
			m.Contested[o.Frontend] = append(m.Contested[o.Frontend], OverlapTexts([]reconcile.Overlap{o})...)
		}
	}
	for _, texts := range m.Contested {
		slices.Sort(texts)
	}

	return m
}

// Services yields every Service, sorted by name, without the connections of its backends. Each is made when its turn comes.
func (m Model) Services() iter.Seq[Service] { return m.services(newViews) }

// services yields them as the views convert them that viewsOf returns for each.
func (m Model) services(viewsOf func() *views) iter.Seq[Service] {
	return func(yield func(Service) bool) {
		failed := map[string][]string{}
		for _, e := range m.Errors {
			failed[e.Service] = append(failed[e.Service], e.Error)
		}
		for _, svc := range m.Snapshots {
			v := viewsOf()
			view := v.service(svc, m.Resolve(svc, &v.memory))
			view.Problems = slices.Concat(m.Problems["Service "+view.Name], view.Problems)
			view.Error = strings.Join(failed[view.Name], "; ")
			if !yield(view) {
				return
			}
		}
	}
}

// Named returns the model of only the Service that is called name, see [ServiceNamed].
func (m Model) Named(name string) (Model, error) {
	var names []string
	for _, svc := range m.Snapshots {
		names = append(names, svc.Service.Name.String())
	}
	name, err := ServiceNamed(names, name)
	if err != nil {
		return m, err
	}
	at := slices.Index(names, name)
	m.Snapshots = m.Snapshots[at : at+1]

	return m, nil
}

// Selection returns how the backends of a frontend were selected, and false if the Service does not
// have it.
func (m Model) Selection(service string, key lb.FrontendKey) (Selection, bool) {
	for _, svc := range m.Snapshots {
		if svc.Service.Name.String() != service {
			continue
		}
		resolution := m.Resolve(svc, &lb.Memory{})
		i := slices.IndexFunc(resolution.Frontends, func(f lb.Frontend) bool { return f.Key == key })
		if i < 0 {
			continue
		}
		f := resolution.Frontends[i]
		selection := Selection{Policy: f.Policy.String(), Endpoints: []Endpoint{}, Contested: m.Contested[key]}
		for _, e := range resolution.Endpoints {
			if *e.Port != f.Port || e.Addr.Addr().Is4() != key.Addr.Is4() {
				continue
			}
			endpoint := Endpoint{Address: e.Addr, Node: e.Place().NodeName, Zone: e.Place().Zone, Local: e.Local, Eligible: e.Uses[f.Policy] == lb.Used}
			if !endpoint.Eligible {
				endpoint.Reason = e.Uses[f.Policy].String()
			}
			selection.Endpoints = append(selection.Endpoints, endpoint)
		}
		if key.Scope == lb.External && f.Kind != lb.KindClusterIP && f.Policy == lb.Cluster && svc.Service.ExternalPolicy == lb.Local {
			selection.Policy = "Local, and no usable endpoint is on this node: those of others (external-failover: fallback)"
		}
		family := lb.FamilyOf(key.Addr)
		for _, u := range svc.Unjoined(f.Port, family) {
			selection.Endpoints = append(selection.Endpoints, Endpoint{
				Address: u.Addr, Node: u.Place().NodeName, Zone: u.Place().Zone, Local: u.Local, Reason: u.Why,
			})
		}
		for _, e := range m.Errors {
			if e.Service == service {
				selection.Error = e.Error
			}
		}

		return selection, true
	}

	return Selection{}, false
}

// Desired yields the frontends that should be in the maps: the agent's own, and those of all Services, without those that
// another Service owns. The lists of one are valid until another Service has its turn.
func (m Model) Desired() iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		convert := newViews()
		for _, f := range m.Own {
			if !yield(convert.frontend(f)) {
				return
			}
		}
		for _, svc := range m.Snapshots {
			convert.begin()
			for _, f := range m.Resolve(svc, &convert.memory).Frontends {
				if owner, ok := m.Owners[f.Key]; ok && owner != svc.Service.Name {
					continue
				}
				if !yield(convert.frontend(f)) {
					return
				}
			}
		}
	}
}
