package health

import (
	"net/netip"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Planner holds the checks of Services that are not in force yet: a check is planned when a
// Service is decided, and published to [Services] when it is programmed. One goroutine at a
// time may use it.
type Planner struct {
	published map[lb.ServiceName]struct{}
	due       map[lb.ServiceName]*Check // nil: there is none any more
	addrs     []netip.Addr              // the addresses to listen on; nil: unchanged
}

// NewPlanner returns a Planner without checks.
func NewPlanner() *Planner {
	return &Planner{published: make(map[lb.ServiceName]struct{}), due: make(map[lb.ServiceName]*Check)}
}

// SetAddresses sets the addresses of [Services.SetAddresses] from the next Publish on.
func (p *Planner) SetAddresses(addrs []netip.Addr) { p.addrs = addrs }

// Plan sets the check of a Service, nil for none. It takes effect at the next Publish.
func (p *Planner) Plan(name lb.ServiceName, check *Check) {
	if _, known := p.published[name]; known || check != nil {
		p.due[name] = check
	} else {
		delete(p.due, name) // it ends before it was published
	}
}

// Publish makes the planned checks of those Services effective that are in force.
func (p *Planner) Publish(answers *Services, inForce func(lb.ServiceName) bool) {
	if p.addrs != nil {
		answers.SetAddresses(p.addrs)
		p.addrs = nil
	}
	for name, check := range p.due {
		if !inForce(name) {
			continue
		}
		delete(p.due, name)
		if check == nil {
			delete(p.published, name)
			answers.Delete(name)
		} else {
			p.published[name] = struct{}{}
			answers.Set(name, *check)
		}
	}
}

// CheckOf returns the health check of a Service, nil if it has none. Load balancers that
// keep client addresses use it to find the nodes that have endpoints.
func CheckOf(svc *lb.Service, res lb.Resolution) *Check {
	if svc == nil || svc.Type != lb.LoadBalancer || svc.ExternalPolicy != lb.Local || svc.HealthCheckNodePort == 0 {
		return nil
	}
	check := &Check{Port: svc.HealthCheckNodePort, Ready: make(map[lb.Family]int)}
	for _, f := range res.Frontends {
		family := lb.FamilyOf(f.Key.Addr)
		if _, has := check.Ready[family]; !has && f.Kind == lb.KindClusterIP {
			check.Ready[family] = res.LocalReady(family)
		}
	}

	return check
}
