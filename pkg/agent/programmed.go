package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Programmed reads what the maps say, sorted by Service and address. It needs
// no agent. Frontends that lead to nowhere are shown with what they have; what
// is wrong with them comes back as problems.
func Programmed(m maps.Tables) ([]Frontend, []string, error) {
	var frontends []Frontend
	var problems []string
	ranges, err := sourceRanges(m)
	if err != nil {
		return nil, nil, err
	}
	for entry, err := range m.Frontends.All() {
		if err != nil {
			return nil, nil, err
		}
		f, wrong, err := programmedFrontend(m, entry.Key, entry.Value)
		if err != nil {
			return nil, nil, err
		}
		if entry.Value.Flags&maps.FrontendSourceRanges != 0 {
			f.SourceRanges = ranges[entry.Value.Id]
		}
		frontends = append(frontends, f)
		for _, w := range wrong {
			problems = append(problems, fmt.Sprintf("%s: frontend %s: %s", f.Service, f.key(), w))
		}
	}
	slices.SortFunc(frontends, compareFrontends)
	slices.Sort(problems)

	return frontends, problems, nil
}

func sourceRanges(m maps.Tables) (map[uint32][]netip.Prefix, error) {
	ranges := make(map[uint32][]netip.Prefix)
	for entry, err := range m.SourceRanges.All() {
		if err != nil {
			return nil, err
		}
		ranges[entry.Key.FrontendId] = append(ranges[entry.Key.FrontendId], entry.Key.Prefix())
	}
	for _, prefixes := range ranges {
		slices.SortFunc(prefixes, netip.Prefix.Compare)
	}

	return ranges, nil
}

func programmedFrontend(m maps.Tables, key maps.FrontendKey, v maps.Frontend) (Frontend, []string, error) {
	f := Frontend{
		Address:         key.AddrPort(),
		Protocol:        lb.Protocol(key.Proto),
		Scope:           lb.Scope(key.Scope),
		Kind:            lb.Kind(v.Kind),
		AffinitySeconds: v.AffinitySeconds,
		NodeInRanges:    v.Flags&maps.FrontendNodeInRanges != 0,
		Masquerade:      v.Flags&maps.FrontendMasquerade != 0,
		WhenEmpty:       whenEmpty(int(v.SlotCount), v.Flags&maps.FrontendDropIfEmpty != 0),
	}
	if key.Port != 0 {
		f.Algorithm = reconcile.AlgorithmText(v.Algorithm)
	}
	var problems []string
	port, ok, err := m.ServicePorts.Lookup(v.Id)
	if err != nil {
		return f, nil, err
	}
	f.Service = port.String()
	if !ok {
		f.Service = fmt.Sprintf("id %d", v.Id)
		problems = append(problems, "its id has no name")
	}
	for i := v.SlotBase; i < v.SlotBase+v.SlotCount; i++ {
		addr, wrong, err := slotBackend(m, i, v.Id)
		if err != nil {
			return f, nil, err
		}
		if wrong != "" {
			problems = append(problems, wrong)

			continue
		}
		f.Backends = append(f.Backends, addr)
	}
	slices.SortFunc(f.Backends, netip.AddrPort.Compare)
	problems = append(problems, tableProblems(m.Slots, v)...)

	return f, problems, nil
}

// tableProblems says what is wrong with the table of a frontend: that somebody is
// in it who is not among its backends.
func tableProblems(slots maps.Slots, v maps.Frontend) []string {
	if v.SlotCount == 0 {
		return nil
	}
	if v.TableSize == 0 && reconcile.Hashes(v.Algorithm) {
		return []string{"it has no table for its algorithm"}
	}
	backends := make(map[uint32]bool, v.SlotCount)
	for i := range v.SlotCount + v.TableSize {
		id, err := slots.Get(v.SlotBase + i)
		switch {
		case err != nil:
			return []string{err.Error()}
		case i < v.SlotCount:
			backends[id] = true
		case !backends[id]:
			return []string{fmt.Sprintf("slot %d: backend %d is in the table only", v.SlotBase+i, id)}
		}
	}

	return nil
}

// slotBackend returns the address of the backend in slot i, or what is wrong
// with it.
func slotBackend(m maps.Tables, i, frontendID uint32) (netip.AddrPort, string, error) {
	id, err := m.Slots.Get(i)
	if err != nil {
		return netip.AddrPort{}, err.Error(), nil
	}
	b, ok, err := m.Backends.Lookup(id)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	if !ok {
		return netip.AddrPort{}, fmt.Sprintf("slot %d: backend %d does not exist", i, id), nil
	}
	if b.FrontendId != frontendID {
		return netip.AddrPort{}, fmt.Sprintf("slot %d: backend %d belongs to id %d", i, id, b.FrontendId), nil
	}

	return b.AddrPort(), "", nil
}

// ProgrammedServices groups what is programmed by Service, for when no agent
// can tell more: endpoints that get no traffic are not among it.
func ProgrammedServices(m maps.Tables) ([]Service, error) {
	frontends, _, err := Programmed(m)
	if err != nil {
		return nil, err
	}
	services := []Service{}
	for _, f := range frontends {
		if f.Address.Port() == 0 || f.Service == probeService.String() {
			continue
		}
		name := f.Service
		if slash := strings.IndexByte(name, '/'); slash >= 0 {
			if colon := strings.IndexByte(name[slash:], ':'); colon >= 0 {
				name = name[:slash+colon]
			}
		}
		if n := len(services); n == 0 || services[n-1].Name != name {
			services = append(services, Service{Name: name})
		}
		addFrontend(&services[len(services)-1], f)
	}

	return services, addConnections(services, m)
}

func addFrontend(svc *Service, f Frontend) {
	i := slices.IndexFunc(svc.Ports, func(p ServicePort) bool {
		return p.Name == f.Service && p.Protocol == f.Protocol
	})
	if i < 0 {
		svc.Ports = append(svc.Ports, ServicePort{Name: f.Service, Protocol: f.Protocol})
		i = len(svc.Ports) - 1
	}
	port := &svc.Ports[i]
	port.Frontends = append(port.Frontends, f)
	for _, addr := range f.Backends {
		known := slices.ContainsFunc(port.Backends, func(b Backend) bool { return b.Address == addr })
		if !known {
			port.Backends = append(port.Backends, Backend{
				Service: f.Service, Protocol: f.Protocol, Address: addr, Active: true,
			})
		}
	}
}
