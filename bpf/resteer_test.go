package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// later is after a SYN that is sent again is not taken for a duplicate.
const later = 30 * time.Millisecond

// noProbe is how old a flow of datagrams is, at least, whose first one was no probe of a suspect.
const noProbe = 200 * time.Millisecond

// tried is the conversation with one of the backends that a client's SYN went to.
type tried struct {
	*conversation
	id uint32 // of the backend
}

// mustHave checks how many flows are in the load of the backend.
func (c tried) mustHave(t *testing.T, flows int32) {
	t.Helper()
	if have := c.w.maps.Loads.Load(c.id).Flows; have != flows {
		t.Errorf("%s has %d flows, want %d", c.backend, have, flows)
	}
}

// suspect makes a backend a suspect that is passed over for a minute, until the test ends.
func (w *world) suspect(t *testing.T, id uint32) {
	t.Helper()
	t.Cleanup(func() { lab.Must(t, w.maps.Health.Put(maps.Index(id), maps.BackendHealth{})) })
	lab.Must(t, w.maps.Health.Put(maps.Index(id), maps.BackendHealth{Id: id, Suspected: now(t), Until: now(t) + uint64(time.Minute)}))
}

// try has a client send its first packet to the ClusterIP, which goes to one of these backends.
func (w *world) try(t *testing.T, p place, proto layers.IPProtocol, backends ...string) tried {
	t.Helper()
	opens := first(proto, p.client, clusterIP)
	w.ingress(t, p, opens)
	f := w.flowOf(t, p.client, clusterIP)
	c := tried{&conversation{
		w: w, place: p, proto: proto, vip: clusterIP,
		backend: w.backendOf(t, f, backends...), masqueradedPort: maps.Port(f.MasqueradePort),
	}, f.BackendId}
	if c.masqueradedPort != 0 {
		c.leaves(t, opens)
	}

	return c
}

// resteered has a client send its first packet twice to a Service with these two backends, of which the first
// one does not answer, and of UDP is a suspect then. It returns the conversations with the backend that was
// given up, and with the one that has got the second packet.
func resteered(t *testing.T, w *world, p place, proto layers.IPProtocol, backends ...string) (former, now tried) {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, proto: proto, to: backends})
	former = w.try(t, p, proto, backends...)
	if proto == layers.IPProtocolUDP {
		w.suspect(t, former.id)
		time.Sleep(noProbe)
	}
	time.Sleep(later)

	return former, w.try(t, p, proto, backends...)
}

func resteer(c *DeviceConfig) { c.Heal, c.Resteer = true, true }

// resteerPlaces are those at which clients open flows, with backends there.
var resteerPlaces = []struct {
	place    place
	backends []string
}{
	{uplink, []string{portPod, portPodToo}},
	{uplink, []string{remotePod, "8.0.2.8:8080"}},
	{turning, []string{remotePod, "8.0.2.8:8080"}},
	{podVeth, []string{portPod, remotePod}},
}

func eachResteered(t *testing.T, proto layers.IPProtocol, run func(t *testing.T, former, now tried)) {
	t.Helper()
	for _, test := range resteerPlaces {
		eachFamily(t, func(t *testing.T, f family) {
			t.Run(test.backends[0]+" at "+test.place.String(), func(t *testing.T) {
				w := newWorldAt(t, test.place, f, resteer)
				former, now := resteered(t, w, test.place, proto, test.backends...)
				if former.backend == now.backend {
					t.Fatalf("the packet goes to %s again", now.backend)
				}
				run(t, former, now)
			})
		})
	}
}

// arrives sends a packet of the backend to where it first passes the node.
func (c *conversation) arrives(t *testing.T, in packet) outcome {
	t.Helper()
	if c.masqueradedPort != 0 {
		return c.w.ingress(t, uplink, in.from(c.backend).to(node).toPort(c.masqueradedPort))
	}

	return c.w.egress(t, c.place, in.from(c.backend).to(c.place.client))
}

// errs sends an ICMP error about the SYN to the backend to where it first passes the node.
func (c *conversation) errs(t *testing.T) outcome {
	t.Helper()
	syn := tcp(c.place.client, c.backend, "S")
	if c.masqueradedPort != 0 {
		return c.w.ingress(t, uplink, icmpError(hostUnreachable, farRouter, node, syn.from(node).fromPort(c.masqueradedPort)))
	}

	return c.w.egress(t, c.place, icmpError(hostUnreachable, farRouter, c.place.client, syn))
}

// A SYN that is sent again goes to another backend, which gets the connection and its load. What the former
// one answers later is dropped.
func TestUnansweredSYNGoesToAnotherBackend(t *testing.T) {
	eachResteered(t, layers.IPProtocolTCP, func(t *testing.T, former, now tried) {
		former.mustHave(t, 0)
		now.mustHave(t, 1)
		now.establish(t)
		former.arrives(t, tcp(former.backend, client, "S.")).drops(maps.ReasonDropAbandoned)
		former.arrives(t, tcp(former.backend, client, "R.")).drops(maps.ReasonDropAbandoned)
		former.errs(t).drops(maps.ReasonDropAbandoned)
		now.says(t, second(now.proto, client, clusterIP))
		former.mustHave(t, 0)
		now.mustHave(t, 1)
	})
}

// A backend that was only slow keeps the connection, if the other one has not answered either.
func TestFirstAnswerGetsTheConnection(t *testing.T) {
	eachResteered(t, layers.IPProtocolTCP, func(t *testing.T, former, now tried) {
		if former.masqueradedPort != 0 && !former.isTurned() {
			former.returns(t, tcp(former.backend, client, "S."))
		}
		former.hears(t, tcp(former.backend, client, "S."))
		former.mustHave(t, 1)
		now.mustHave(t, 0)
		former.says(t, second(former.proto, client, clusterIP))
		now.arrives(t, tcp(now.backend, client, "S.")).drops(maps.ReasonDropAbandoned)
		former.says(t, second(former.proto, client, clusterIP))
	})
}

// The backend that was given up refuses too late, which the other one may not do.
func TestRefusalOfAFormerBackend(t *testing.T) {
	eachResteered(t, layers.IPProtocolTCP, func(t *testing.T, former, now tried) {
		former.arrives(t, tcp(former.backend, client, "R.")).drops(maps.ReasonDropAbandoned)
		now.establish(t)
	})
}

// refuses has the backend refuse the connection. With hidden, the client gets an ACK of nothing instead of
// the RST, and what it answers ends no flow.
func (c *conversation) refuses(t *testing.T, hidden bool) {
	t.Helper()
	rst := tcp(c.backend, c.place.client, "R.")
	heard := rst
	if hidden {
		heard = tcp(c.backend, c.place.client, ".").acksNothing()
	}
	vip, port := c.vip, c.masqueradedPort
	switch {
	case c.isTurned():
		rst = rst.to(node).toPort(port)
		c.w.ingress(t, uplink, rst).leaves(heard.from(vip), maps.ReasonFlow)
	case port != 0:
		rst = rst.to(node).toPort(port)
		c.w.ingress(t, uplink, rst).becomes(heard, maps.ReasonFlow)
		rst = heard

		fallthrough
	default:
		c.w.egress(t, c.place, rst).becomes(heard.from(vip), maps.ReasonFlow)
	}
	if hidden {
		c.says(t, tcp(c.place.client, vip, "R"))
	}
}

// forgetRefusals makes all backends those that have never refused, to which connections go that are refused.
func (w *world) forgetRefusals(t *testing.T) {
	t.Helper()
	for id, h := range w.maps.Health.All() {
		h.Refusals = 0
		lab.Must(t, w.maps.Health.Put(id, h))
	}
}

// A connection that a backend refuses goes to another one with the SYN that the client sends again at once:
// the client does not hear of the refusal. It hears of the next one.
func TestRefusalIsHidden(t *testing.T) {
	for _, test := range resteerPlaces {
		for _, end := range []string{"accepted", "refused again"} {
			eachFamily(t, func(t *testing.T, f family) {
				t.Run(fmt.Sprintf("%s at %s, %s", test.backends[0], test.place, end), func(t *testing.T) {
					w := newWorldAt(t, test.place, f, resteer)
					w.serve(t, service{at: []string{clusterIP}, to: test.backends})
					former := w.try(t, test.place, layers.IPProtocolTCP, test.backends...)
					former.refuses(t, true)
					if h, _ := w.maps.HealthOf(former.id); h.Refusals != 1 || h.Evidence != 0 || h.Answered != 0 {
						t.Errorf("the backend that has refused is %+v", h)
					}
					now := w.try(t, test.place, layers.IPProtocolTCP, test.backends...)
					if former.backend == now.backend {
						t.Fatalf("the SYN goes to %s again", now.backend)
					}
					former.mustHave(t, 0)
					now.mustHave(t, 1)
					if end == "refused again" {
						w.forgetRefusals(t)
						now.refuses(t, false)
						now.mustHave(t, 0)

						return
					}
					now.establish(t)
					now.says(t, second(now.proto, client, clusterIP))
					now.mustHave(t, 1)
				})
			})
		}
	}
}

// A router cannot reach the host of a backend: the connection goes to another one with the SYN that the client sends
// again, and the client does not hear of it. It hears of the next one.
func TestUnreachableIsHidden(t *testing.T) {
	for _, test := range resteerPlaces {
		eachFamily(t, func(t *testing.T, f family) {
			t.Run(fmt.Sprintf("%s at %s", test.backends[0], test.place), func(t *testing.T) {
				w := newWorldAt(t, test.place, f, resteer)
				w.forgetHiddenRefusals(t)
				w.serve(t, service{at: []string{clusterIP}, to: test.backends})
				former := w.try(t, test.place, layers.IPProtocolTCP, test.backends...)
				former.errs(t).drops(maps.ReasonDropAbandoned)
				if h, _ := w.maps.HealthOf(former.id); h.Refusals != 2 || h.Evidence != 0 || h.Answered != 0 {
					t.Errorf("the backend that cannot be reached is %+v", h)
				}
				now := w.try(t, test.place, layers.IPProtocolTCP, test.backends...)
				if former.backend == now.backend {
					t.Fatalf("the SYN goes to %s again", now.backend)
				}
				w.forgetRefusals(t)
				now.errs(t).ends(now.verdictOfErrors(), maps.ReasonFlowError)
				now.establish(t)
				now.says(t, second(now.proto, client, clusterIP))
				now.mustHave(t, 1)
			})
		})
	}
}

// verdictOfErrors is that of an error where it first passes the node.
func (c *conversation) verdictOfErrors() int32 {
	if c.isTurned() {
		return verdictRedirect
	}

	return verdictNext
}

// An error about a SYN passes where the connection cannot go to another backend, or if it is another error.
func TestUnreachablePasses(t *testing.T) {
	two := []string{portPod, portPodToo}
	syn := func(c tried) packet { return tcp(c.place.client, c.backend, "S") }
	for name, test := range map[string]struct {
		to    []string
		what  icmpKind
		about func(c tried) packet
		eject bool
	}{
		"as there is no other backend":     {two[:1], hostUnreachable, syn, false},
		"as nothing is re-steered":         {two, hostUnreachable, syn, true},
		"as it is about another SYN":       {two, hostUnreachable, func(c tried) packet { return syn(c).numbered(7) }, false},
		"as the port cannot be reached":    {two, portUnreachable, syn, false},
		"as the packet lived for too long": {two, timeExceeded, syn, false},
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f, func(c *DeviceConfig) { c.Heal, c.Resteer = true, !test.eject })
				w.serve(t, service{at: []string{clusterIP}, to: test.to})
				c := w.try(t, uplink, layers.IPProtocolTCP, test.to...)
				w.egress(t, uplink, icmpError(test.what, farRouter, c.place.client, test.about(c))).ends(verdictNext, maps.ReasonFlowError)
			})
		})
	}
}

// A client with session affinity keeps its backend for later connections, although one goes elsewhere that
// the backend refuses.
func TestRefusalKeepsAffinity(t *testing.T) {
	w := newWorld(t, ipv4, resteer)
	two := []string{portPod, portPodToo}
	w.serve(t, service{at: []string{clusterIP}, to: two, affinity: 60})
	former := w.try(t, uplink, layers.IPProtocolTCP, two...)
	former.refuses(t, true)
	if now := w.try(t, uplink, layers.IPProtocolTCP, two...); now.id == former.id {
		t.Errorf("the SYN goes to %s again", now.backend)
	}
	later := uplink
	later.client = fmt.Sprintf("%s:%d", at(client).Addr(), 50000)
	if next := w.try(t, later, layers.IPProtocolTCP, two...); next.id != former.id {
		t.Errorf("the next connection goes to %s", next.backend)
	}
}

// A backend that has just refused a connection gets one that another backend does not answer, if there is no
// third one.
func TestUnansweredSYNGoesToOneThatHasRefused(t *testing.T) {
	two := []string{portPod, portPodToo}
	w := newWorld(t, ipv4, resteer)
	w.serve(t, service{at: []string{clusterIP}, to: two})
	former := w.try(t, uplink, layers.IPProtocolTCP, two...)
	for _, b := range w.maps.Backends.All() {
		lab.Must(t, w.maps.Health.Put(maps.Index(b.Id), maps.BackendHealth{Id: b.Id, Refusals: 1, Unanswered: now(t)}))
	}
	time.Sleep(later)
	if again := w.try(t, uplink, layers.IPProtocolTCP, two...); again.id == former.id {
		t.Error("the connection stays with a backend that does not answer")
	}
}

// A refusal passes where the connection cannot go to another backend.
func TestRefusalPasses(t *testing.T) {
	two := []string{portPod, portPodToo}
	for _, test := range []struct {
		name    string
		service service
		eject   bool // SYNs are not re-steered
		before  func(*testing.T, tried)
	}{
		{name: "as there is no other backend", service: service{to: two[:1]}},
		{name: "as the Service wants it", service: service{to: two, flags: maps.PoolNoResteer}},
		{name: "as nothing is re-steered", service: service{to: two}, eject: true},
		{name: "as the other backend refuses, too", service: service{to: two}, before: func(t *testing.T, c tried) {
			for _, b := range c.w.maps.Backends.All() {
				lab.Must(t, c.w.maps.Health.Put(maps.Index(b.Id), maps.BackendHealth{Id: b.Id, Refusals: 1, Unanswered: now(t)}))
			}
		}},
		{name: "as it acknowledges another SYN", service: service{to: two}, before: func(t *testing.T, c tried) {
			for _, e := range c.w.entries(t) {
				if e.flow.Role == maps.FlowFromClient {
					e.flow.End++
					c.w.put(t, e)
				}
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f, func(c *DeviceConfig) { c.Heal, c.Resteer = true, !test.eject })
				test.service.at = []string{clusterIP}
				w.serve(t, test.service)
				c := w.try(t, uplink, layers.IPProtocolTCP, two...)
				if test.before != nil {
					test.before(t, c)
				}
				c.refuses(t, false)
			})
		})
	}
}

// The SYN of a further subflow of Multipath TCP shows nothing of the backend that gets it: that has to be the one
// of the first subflow. So it goes there again, its refusal passes, and neither is evidence. That of a first
// subflow is a SYN as any other.
func TestSubflowShowsNothing(t *testing.T) {
	for _, test := range resteerPlaces {
		for _, syn := range []struct {
			name  string
			of    func(packet) packet
			joins bool
		}{
			{"a further subflow", packet.joins, true},
			{"a further subflow with a timestamp", func(p packet) packet { return p.stamped(7).joins() }, true},
			{"a first subflow", packet.capable, false},
		} {
			eachFamily(t, func(t *testing.T, f family) {
				t.Run(syn.name+" to "+test.backends[0]+" at "+test.place.String(), func(t *testing.T) {
					w := newWorldAt(t, test.place, f, resteer)
					w.serve(t, service{at: []string{clusterIP}, to: test.backends})
					for _, b := range w.maps.Backends.All() { // they answered, but not lately
						lab.Must(t, w.maps.Health.Put(maps.Index(b.Id), maps.BackendHealth{Id: b.Id, Answered: now(t) - uint64(2*time.Second)}))
					}
					in := syn.of(tcp(test.place.client, clusterIP, "S"))
					w.ingress(t, test.place, in)
					had := w.flowOf(t, test.place.client, clusterIP)
					c := tried{&conversation{
						w: w, place: test.place, proto: layers.IPProtocolTCP, vip: clusterIP,
						backend: w.backendOf(t, had, test.backends...), masqueradedPort: maps.Port(had.MasqueradePort),
					}, had.BackendId}
					time.Sleep(later)
					w.ingress(t, test.place, in)
					if stays := w.flowOf(t, test.place.client, clusterIP).BackendId == c.id; stays != syn.joins {
						t.Errorf("the SYN goes to the same backend again: %t", stays)
					}
					if h, _ := w.maps.HealthOf(c.id); (h.Evidence == 0) != syn.joins {
						t.Errorf("the backend that does not answer is %+v", h)
					}
					if !syn.joins {
						return
					}
					if c.masqueradedPort != 0 {
						c.leaves(t, in)
					}
					c.refuses(t, false)
					if h, _ := w.maps.HealthOf(c.id); h.Refusals != 0 {
						t.Errorf("the backend that has refused is %+v", h)
					}
					c.mustHave(t, 0)
				})
			})
		}
	}
}

// A further subflow that its backend accepts is a flow as any other.
func TestSubflowIsAccepted(t *testing.T) {
	for _, test := range resteerPlaces {
		eachFamily(t, func(t *testing.T, f family) {
			t.Run(test.backends[0]+" at "+test.place.String(), func(t *testing.T) {
				w := newWorldAt(t, test.place, f, resteer)
				w.serve(t, service{at: []string{clusterIP}, to: test.backends[:1]})
				w.ingress(t, test.place, tcp(test.place.client, clusterIP, "S").joins())
				had := w.flowOf(t, test.place.client, clusterIP)
				c := tried{&conversation{
					w: w, place: test.place, proto: layers.IPProtocolTCP, vip: clusterIP,
					backend: test.backends[0], masqueradedPort: maps.Port(had.MasqueradePort),
				}, had.BackendId}
				c.establish(t)
				c.mustHave(t, 1)
				for _, e := range w.entries(t) {
					if e.halfOpen || e.flow.State != maps.FlowOpen {
						t.Errorf("the entry of role %d has the state %d, half open: %t", e.flow.Role, e.flow.State, e.halfOpen)
					}
				}
				c.closes(t)
				c.mustHave(t, 0)
			})
		})
	}
}

// Of the connections to a Service, the refusals of one in ten are hidden, and of the first 12 of each group of
// clients. They are counted.
func TestFewRefusalsAreHidden(t *testing.T) {
	const connections, most = 400, 4*12 + 400/10
	w := newWorld(t, ipv4, resteer)
	two := []string{portPod, portPodToo}
	s := w.serve(t, service{at: []string{clusterIP}, to: two})
	w.forgetHiddenRefusals(t)
	for n := range connections {
		w.refuse(t, fmt.Sprintf("8.0.%d.1:%d", 201+n%50, 20000+n), two...)
	}
	if hidden := w.hiddenRefusals(t, s.id); hidden > most || hidden < most-10 {
		t.Errorf("%d of %d refusals are hidden, want some %d", hidden, connections, most)
	}
}

// One client that is refused often leaves hidden refusals to others.
func TestHiddenRefusalsOfOneClient(t *testing.T) {
	w := newWorld(t, ipv4, resteer)
	two := []string{portPod, portPodToo}
	s := w.serve(t, service{at: []string{clusterIP}, to: two})
	w.forgetHiddenRefusals(t)
	for n := range 300 {
		w.refuse(t, fmt.Sprintf("%s:%d", at(client).Addr(), 20000+n), two...)
	}
	before := w.hiddenRefusals(t, s.id)
	const others = 24
	for n := range others {
		w.refuse(t, fmt.Sprintf("8.0.%d.1:40000", 201+n), two...)
	}
	if hidden := w.hiddenRefusals(t, s.id) - before; hidden < others/2 {
		t.Errorf("%d of %d refusals of others are hidden", hidden, others)
	}
}

// forgetHiddenRefusals forgets those that are yet to be paid for.
func (w *world) forgetHiddenRefusals(t *testing.T) {
	t.Helper()
	debts := w.maps.Replacements()["sl_refusal_debt"]
	for at := range debts.MaxEntries() {
		lab.Must(t, debts.Put(at, int32(0)))
	}
}

// refuse refuses a new connection of a client to one of two backends, none of which has refused before.
func (w *world) refuse(t *testing.T, client string, backends ...string) {
	t.Helper()
	p := uplink
	p.client = client
	c := w.try(t, p, layers.IPProtocolTCP, backends...)
	w.forgetRefusals(t)
	c.arrives(t, tcp(c.backend, p.client, "R."))
}

// hiddenRefusals returns how many refusals of a service port were hidden.
func (w *world) hiddenRefusals(t *testing.T, servicePortID uint32) (hidden uint64) {
	t.Helper()
	for e, err := range w.maps.Stats.All() {
		lab.Must(t, err)
		if e.Key == (maps.StatKey{ServicePortId: servicePortID, What: maps.StatHiddenRefusals}) {
			hidden = e.Value
		}
	}

	return hidden
}

// A SYN with data (TCP Fast Open) is sent again without, and goes to another backend then. Another SYN does not.
func TestUnansweredSYNWithData(t *testing.T) {
	two := []string{portPod, portPodToo}
	eachFamily(t, func(t *testing.T, f family) {
		w := newWorld(t, f, resteer)
		w.serve(t, service{at: []string{clusterIP}, to: two})
		w.ingress(t, uplink, tcp(client, clusterIP, "S").with("hello"))
		had := w.backendOf(t, w.flowOf(t, client, clusterIP), two...)
		time.Sleep(later)
		in := tcp(client, clusterIP, "S")
		w.ingress(t, uplink, in).ends(verdictNext, maps.ReasonTranslated)
		if now := w.backendOf(t, w.flowOf(t, client, clusterIP), two...); now == had {
			t.Errorf("the SYN goes to %s again", now)
		}
		time.Sleep(later)
		w.ingress(t, uplink, in.numbered(1<<20)).ends(verdictNext, maps.ReasonFlow)
	})
}

// A SYN that is sent again stays with its backend where another one would be wrong.
func TestUnansweredSYNStays(t *testing.T) {
	two := []string{remotePod, portPod}
	for _, test := range []struct {
		name    string
		service service
		options []func(*DeviceConfig)
		before  func(*testing.T, *conversation)
	}{
		{name: "as there is no other backend", service: service{to: two[:1]}, options: []func(*DeviceConfig){resteer}},
		{name: "as the client has affinity", service: service{to: two, affinity: 60}, options: []func(*DeviceConfig){resteer}},
		{name: "as the Service wants it", service: service{to: two, flags: maps.PoolNoResteer}, options: []func(*DeviceConfig){resteer}},
		{name: "as nothing is re-steered", service: service{to: two}},
		{name: "as it was duplicated on its way", service: service{to: two}, options: []func(*DeviceConfig){resteer}, before: func(t *testing.T, c *conversation) {
			for _, e := range c.w.entries(t) {
				e.flow.Created += uint64(time.Hour)
				c.w.put(t, e)
			}
		}},
		{name: "as the backend has answered", service: service{to: two}, options: []func(*DeviceConfig){resteer}, before: func(t *testing.T, c *conversation) {
			if c.masqueradedPort != 0 {
				c.leaves(t, tcp(client, c.backend, "S"))
				c.returns(t, tcp(c.backend, client, "S."))
			}
			c.hears(t, tcp(c.backend, client, "S."))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f, test.options...)
				test.service.at = []string{clusterIP}
				w.serve(t, test.service)
				w.ingress(t, uplink, tcp(client, clusterIP, "S"))
				had := w.flowOf(t, client, clusterIP)
				c := &conversation{
					w: w, place: uplink, proto: layers.IPProtocolTCP, vip: clusterIP,
					backend: w.backendOf(t, had, two...), masqueradedPort: maps.Port(had.MasqueradePort),
				}
				if test.before != nil {
					test.before(t, c)
				}
				time.Sleep(later)
				c.first(t, maps.ReasonFlow)
				if has := w.flowOf(t, client, clusterIP); has.BackendId != had.BackendId || has.MasqueradePort != had.MasqueradePort {
					t.Error("the flow was begun anew")
				}
			})
		})
	}
}

// A datagram that no backend has answered leaves a suspect. What that answers late is an answer to the client,
// too, and clears it.
func TestUnansweredDatagramLeavesSuspect(t *testing.T) {
	eachResteered(t, layers.IPProtocolUDP, func(t *testing.T, former, now tried) {
		former.mustHave(t, 0)
		now.mustHave(t, 1)
		now.establish(t)
		late := answer(now.proto, former.backend, client)
		if former.masqueradedPort != 0 && !former.isTurned() {
			former.returns(t, late)
		}
		former.hears(t, late)
		now.says(t, second(now.proto, client, clusterIP))
		former.mustHave(t, 0)
		now.mustHave(t, 1)
		if h, _ := former.w.maps.HealthOf(former.id); h.IsSuspect() {
			t.Errorf("%s has answered, and is %+v", former.backend, h)
		}
	})
}

// A datagram stays with its backend where another one would be wrong.
func TestDatagramStays(t *testing.T) {
	two := []string{portPod, portPodToo}
	for _, test := range []struct {
		name     string
		service  service
		suspects int // the backend that it has first
		answered bool
		full     bool // there is no room for flows that are confirmed
		options  []func(*DeviceConfig)
	}{
		{name: "as its backend is no suspect", service: service{to: two}, options: []func(*DeviceConfig){resteer}},
		{name: "as there is no other backend", service: service{to: two[:1]}, suspects: 1, options: []func(*DeviceConfig){resteer}},
		{name: "as all are suspects", service: service{to: two}, suspects: 2, options: []func(*DeviceConfig){resteer}},
		{name: "as the Service wants it", service: service{to: two, flags: maps.PoolNoResteer}, suspects: 1, options: []func(*DeviceConfig){resteer}},
		{name: "as nothing is re-steered", service: service{to: two}, suspects: 1, options: []func(*DeviceConfig){func(c *DeviceConfig) { c.Heal = true }}},
		{name: "as the backend has answered", service: service{to: two}, suspects: 1, answered: true, options: []func(*DeviceConfig){resteer}},
		{name: "as the backend has answered, although it is half open", service: service{to: two}, suspects: 1, answered: true, full: true, options: []func(*DeviceConfig){resteer}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f, test.options...)
				test.service.at, test.service.proto = []string{clusterIP}, layers.IPProtocolUDP
				if test.full {
					w.use(t, w.room(t), w.room(t))
				}
				published := w.serve(t, test.service)
				w.ingress(t, uplink, udp(client, clusterIP))
				had := w.flowOf(t, client, clusterIP)
				c := &conversation{w: w, place: uplink, proto: layers.IPProtocolUDP, vip: clusterIP, backend: w.backendOf(t, had, two...)}
				if test.answered {
					c.establish(t)
				}
				for _, id := range published.backends {
					if test.suspects == 2 || (test.suspects == 1 && id == had.BackendId) {
						w.suspect(t, id)
					}
				}
				c.first(t, maps.ReasonFlow)
				if has := w.flowOf(t, client, clusterIP); has.Created != had.Created {
					t.Error("the flow was begun anew")
				}
			})
		})
	}
}

// A socket of a port whose earlier one was re-steered, without an answer yet, gets the backend that it dials.
func TestPortOfAResteeredSocket(t *testing.T) {
	each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, tapPod)
		for _, e := range w.entries(t) {
			e.flow.Flags |= maps.FlowResteered
			w.put(t, e)
		}
		time.Sleep(later)
		c.first(t, maps.ReasonFlow) // it is sent again
		c.goesOn(w.ingress(t, p, tcp(p.client, clusterIP, "S").numbered(1<<20)), maps.ReasonTranslated)
	}, resteer)
}
