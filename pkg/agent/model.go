package agent

import (
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/events"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// model is what the agent knows of the cluster and of the node. It belongs to the
// goroutine that has the turn.
type model struct {
	state *lb.State

	node lb.Node     // this node, as Services see it
	here *node.Model // and as the maps see it
	// eligible is set while load balancers may send new connections to this node. Any
	// goroutine may read it.
	eligible *atomic.Bool

	// claimsChanged is set if an address may have got another owner since
	// [agent.reportImpaired].
	claimsChanged bool

	optOuts *kube.OptOuts

	serviceCIDRs        []netip.Prefix
	others              map[lb.ServiceName][]netip.Addr // the ClusterIPs of Services of other proxies
	serviceCIDRsChanged bool

	// problems are the parts of objects that had to be left out: by object or source
	// when they were read, and by Service when its frontends were decided.
	problems map[string][]lb.Problem
	// undecided are Services whose decision failed by a panic.
	undecided map[lb.ServiceName]struct{}
	log       *slog.Logger
	events    events.Recorder
}

func newModel(cfg Config, p parts) *model {
	here := node.NewModel(node.ModelConfig{
		NodePortAddresses: cfg.NodePortAddresses, HadNodePorts: p.hadNodePorts, NodeIP: cfg.NodeIP,
		Devices: cfg.Devices, Local: cfg.Local, ThroughStack: p.throughStack,
	})
	self := lb.Node{
		Name: cfg.NodeName, PrimaryIPs: here.PrimaryIPs(), MasqueradeAll: cfg.MasqueradeAll,
		Algorithm: cfg.Algorithm, IgnoreExternalIPs: cfg.IgnoreExternalIPs, Limits: p.limits,
	}

	return &model{
		state:               lb.NewState(self),
		node:                self,
		here:                here,
		eligible:            new(atomic.Bool),
		optOuts:             kube.NewOptOuts(cfg.PodOptOut),
		others:              map[lb.ServiceName][]netip.Addr{},
		serviceCIDRsChanged: true, // if none are received, those of an earlier agent have to go
		problems:            map[string][]lb.Problem{},
		undecided:           map[lb.ServiceName]struct{}{},
		log:                 cfg.Log,
		events:              p.events,
	}
}

func (m *model) setNode(n kube.Node) {
	m.here.SetObject(n.PrimaryIPs, n.PodCIDRs, n.Exists)
	m.eligible.Store(n.Exists && !n.Leaving)
	m.node.Name, m.node.Zone, m.node.PrimaryIPs = n.Name, n.Zone, m.here.PrimaryIPs()
	m.state.SetNode(m.node)
}

// mostDialed is how many addresses of the API server are known, the latest: those of a load balancer in
// front of it change.
const mostDialed = 16

// setDialed notes an address at which the API server is dialed.
func (m *model) setDialed(addr netip.AddrPort) {
	if slices.Contains(m.node.Dialed, addr) {
		return
	}
	latest := m.node.Dialed[max(0, len(m.node.Dialed)+1-mostDialed):]
	m.node.Dialed = append(slices.Clone(latest), addr)
	m.state.SetNode(m.node)
}

// setOther notes the ClusterIPs of a Service if another proxy serves it; nil: it was deleted.
func (m *model) setOther(name lb.ServiceName, svc *lb.Service) {
	var addrs []netip.Addr
	if svc != nil && svc.OtherProxy {
		addrs = slices.DeleteFunc(slices.Clone(svc.ClusterIPs), func(ip netip.Addr) bool { return !ip.IsValid() })
	}
	if slices.Equal(addrs, m.others[name]) {
		return
	}
	m.serviceCIDRsChanged = true
	delete(m.others, name)
	if len(addrs) > 0 {
		m.others[name] = addrs
	}
}

// report replaces the problems of one source. It logs and records those that are new.
func (m *model) report(source string, problems []lb.Problem) {
	known := make(map[lb.Problem]struct{}, len(m.problems[source]))
	for _, p := range m.problems[source] {
		known[p] = struct{}{}
	}
	for _, p := range problems {
		if _, reported := known[p]; !reported {
			m.log.Warn("left out", "object", p.Object, "field", p.Field, "problem", p.Message)
			m.events.Problem(p, m.node.Name)
		}
	}
	if len(problems) == 0 {
		delete(m.problems, source)

		return
	}
	m.problems[source] = problems
}

// checkNode returns an error if the configuration does not fit the node.
func (a *agent) checkNode() error {
	// Without addresses of the Node it is not known which family is the first one.
	here := a.model.here
	if a.cfg.CheckNode == nil || here.AwaitsIPs() {
		return nil
	}
	facts := config.Node{Families: node.Families(), Primary: lb.IPv4, IPs: here.PrimaryIPs(), PodCIDRs: here.PodCIDRs()}
	if len(facts.IPs) > 0 {
		facts.Primary = lb.FamilyOf(facts.IPs[0])
	}

	return a.cfg.CheckNode(facts)
}
