package model

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// change is one event: exactly one of its fields is set.
type change struct {
	Service     *corev1.Service            `json:"service,omitempty"`
	Slice       *discoveryv1.EndpointSlice `json:"slice,omitempty"`
	Node        *corev1.Node               `json:"node,omitempty"`
	ServiceCIDR *networkingv1.ServiceCIDR  `json:"serviceCIDR,omitempty"`
	Delete      bool                       `json:"delete,omitempty"`    // the object
	Addresses   []string                   `json:"addresses,omitempty"` // of the node's devices
	Restart     uint64                     `json:"restart,omitempty"`   // of the agent; the seed of the order in which it gets the objects
	Fail        uint64                     `json:"fail,omitempty"`      // writes fail in this step; their seed
	Squeeze     uint64                     `json:"squeeze,omitempty"`   // maps are full in this step; the seed of how full
	Forget      bool                       `json:"forget,omitempty"`    // all flows are forgotten
}

// step is what happens at once. Then the maps are asked.
type step []change

// session is a sequence of steps. It can be played again, and shortened.
type session struct {
	options options
	steps   []step
	probes  uint64 // the seed of which clients are asked about
	all     bool   // of them
}

// steps that come after the first.
const length = 6

func newSession(seed uint64) *session {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 1))}
	s := &session{options: g.options(), probes: seed}
	g.mode = g.anyHintMode()
	g.have = newCluster(s.options)
	add := func(st step) {
		s.steps = append(s.steps, st)
		for _, ch := range st {
			g.have.apply(ch)
		}
	}
	add(g.start())
	add(g.fill())
	for range length {
		add(g.next())
	}
	return s
}

// failure is what a session ends with that does not end well.
type failure struct {
	step int
	what string
}

func (f *failure) Error() string { return fmt.Sprintf("after step %d: %s", f.step, f.what) }

// play plays a session. The hits are those of the clauses of CONTRACT.md.
func (s *session) play() (hits clauseHits, failed *failure) {
	c := newCluster(s.options)
	at := 0
	defer func() {
		hits = c.clauseHits
		if what, is := recover().(wrong); is {
			failed = &failure{at, string(what)}
		}
	}()
	subject, err := newSubject(s.options)
	if err != nil {
		return hits, &failure{0, err.Error()}
	}
	p := &prober{Rand: rand.New(rand.NewPCG(s.probes, 2)), all: s.all}
	for at = range s.steps {
		if what := subject.take(c, s.steps[at], p); what != "" {
			return hits, &failure{at, what}
		}
	}
	return hits, s.playOrder(c, p, at)
}

// playOrder delivers the same objects in another order to an empty Sluice, which must
// give the same answers.
func (s *session) playOrder(c *cluster, p *prober, at int) *failure {
	c.ports = nil // of which nothing is in the maps
	fresh, err := newSubject(s.options)
	if err != nil {
		return &failure{at, err.Error()}
	}
	if what := fresh.take(c, step{{Restart: s.probes | 1}}, p); what != "" {
		return &failure{at, "delivered all at once, in another order: " + what}
	}
	return nil
}

// take has a step happen, and compares the answers. It returns what is wrong.
func (s *subject) take(c *cluster, st step, p *prober) string {
	disturbed, forget, err := s.happen(c, st)
	if err != nil {
		return err.Error()
	}
	s.agent.Work()
	if disturbed {
		s.pass()
		s.recover()
	} else if what := p.compare(c, s); what != "" {
		return "before the grace period is over: " + what
	}
	if what := s.rest(); what != "" {
		return what
	}
	if what := p.compare(c, s); what != "" || !forget {
		return what
	}
	s.forgetAddrs()
	if what := s.rest(); what != "" {
		return what
	}
	return p.compare(c, s)
}

// happen applies a step to the cluster and delivers it to the agent. It returns whether
// writes will fail, and whether flows are forgotten.
func (s *subject) happen(c *cluster, st step) (disturbed, forget bool, err error) {
	for _, ch := range st {
		switch {
		case ch.Fail != 0:
			disturbed = s.fail(ch.Fail) || disturbed
		case ch.Squeeze != 0:
			disturbed = s.squeeze(ch.Squeeze) || disturbed
		case ch.Restart != 0:
			err = s.restart(c, ch.Restart)
		case ch.Forget:
			forget = true
		default:
			c.apply(ch)
			s.deliver(ch)
		}
		if err != nil {
			return disturbed, forget, err
		}
	}
	c.read()
	return disturbed, forget, nil
}

// rest lets time pass until nothing is left to do.
func (s *subject) rest() string {
	if err := s.waitIdle(); err != nil {
		return err.Error()
	}
	drifts, err := s.writer.Drift(false)
	if err != nil {
		return err.Error()
	}
	if len(drifts) > 0 {
		return fmt.Sprintf("the maps differ from what was written: %v", drifts)
	}
	return ""
}

// restart ends the agent. The next one finds the maps, and gets all objects.
func (s *subject) restart(c *cluster, seed uint64) error {
	c.forgetNode()
	c.startClaims()
	if err := s.start(); err != nil {
		return err
	}
	all := c.all()
	rng := rand.New(rand.NewPCG(seed, 5))
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, ch := range all {
		s.deliver(ch)
	}
	return nil
}

// deliver delivers a change to the agent.
func (s *subject) deliver(ch change) {
	object := s.feed.Set
	if ch.Delete {
		object = s.feed.Delete
	}
	switch {
	case ch.Service != nil:
		object(ch.Service)
	case ch.Slice != nil:
		object(ch.Slice)
	case ch.Node != nil:
		object(ch.Node)
	case ch.ServiceCIDR != nil:
		object(ch.ServiceCIDR)
	default:
		s.setAddrs(parseAll(ch.Addresses))
	}
}

func parseAll(texts []string) []netip.Addr {
	var addrs []netip.Addr
	for _, text := range texts {
		addrs = append(addrs, netip.MustParseAddr(text))
	}
	return addrs
}

// apply has a change happen to the cluster.
func (c *cluster) apply(ch change) {
	switch {
	case ch.Service != nil:
		put(c.services, keyOf(&ch.Service.ObjectMeta), ch.Service, ch.Delete)
	case ch.Slice != nil:
		put(c.slices, keyOf(&ch.Slice.ObjectMeta), ch.Slice, ch.Delete)
	case ch.ServiceCIDR != nil:
		put(c.cidrs, keyOf(&ch.ServiceCIDR.ObjectMeta), ch.ServiceCIDR, ch.Delete)
	case ch.Node != nil && ch.Node.Name != nodeName:
	case ch.Node != nil && ch.Delete:
		c.setNode(nil)
	case ch.Node != nil:
		c.setNode(ch.Node)
	case ch.Addresses != nil:
		c.addrs = parseAll(ch.Addresses)
	}
}

func put[T any](into map[objectKey]T, key objectKey, obj T, remove bool) {
	if remove {
		delete(into, key)
	} else {
		into[key] = obj
	}
}

// all are the changes that make the cluster what it is, from nothing.
func (c *cluster) all() []change {
	texts := []string{}
	for _, addr := range c.addrs {
		texts = append(texts, addr.String())
	}
	all := []change{{Addresses: texts}}
	for _, key := range slices.SortedFunc(maps.Keys(c.services), objectKey.compare) {
		all = append(all, change{Service: c.services[key]})
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.slices), objectKey.compare) {
		all = append(all, change{Slice: c.slices[key]})
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.cidrs), objectKey.compare) {
		all = append(all, change{ServiceCIDR: c.cidrs[key]})
	}
	if c.node != nil {
		all = append(all, change{Node: c.node})
	}
	return all
}

// forgetNode is what a restart does to what the Node said earlier.
func (c *cluster) forgetNode() {
	clear(c.nodeIPs)
	c.podCIDRs = nil
	c.setNode(c.node)
}
