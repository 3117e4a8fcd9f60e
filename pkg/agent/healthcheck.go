package agent

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// serviceChecks are the answers at health check node ports. They are planned when a Service
// is decided, and published when it is programmed.
type serviceChecks struct {
	published map[lb.ServiceName]struct{}
	due       map[lb.ServiceName]*health.Check // nil: there is none any more
	addrs     []netip.Addr                     // the addresses to listen on; nil: unchanged
}

func newServiceChecks() *serviceChecks {
	return &serviceChecks{
		published: make(map[lb.ServiceName]struct{}),
		due:       make(map[lb.ServiceName]*health.Check),
	}
}

// newHealthServices returns the servers of health check node ports.
func newHealthServices(cfg Config, proxy *health.Proxy) *health.Services {
	return health.NewServices(health.ServicesConfig{
		Healthy: proxy.Healthy,
		Failed: func(service lb.ServiceName, address netip.AddrPort, err error) {
			cfg.Log.Error("health check node port does not answer; trying again", "service", service, "address", address, "error", err)
			cfg.record(kube.Event{
				Service: service, Reason: kube.ReasonCheckFailed, Action: "Listen",
				Note: "node " + cfg.NodeName + " cannot answer at the health check node port: " + err.Error(),
			})
		},
	})
}

// plan sets the check of a Service, nil for none. It takes effect at the next publish.
func (c *serviceChecks) plan(name lb.ServiceName, check *health.Check) {
	if check != nil {
		c.due[name] = check
	} else if _, known := c.published[name]; known {
		c.due[name] = nil
	}
}

// publish makes the planned checks of those Services effective that are in force.
func (c *serviceChecks) publish(answers *health.Services, inForce func(lb.ServiceName) bool) {
	if c.addrs != nil {
		answers.SetAddresses(c.addrs)
		c.addrs = nil
	}
	for name, check := range c.due {
		if !inForce(name) {
			continue
		}
		delete(c.due, name)
		if check == nil {
			delete(c.published, name)
			answers.Delete(name)
		} else {
			c.published[name] = struct{}{}
			answers.Set(name, *check)
		}
	}
}

// checkOf returns the health check of a Service, nil if it has none. Load balancers that
// keep client addresses use it to find the nodes that have endpoints.
func checkOf(svc *lb.Service, res lb.Resolution) *health.Check {
	if svc == nil || svc.Type != lb.LoadBalancer || svc.ExternalPolicy != lb.Local || svc.HealthCheckNodePort == 0 {
		return nil
	}
	check := &health.Check{Port: svc.HealthCheckNodePort, Ready: make(map[lb.Family]int)}
	for _, f := range res.Frontends {
		family := lb.FamilyOf(f.Key.Addr)
		if _, has := check.Ready[family]; !has && f.Kind == lb.KindClusterIP {
			check.Ready[family] = res.LocalReady(family)
		}
	}

	return check
}

// checkAddrs returns the addresses on which health check node ports answer, which are those
// of node ports. The unspecified address stands for all of a family. There is none of a
// family that the node does not have.
func (m *model) checkAddrs() []netip.Addr {
	addrs := []netip.Addr{}
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		family := lb.FamilyOf(all)
		every := m.nodePortAddresses.All(family, &m.node)
		for _, a := range m.localAddrs {
			addr := a.Addr
			if lb.FamilyOf(addr) != family {
				continue
			}
			if every {
				addrs = append(addrs, all)

				break
			}
			if len(m.nodePortAddresses.Select([]netip.Addr{addr}, &m.node)) == 0 {
				continue
			}
			if addr.Is6() && addr.IsLinkLocalUnicast() {
				addr = addr.WithZone(strconv.Itoa(a.IfIndex))
			}
			if !slices.Contains(addrs, addr) {
				addrs = append(addrs, addr)
			}
		}
	}

	return addrs
}
