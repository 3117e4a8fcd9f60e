package explain

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Ask returns the question that an operator has typed: from is empty, an address, or the name of a
// Pod; to is ADDRESS:PORT or SERVICE[:PORT], with /udp or /sctp behind it for other protocols than
// TCP.
func (e *Explainer) Ask(ctx context.Context, from, to, device string) (Question, error) {
	q := Question{Device: device, Protocol: lb.TCP}
	to, fixed := cutProtocol(to, &q.Protocol)
	var err error
	if q.To, err = netip.ParseAddrPort(to); err == nil {
		q.To = netip.AddrPortFrom(q.To.Addr().Unmap(), q.To.Port())
		if q.To.Addr().IsUnspecified() { // as the kernel treats it
			q.To = netip.AddrPortFrom(loopbackOf(q.To.Addr()), q.To.Port())
		}
	} else if _, err := netip.ParseAddr(to); err == nil {
		return q, fmt.Errorf("--to %s: the port is missing", to)
	}
	addresses, err := e.findClients(ctx, from, &q)
	if err != nil {
		return q, err
	}
	if !q.To.IsValid() {
		wanted := lb.IPv4
		if len(addresses) > 0 {
			wanted = lb.FamilyOf(addresses[0])
		}
		if q.To, q.Protocol, err = e.findService(to, q.Protocol, fixed, wanted); err != nil {
			return q, fmt.Errorf("--to %s: %w", to, err)
		}
	}
	if q.To.Port() == 0 {
		return q, fmt.Errorf("--to %s: there is no port 0", to)
	}
	for _, a := range addresses {
		if a.Is4() == q.To.Addr().Is4() {
			q.From = a

			return q, nil
		}
	}
	if len(addresses) > 0 {
		return q, fmt.Errorf("--from %s has no address of the family of %s", from, q.To.Addr())
	}
	if device != "" {
		return q, errors.New("--device: packets need the address of their sender, in --from")
	}

	return q, nil
}

func loopbackOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}

	return netip.IPv6Loopback()
}

// cutProtocol cuts a protocol off, and reports whether there is one.
func cutProtocol(to string, protocol *lb.Protocol) (string, bool) {
	for _, p := range []lb.Protocol{lb.TCP, lb.UDP, lb.SCTP} {
		if rest, ok := strings.CutSuffix(to, "/"+strings.ToLower(p.String())); ok {
			*protocol = p

			return rest, true
		}
	}

	return to, false
}

// findClients returns the addresses of the client; none for a process of this node. It sets the name
// of a Pod.
func (e *Explainer) findClients(ctx context.Context, from string, q *Question) ([]netip.Addr, error) {
	if from == "" {
		return nil, nil
	}
	if addr, err := netip.ParseAddr(from); err == nil {
		return []netip.Addr{addr.Unmap().WithZone("")}, nil
	}
	pods, err := e.agent.Pods(ctx, strings.TrimPrefix(from, "pod/"))
	if errors.Is(err, status.ErrNotRunning) {
		return nil, fmt.Errorf("--from %s: Pods are found by their names by the agent, so use the address: %w", from, err)
	}
	if err != nil {
		return nil, fmt.Errorf("--from %s: %w", from, err)
	}
	switch {
	case len(pods) == 0:
		return nil, fmt.Errorf("--from %s: no Pod of this node is called so", from)
	case len(pods) > 1:
		return nil, fmt.Errorf("--from %s: %d Pods of this node are called so: use NAMESPACE/NAME", from, len(pods))
	case pods[0].Host:
		return nil, nil // a process of this node
	case len(pods[0].Addresses) == 0:
		return nil, fmt.Errorf("--from %s: the Pod has no address yet", from)
	}
	q.Name = "Pod " + pods[0].Name

	return pods[0].Addresses, nil
}

// findService returns the ClusterIP and port of SERVICE[:PORT], of the wanted family if it has one.
// PORT is a number or a name; it may be missing if there is only one. Protocol restricts the ports
// if it is fixed.
func (e *Explainer) findService(text string, protocol lb.Protocol, fixed bool, wanted lb.Family) (netip.AddrPort, lb.Protocol, error) {
	name, port, _ := strings.Cut(text, ":")
	frontends, _, err := status.Programmed(e.maps.Tables)
	if err != nil {
		return netip.AddrPort{}, 0, err
	}
	var found []status.Frontend
	services := map[string]bool{}
	for _, f := range frontends {
		full, portName, _ := strings.Cut(f.Service, ":")
		_, short, _ := strings.Cut(full, "/")
		if f.Kind != lb.KindClusterIP || f.Scope != lb.Internal || f.Address.Port() == 0 || name != full && name != short {
			continue
		}
		services[full] = true
		isPort := port == "" || port == portName || port == strconv.Itoa(int(f.Address.Port()))
		if isPort && (!fixed || f.Protocol == protocol) {
			found = append(found, f)
		}
	}
	switch {
	case len(services) == 0:
		return netip.AddrPort{}, 0, fmt.Errorf("no Service with a ClusterIP is called %q (clients of others connect to what DNS returns)", name)
	case len(services) > 1:
		return netip.AddrPort{}, 0, fmt.Errorf("%d Services are called so: use NAMESPACE/NAME", len(services))
	case len(found) == 0:
		return netip.AddrPort{}, 0, errors.New("the Service has no such port")
	}
	isWanted := func(f status.Frontend) bool { return lb.FamilyOf(f.Address.Addr()) == wanted }
	first := found[max(0, slices.IndexFunc(found, isWanted))]
	var ports []string
	for _, f := range found {
		if f.Address.Addr() == first.Address.Addr() {
			ports = append(ports, fmt.Sprintf("%d/%s", f.Address.Port(), strings.ToLower(f.Protocol.String())))
		}
	}
	if len(ports) > 1 {
		return netip.AddrPort{}, 0, fmt.Errorf("the Service has the ports %s: choose one, as in %s:%s", strings.Join(ports, ", "), name, ports[0])
	}

	return first.Address, first.Protocol, nil
}
