package agent

import (
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/datapath"
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

	// claimsChanged is set if an address may have got another owner, or be another kind of one, since
	// [agent.reportImpaired].
	claimsChanged bool

	optOuts *kube.OptOuts

	serviceCIDRs        []netip.Prefix
	others              map[lb.ServiceName][]netip.Addr // the ClusterIPs of Services of other proxies
	serviceCIDRsChanged bool

	// problems are what is not in force, and why: by object or source when they were read, by
	// Service when its frontends were decided, and of the configuration of this node.
	problems map[string][]lb.Problem
	// failing are texts of the problems by which connections fail. Any goroutine may read it.
	failing *atomic.Pointer[[]string]
	// undecided are Services whose decision failed by a panic.
	undecided map[lb.ServiceName]struct{}
	// unread are the Services of objects that could not be read and are not known as they were, by source: such a Service
	// keeps what an earlier agent programmed. Of those that are in readAgain, such an object was read since, or is gone.
	unread    map[string]lb.ServiceName
	unreadOf  map[lb.ServiceName]int // how many there are of each Service
	readAgain []lb.ServiceName
	log       *slog.Logger
	events    events.Recorder
}

func newModel(cfg Config, p parts) *model {
	here := node.NewModel(node.ModelConfig{
		NodeName: cfg.NodeName, NodeOptional: cfg.Manifests != "",
		NodePortAddresses: cfg.NodePortAddresses, HadNodePorts: p.hadNodePorts, HadClientIPs: p.hadClientIPs, NodeIP: cfg.NodeIP,
		Devices: cfg.Local.Rules(cfg.Devices), Local: cfg.Local, ThroughStack: p.throughStack,
		UDPAtDevices: cfg.Datapath.UDP == bpf.UDPOff, NoLocalhostNodePorts: noLocalhostNodePorts(cfg.Datapath),
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
		failing:             new(atomic.Pointer[[]string]),
		undecided:           map[lb.ServiceName]struct{}{},
		unread:              map[string]lb.ServiceName{},
		unreadOf:            map[lb.ServiceName]int{},
		log:                 cfg.Log,
		events:              p.events,
	}
}

func noLocalhostNodePorts(cfg datapath.Config) []lb.Family {
	var families []lb.Family
	if cfg.NoLocalhostNodePortsV4 {
		families = append(families, lb.IPv4)
	}
	if cfg.NoLocalhostNodePortsV6 {
		families = append(families, lb.IPv6)
	}

	return families
}

// isUnread reports whether an object of a Service could not be read, and is not known as it was.
func (m *model) isUnread(name lb.ServiceName) bool {
	return m.unreadOf[name] > 0
}

// limits returns what no program translates, as the node is configured.
func (m *model) limits() []string {
	limits := m.here.Limits()
	if m.state.HasSCTP() {
		limits = append(limits, "SCTP of this node's own processes to Services: neither sockets nor devices translate it")
	}

	return limits
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

// report replaces the problems of one source. It logs and records those that are new, and the
// end of those that concerned this node.
func (m *model) report(source string, problems []lb.Problem) {
	if service, unread := m.unread[source]; unread {
		delete(m.unread, source)
		if m.unreadOf[service]--; m.unreadOf[service] == 0 {
			delete(m.unreadOf, service)
		}
		m.readAgain = append(m.readAgain, service)
	}
	before := m.problems[source]
	for _, p := range problems {
		if !slices.Contains(before, p) {
			what := "left out"
			if p.Effect != lb.LeftOut {
				what = "not as it should be"
			}
			m.log.Warn(what, "object", p.Object, "field", p.Field, "value", p.Value, "problem", p.Message, "remedy", p.Remedy)
			m.events.Problem(p, m.node.Name)
		}
	}
	for _, p := range before {
		ended := func(q lb.Problem) bool { return q.Object == p.Object && q.Field == p.Field }
		if p.Effect != lb.LeftOut && !slices.ContainsFunc(problems, ended) {
			m.log.Info("as it should be again", "object", p.Object, "field", p.Field, "was", p.Value)
			m.events.ProblemEnded(p)
		}
	}
	if len(problems) == 0 {
		delete(m.problems, source)
	} else {
		m.problems[source] = problems
	}
	fails := func(p lb.Problem) bool { return p.Effect == lb.Failing }
	if slices.ContainsFunc(before, fails) || slices.ContainsFunc(problems, fails) {
		m.setFailing()
	}
}

// setFailing sets failing by all problems.
func (m *model) setFailing() {
	var texts []string
	for _, problems := range m.problems {
		for _, p := range problems {
			if p.Effect == lb.Failing {
				texts = append(texts, p.String())
			}
		}
	}
	slices.Sort(texts)
	m.failing.Store(&texts)
}

// unready returns why connections fail on this node. Any goroutine may call it.
func (m *model) unready() []string {
	if texts := m.failing.Load(); texts != nil {
		return *texts
	}

	return nil
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
