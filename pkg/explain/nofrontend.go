package explain

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
)

// explainNoFrontend finds out why no frontend has the destination: a node port that does not answer at this address,
// another port of a Service's address, or nothing of Services at all.
func (i *inquiry) explainNoFrontend(ctx context.Context) error {
	if i.answer.Reason != maps.ReasonPassNoFrontend || i.unwatched && i.atDevice || i.answer.NodesOwn {
		return nil
	}
	if i.passesThrough() {
		i.whyNoFrontend = fmt.Sprintf("Service %s has no usable endpoint on this node, and leaves packets from outside to the routes (external-failover: passthrough)", i.Service)

		return nil
	}
	dialed := fmt.Sprintf("%s/%s", i.To, i.Protocol)
	i.whyNoFrontend = dialed + " is no address of a Service"
	frontends, _, err := status.Programmed(i.Maps.Tables)
	if err != nil {
		return err
	}
	var here, nodePorts []string // ports of this address, and node ports
	service, elsewhere := "", "" // that have the node port: of the destination's family, and of the other one
	for _, f := range frontends {
		text := fmt.Sprintf("%d/%s of Service %s", f.Address.Port(), f.Protocol, f.Service)
		switch {
		case f.Address.Port() == 0 || f.Service == status.ProbeService.String():
		case f.Address.Addr() == i.To.Addr():
			here = append(here, text)
		case f.Address.Addr().IsUnspecified() && f.Address.Addr().Is4() == i.To.Addr().Is4():
			nodePorts = append(nodePorts, text)
			if f.Address.Port() == i.To.Port() && f.Protocol == i.Protocol {
				service = f.Service
			}
		case f.Address.Addr().IsUnspecified() && f.Address.Port() == i.To.Port() && f.Protocol == i.Protocol:
			elsewhere = fmt.Sprintf("%s, for %s only", f.Service, lb.FamilyOf(f.Address.Addr()))
		}
	}
	for _, list := range []*[]string{&here, &nodePorts} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	if len(here) > 0 {
		i.whyNoFrontend = fmt.Sprintf("no Service has %s; of this address there are %s", dialed, status.ListText(here))
	}
	way, err := node.WayTo(i.To.Addr())
	if err != nil || !way.Local {
		return nil // it is not this node's
	}
	addrs, err := i.nodePortAddrs()
	if err != nil {
		return err
	}
	check, err := i.checkOf(ctx)
	switch {
	case errors.Is(err, status.ErrNotRunning):
		i.notLooked("health check node ports, since no agent runs")
	case err != nil:
		i.missing("health check node ports: %v", err)
	}
	answers := "at no address of its family"
	if len(addrs) > 0 {
		answers = "at " + status.ListText(addrs)
	}
	switch {
	case service != "":
		i.whyNoFrontend = fmt.Sprintf("%d/%s is a node port of Service %s, and node ports do not answer at %s but %s (nodePortAddresses)",
			i.To.Port(), i.Protocol, service, i.To.Addr(), answers)
	case check != "" && slices.Contains(addrs, i.To.Addr().String()):
		i.whyNoFrontend = fmt.Sprintf("%s is the health check node port of Service %s, where the agent itself answers load balancers", dialed, check)
	case check != "":
		i.whyNoFrontend = fmt.Sprintf("%d is the health check node port of Service %s, and the agent does not answer at %s but %s (nodePortAddresses)",
			i.To.Port(), check, i.To.Addr(), answers)
	case elsewhere != "":
		i.whyNoFrontend = fmt.Sprintf("%d/%s is a node port of Service %s", i.To.Port(), i.Protocol, elsewhere)
	case len(here) > 0:
	case len(nodePorts) > 0:
		i.whyNoFrontend = fmt.Sprintf("%s is an address of this node, and %d/%s no node port; there are %s", i.To.Addr(), i.To.Port(), i.Protocol, status.ListText(nodePorts))
	default:
		i.whyNoFrontend = fmt.Sprintf("%s is an address of this node, and no Service has a node port", i.To.Addr())
	}

	return nil
}

// nodePortAddrs returns the addresses of this node, of the destination's family, at which node ports answer.
func (i *inquiry) nodePortAddrs() ([]string, error) {
	var addrs []netip.Addr
	for entry, err := range i.Maps.Addrs.All() {
		if err != nil {
			return nil, err
		}
		if addr := entry.Key.IP(); entry.Value.Flags&maps.AddrNodePort != 0 && addr.Is4() == i.To.Addr().Is4() && !addr.IsLinkLocalUnicast() {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	var texts []string
	for _, addr := range addrs {
		texts = append(texts, addr.String())
	}

	return texts, nil
}

// checkOf returns the Service that has the destination's port as its health check node port, "" if none has.
func (i *inquiry) checkOf(ctx context.Context) (string, error) {
	if i.Protocol != lb.TCP {
		return "", nil
	}
	name := ""
	err := i.Agent.EachService(ctx, func(svc status.Service) {
		if svc.HealthCheckNodePort == i.To.Port() {
			name = svc.Name
		}
	})

	return name, err
}
