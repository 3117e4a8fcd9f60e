package agent

import (
	"net/netip"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// backendKey identifies a Backend.
type backendKey struct {
	service  string // namespace/name:port
	protocol lb.Protocol
	address  netip.AddrPort
}

// addConnections sets how many connections each backend has according to the maps.
func addConnections(services []Service, m maps.Tables) error {
	connections, err := readConnections(m)
	if err != nil {
		return err
	}
	for _, svc := range services {
		for _, port := range svc.Ports {
			for i := range port.Backends {
				b := &port.Backends[i]
				b.Connections = connections[backendKey{b.Service, b.Protocol, b.Address}]
			}
		}
	}

	return nil
}

// readConnections returns the connections of the backends that have any.
func readConnections(m maps.Tables) (map[backendKey]int, error) {
	ports := make(map[uint32]maps.ServicePort)
	for e, err := range m.ServicePorts.All() {
		if err != nil {
			return nil, err
		}
		ports[e.Key] = e.Value
	}
	connections := make(map[backendKey]int)
	for _, b := range m.Backends.All() {
		port, known := ports[b.ServicePortId]
		if n := m.Loads.Load(b.Id).Live(); b.Id != 0 && known && n > 0 {
			connections[backendKey{port.String(), lb.Protocol(port.Proto), b.AddrPort()}] += n
		}
	}

	return connections, nil
}
