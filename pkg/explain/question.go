package explain

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Ask returns the question that an operator has typed: from is empty, an address, which may have a port, or the name
// of a Pod; to is ADDRESS:PORT or SERVICE[:PORT], with the protocol behind it, as in /udp, if it is not TCP. A Service is
// named as [status.ServiceNamed] understands it.
func (e *Explainer) Ask(from, to, device string) (Question, error) {
	q := Question{Device: device, Protocol: lb.TCP}
	asked, fixed := to, false // fixed: the protocol is given
	for _, p := range []lb.Protocol{lb.TCP, lb.UDP, lb.SCTP} {
		if at := strings.LastIndex(to, "/"); at >= 0 && strings.EqualFold(to[at+1:], p.String()) {
			to, q.Protocol, fixed = to[:at], p, true

			break
		}
	}
	if port, is := strings.CutPrefix(to, "localhost:"); is {
		to = "127.0.0.1:" + port
	}
	var err error
	if q.To, err = netip.ParseAddrPort(to); err == nil {
		q.To = netip.AddrPortFrom(q.To.Addr().Unmap(), q.To.Port())
		switch q.To.Addr() { // as the kernel treats them
		case netip.IPv4Unspecified():
			q.To = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), q.To.Port())
		case netip.IPv6Unspecified():
			q.To = netip.AddrPortFrom(netip.IPv6Loopback(), q.To.Port())
		}
	} else if _, err := netip.ParseAddr(strings.Trim(to, "[]")); err == nil {
		return q, fmt.Errorf("--to %s: the port is missing, as in %s", asked, netip.AddrPortFrom(netip.MustParseAddr(strings.Trim(to, "[]")), 80))
	}
	addresses, err := e.findClients(from, &q)
	if err != nil {
		return q, err
	}
	if !q.To.IsValid() {
		wanted := lb.IPv4
		if len(addresses) > 0 {
			wanted = lb.FamilyOf(addresses[0])
		}
		if q.To, q.Protocol, err = e.findService(to, q.Protocol, fixed, wanted); err != nil {
			return q, fmt.Errorf("--to %s: %w", asked, err)
		}
	}
	if q.To.Port() == 0 {
		return q, fmt.Errorf("--to %s: there is no port 0", asked)
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

// findClients returns the addresses of the client; none for a process of this node. It sets the name
// of a Pod.
func (e *Explainer) findClients(from string, q *Question) ([]netip.Addr, error) {
	if from == "" {
		return nil, nil
	}
	if addr, err := netip.ParseAddr(strings.Trim(from, "[]")); err == nil {
		return []netip.Addr{addr.Unmap().WithZone("")}, nil
	}
	if client, err := netip.ParseAddrPort(from); err == nil { // as monitor and connections show it
		return []netip.Addr{client.Addr().Unmap().WithZone("")}, nil
	}
	all, err := pods.Read(e.Pods)
	if err != nil {
		return nil, fmt.Errorf("--from %s: %w", from, err)
	}
	found, err := all.Find(strings.TrimPrefix(from, "pod/"))
	switch {
	case errors.Is(err, pods.ErrNoPod):
		return nil, fmt.Errorf("--from %s: no Pod of this node is called so", from)
	case errors.Is(err, pods.ErrNoNames):
		return nil, fmt.Errorf("--from %s: the names of Pods are not known here: use the address, or hostProcesses of the chart", from)
	case err != nil:
		return nil, fmt.Errorf("--from %s: %w", from, err)
	case len(found) > 1:
		return nil, fmt.Errorf("--from %s: %d Pods of this node are called so: use NAMESPACE/NAME, or the UID", from, len(found))
	case found[0].Host:
		return nil, nil // a process of this node
	case len(found[0].Addrs) == 0:
		return nil, fmt.Errorf("--from %s: no process of the Pod is seen, so its address is not known: use the address", from)
	}
	q.Name = "Pod " + cmp.Or(found[0].Name, found[0].UID)

	return found[0].Addrs, nil
}

// findService returns the ClusterIP and port of SERVICE[:PORT], of the wanted family if it has one.
// PORT is a number or a name; it may be missing if there is only one. Protocol restricts the ports
// if it is fixed.
func (e *Explainer) findService(text string, protocol lb.Protocol, fixed bool, wanted lb.Family) (netip.AddrPort, lb.Protocol, error) {
	name, port, _ := strings.Cut(text, ":")
	frontends, _, err := status.Programmed(e.Maps.Tables)
	if err != nil {
		return netip.AddrPort{}, 0, err
	}
	byService := make(map[string][]status.Frontend)
	for _, f := range frontends {
		if f.Kind == lb.KindClusterIP && f.Scope == lb.Internal && f.Address.Port() != 0 {
			if full, _, _ := strings.Cut(f.Service, ":"); full != status.ProbeService.String() {
				byService[full] = append(byService[full], f)
			}
		}
	}
	full, err := status.ServiceNamed(slices.Sorted(maps.Keys(byService)), name)
	if err != nil {
		return netip.AddrPort{}, 0, fmt.Errorf("of those with a ClusterIP, %w (clients of others connect to what DNS returns)", err)
	}
	var found []status.Frontend
	var ports []string
	for _, f := range byService[full] {
		_, portName, _ := strings.Cut(f.Service, ":")
		isPort := port == "" || port == portName || port == strconv.Itoa(int(f.Address.Port()))
		if text := strings.TrimPrefix(portName+" ", " ") + portText(f); !slices.Contains(ports, text) {
			ports = append(ports, text)
		}
		if isPort && (!fixed || f.Protocol == protocol) {
			found = append(found, f)
		}
	}
	if len(found) == 0 {
		return netip.AddrPort{}, 0, fmt.Errorf("Service %s has no such port; it has %s", full, status.NamesText(ports))
	}
	isWanted := func(f status.Frontend) bool { return lb.FamilyOf(f.Address.Addr()) == wanted }
	first := found[max(0, slices.IndexFunc(found, isWanted))]
	ports = nil
	for _, f := range found {
		if f.Address.Addr() == first.Address.Addr() {
			ports = append(ports, portText(f))
		}
	}
	if len(ports) > 1 {
		return netip.AddrPort{}, 0, fmt.Errorf("the Service has the ports %s: choose one, as in %s:%s", strings.Join(ports, ", "), name, ports[0])
	}

	return first.Address, first.Protocol, nil
}

func portText(f status.Frontend) string {
	return fmt.Sprintf("%d/%s", f.Address.Port(), strings.ToLower(f.Protocol.String()))
}
