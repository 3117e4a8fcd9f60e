package status

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"iter"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// ServiceNames returns NAMESPACE/NAME of each Service in the maps, sorted.
func ServiceNames(m maps.Tables) ([]string, error) {
	var names []string
	for e, err := range m.ServicePorts.All() {
		if err != nil {
			return nil, err
		}
		if !e.Value.IsProbe() {
			names = append(names, e.Value.Service())
		}
	}
	slices.Sort(names)

	return slices.Compact(names), nil
}

// Programmed returns the frontends that are in the maps, sorted by Service and address. It
// needs no agent. Incomplete frontends are returned as far as they exist, with a sentence
// about each in problems.
func Programmed(m maps.Tables) ([]Frontend, []string, error) {
	var frontends []Frontend
	var problems []string
	pools := make(map[maps.Pool]programmedPool)
	ranges, err := SourceRanges(m)
	if err != nil {
		return nil, nil, err
	}
	for entry, err := range m.FrontendIDs.All() {
		if err != nil {
			return nil, nil, err
		}
		v, pool, ok, err := m.FrontendOf(entry.Key)
		if err != nil {
			problems = append(problems, err.Error())
		}
		if !ok {
			continue // it was removed meanwhile
		}
		shared, known := pools[pool]
		if !known {
			if shared, err = readPool(m, pool); err != nil {
				return nil, nil, err
			}
			pools[pool] = shared
		}
		f := programmedFrontend(v, pool, shared)
		if pool.Flags&maps.PoolSourceRanges != 0 {
			f.SourceRanges = ranges[pool.ServicePortId]
		}
		frontends = append(frontends, f)
		for _, w := range shared.problems {
			problems = append(problems, fmt.Sprintf("%s: frontend %s: %s", f.Service, f.Key(), w))
		}
	}
	slices.SortFunc(frontends, Frontend.Compare)
	slices.Sort(problems)

	return frontends, problems, nil
}

// SourceRanges returns the sources from which clients may connect to the load balancers' addresses of service ports, by
// their ids, as they are in the maps.
func SourceRanges(m maps.Tables) (map[uint32][]netip.Prefix, error) {
	ranges := make(map[uint32][]netip.Prefix)
	for entry, err := range m.SourceRanges.All() {
		if err != nil {
			return nil, err
		}
		ranges[entry.Key.ServicePortId] = append(ranges[entry.Key.ServicePortId], entry.Key.Prefix())
	}
	for _, prefixes := range ranges {
		slices.SortFunc(prefixes, netip.Prefix.Compare)
	}

	return ranges, nil
}

// programmedPool is what frontends of the same pool have in common: a Service may have 65,536 of them.
type programmedPool struct {
	service  string
	backends []netip.AddrPort
	problems []string
}

func readPool(m maps.Tables, pool maps.Pool) (p programmedPool, err error) {
	port, ok, err := m.ServicePorts.Lookup(pool.ServicePortId)
	if err != nil {
		return p, err
	}
	p.service, p.backends = port.String(), []netip.AddrPort{}
	if !ok {
		p.service = fmt.Sprintf("id %d", pool.ServicePortId)
		p.problems = append(p.problems, "its service port id has no name")
	}
	for i := range pool.SlotCount {
		addr, wrong := slotBackend(m, pool.SlotBase+i, pool.ServicePortId)
		if wrong != "" {
			p.problems = append(p.problems, wrong)

			continue
		}
		p.backends = append(p.backends, addr)
	}
	slices.SortFunc(p.backends, netip.AddrPort.Compare)
	p.problems = append(p.problems, tableProblems(m.Slots, pool)...)

	return p, nil
}

func programmedFrontend(v maps.Frontend, pool maps.Pool, p programmedPool) Frontend {
	f := Frontend{
		Service:         p.service,
		Address:         v.Key.AddrPort(),
		Protocol:        lb.Protocol(v.Key.Proto),
		Scope:           lb.Scope(v.Key.Scope),
		Kind:            lb.Kind(v.Kind),
		AffinitySeconds: pool.AffinitySeconds,
		NodeInRanges:    pool.Flags&maps.PoolNodeInRanges != 0,
		Masquerade:      pool.Flags&maps.PoolMasquerade != 0,
		OptedOut:        pool.Flags&maps.PoolOptedOut != 0,
		Healing:         healingOf(pool.Flags),
		WhenEmpty:       whenEmpty(int(pool.SlotCount), pool.Flags&maps.PoolPassIfEmpty != 0, pool.Flags&maps.PoolDropIfEmpty != 0),
		Backends:        p.backends,
	}
	if v.Key.Port != 0 {
		f.Algorithm = reconcile.AlgorithmText(pool.Algorithm)
	}

	return f
}

// tableProblems returns a problem if the table of a pool is missing, or has a backend that is
// not among the pool's.
func tableProblems(slots *maps.Array[uint32], pool maps.Pool) []string {
	if pool.SlotCount == 0 {
		return nil
	}
	if pool.TableSize == 0 && maps.Hashes(pool.Algorithm) {
		return []string{"it has no table for its algorithm"}
	}
	backends := make(map[uint32]bool, pool.SlotCount)
	for i := range pool.SlotCount {
		backends[slots.Get(pool.SlotBase+i)] = true
	}
	for i := range pool.TableSize {
		if id := slots.Get(pool.TableBase + i); !backends[id] {
			return []string{fmt.Sprintf("slot %d: backend %d is in the table only", pool.TableBase+i, id)}
		}
	}

	return nil
}

// slotBackend returns the address of the backend in slot i, or why it is not valid.
func slotBackend(m maps.Tables, i, servicePortID uint32) (netip.AddrPort, string) {
	id := m.Slots.Get(i)
	b, ok := m.BackendOf(id)
	if !ok {
		return netip.AddrPort{}, fmt.Sprintf("slot %d: backend %d does not exist", i, id)
	}
	if b.ServicePortId != servicePortID {
		return netip.AddrPort{}, fmt.Sprintf("slot %d: backend %d belongs to service port id %d", i, id, b.ServicePortId)
	}

	return b.AddrPort(), ""
}

// ProgrammedServices returns what is in the maps, by Service. It needs no agent, and does not
// know endpoints that get no traffic.
func ProgrammedServices(m maps.Tables) ([]Service, error) {
	frontends, _, err := Programmed(m)
	if err != nil {
		return nil, err
	}
	services := []Service{}
	places := make(map[maps.ServicePort]int)                     // of the ports of the last Service, without their families
	listed := make(map[maps.ServicePort]map[netip.AddrPort]bool) // the backends of these
	read := make(map[*netip.AddrPort]bool)                       // the lists of backends that are in there: a pool is of one port
	for _, f := range frontends {
		if f.Address.Port() == 0 || f.Address.Addr() == datapath.ProbeAddr {
			continue
		}
		name, _, _ := strings.Cut(f.Service, ":")
		if n := len(services); n == 0 || services[n-1].Name != name {
			services = append(services, Service{Name: name})
			clear(places)
			clear(listed)
			clear(read)
		}
		svc, key := &services[len(services)-1], portNamed(f.Service, f.Protocol)
		at, known := places[key]
		if !known {
			at = len(svc.Ports)
			places[key], listed[key] = at, make(map[netip.AddrPort]bool)
			svc.Ports = append(svc.Ports, ServicePort{Name: f.Service, Protocol: f.Protocol, Frontends: []Frontend{}, Backends: []Backend{}})
		}
		port := &svc.Ports[at]
		port.Frontends = append(port.Frontends, f)
		if len(f.Backends) == 0 || read[&f.Backends[0]] {
			continue
		}
		read[&f.Backends[0]] = true
		for _, addr := range f.Backends {
			if !listed[key][addr] {
				listed[key][addr] = true
				port.Backends = append(port.Backends, Backend{Service: f.Service, Protocol: f.Protocol, Address: addr, Active: true})
			}
		}
	}
	known, err := newStates(&m, "")
	if err != nil {
		return nil, err
	}
	for i := range services {
		if err := known.add(&services[i]); err != nil {
			return nil, err
		}
	}

	return services, nil
}

// states finds what the maps have of the backends of Services: their connections, and whether they are suspects. It takes
// few bytes for each, as there may be a million backends.
type states struct {
	tables   *maps.Tables
	seed     maphash.Seed
	ports    []portID // sorted
	backends []uint64 // the id of a service port in the upper half, that of a backend in the lower one; sorted
}

// portID is an id of a service port in the maps, with the hash of its name and protocol.
type portID struct {
	hash uint64
	id   uint32
}

// newStates returns the states of the backends of one Service, or of all for an empty name.
func newStates(m *maps.Tables, service string) (*states, error) {
	s, of := &states{tables: m, seed: maphash.MakeSeed()}, portNamed(service, 0)
	wanted := make(map[uint32]bool) // if not all are
	for e, err := range m.ServicePorts.All() {
		if err != nil {
			return nil, err
		}
		if service != "" && (e.Value.Namespace != of.Namespace || e.Value.Name != of.Name) {
			continue
		}
		if service != "" {
			wanted[e.Key] = true
		}
		if len(s.ports) == cap(s.ports) { // append copies them more often
			s.ports = slices.Grow(s.ports, max(1000, len(s.ports)))
		}
		e.Value.Family = of.Family // the kernel has a name for each family and protocol
		s.ports = append(s.ports, portID{maphash.Comparable(s.seed, e.Value), e.Key})
	}
	slices.SortFunc(s.ports, portID.compare)
	if service == "" {
		s.backends = make([]uint64, 0, m.Backends.Len())
	}
	for _, b := range m.Backends.All() {
		if b.Id != 0 && (service == "" || wanted[b.ServicePortId]) {
			s.backends = append(s.backends, uint64(b.ServicePortId)<<32|uint64(b.Id))
		}
	}
	slices.Sort(s.backends)

	return s, nil
}

func (p portID) compare(other portID) int {
	return cmp.Or(cmp.Compare(p.hash, other.hash), cmp.Compare(p.id, other.id))
}

// portNamed returns a service port, NAMESPACE/NAME:PORT, as the maps have it, but for its family.
func portNamed(text string, protocol lb.Protocol) maps.ServicePort {
	namespace, rest, _ := strings.Cut(text, "/")
	name, port, _ := strings.Cut(rest, ":")

	return maps.ServicePortOf(namespace, name, port, uint8(protocol), 0)
}

// idsOf yields the ids of a service port.
func (s *states) idsOf(port ServicePort) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		hash := maphash.Comparable(s.seed, portNamed(port.Name, port.Protocol))
		first, _ := slices.BinarySearchFunc(s.ports, portID{hash: hash}, portID.compare)
		for _, p := range s.ports[first:] {
			if p.hash != hash || !yield(p.id) {
				return
			}
		}
	}
}

// add sets how many connections each backend of a Service has, and whether it is a suspect.
func (s *states) add(svc *Service) error {
	known := make(map[netip.AddrPort]int)
	for _, port := range svc.Ports {
		clear(known)
		for i := range port.Backends {
			known[port.Backends[i].Address] = i
		}
		for id := range s.idsOf(port) {
			first, _ := slices.BinarySearch(s.backends, uint64(id)<<32)
			for _, pair := range s.backends[first:] {
				if uint32(pair>>32) != id {
					break
				}
				backend, ok := s.tables.BackendOf(uint32(pair))
				at, listed := known[backend.AddrPort()]
				if !ok || !listed || backend.ServicePortId != id {
					continue
				}
				b := &port.Backends[at]
				b.Connections += max(0, s.tables.Loads.Load(backend.Id).Live())
				suspect, err := SuspectOf(s.tables, backend.Id)
				if err != nil {
					return err
				}
				if suspect != nil {
					b.Suspect = suspect
				}
			}
		}
	}

	return nil
}

// SuspectOf returns why the backend with this id is a suspect, or nil if it is none. Suspects exist
// only while healing is on.
func SuspectOf(m *maps.Tables, id uint32) (*Suspect, error) {
	h, known := m.HealthOf(id)
	if !known || !h.IsSuspect() {
		return nil, nil
	}
	boot := time.Now().Add(-time.Duration(maps.Now())) // when the clock of programs was zero
	at := func(ns uint64) time.Time { return boot.Add(time.Duration(ns)).Round(time.Millisecond).UTC() }

	return &Suspect{Reason: maps.HealthCause(h.Cause).String(), Since: at(h.Suspected), Until: at(h.Until)}, nil
}

// healingOf returns how the flags of a pool limit healing.
func healingOf(flags uint16) string {
	switch {
	case flags&maps.PoolNoEject != 0:
		return lb.HealOff.String()
	case flags&maps.PoolNoResteer != 0:
		return lb.HealEject.String()
	}

	return ""
}

// Compare returns a sentence for each difference between what is programmed and what is
// desired.
func Compare(desired, have []Frontend) []string {
	wanted := make(map[lb.FrontendKey]Frontend, len(desired))
	for _, f := range desired {
		wanted[f.Key()] = f
	}
	var differences []string
	for _, h := range have {
		w, ok := wanted[h.Key()]
		if !ok {
			differences = append(differences, fmt.Sprintf("%s: frontend %s is programmed, but no Service has it", h.Service, h.Key()))

			continue
		}
		delete(wanted, h.Key())
		if d := difference(w, h); d != "" {
			differences = append(differences, fmt.Sprintf("%s: frontend %s: %s", w.Service, w.Key(), d))
		}
	}
	for key, w := range wanted {
		differences = append(differences, fmt.Sprintf("%s: frontend %s is not programmed", w.Service, key))
	}
	slices.Sort(differences)

	return differences
}

// difference names the first field in which two frontends differ.
func difference(want, have Frontend) string {
	w, h := reflect.ValueOf(want), reflect.ValueOf(have)
	for i := range w.NumField() {
		a, b := w.Field(i), h.Field(i)
		if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 {
			continue
		}
		if !reflect.DeepEqual(a.Interface(), b.Interface()) {
			name, _, _ := strings.Cut(w.Type().Field(i).Tag.Get("json"), ",")

			return fmt.Sprintf("%s is %v, should be %v", name, b, a)
		}
	}

	return ""
}
