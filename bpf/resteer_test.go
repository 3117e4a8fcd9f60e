package bpf

import (
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// later is after a SYN that is sent again is not taken for a duplicate.
const later = 30 * time.Millisecond

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

// resteered has a client send its SYN twice to a Service with these two backends, of which the first one
// does not answer. It returns the conversations with the backend that was given up, and with the one that
// has got the second SYN.
func resteered(t *testing.T, w *world, p place, backends ...string) (former, now tried) {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, to: backends})
	syn := tcp(p.client, clusterIP, "S")
	next := func() tried {
		w.ingress(t, p, syn)
		f := w.flowOf(t, p.client, clusterIP)

		c := tried{&conversation{
			w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP,
			backend: w.backendOf(t, f, backends...), masqueradedPort: maps.Port(f.MasqueradePort),
		}, f.BackendId}
		if c.masqueradedPort != 0 {
			c.leaves(t, syn)
		}

		return c
	}
	former = next()
	time.Sleep(later)

	return former, next()
}

func resteer(c *DeviceConfig) { c.Resteer = true }

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

func eachResteered(t *testing.T, run func(t *testing.T, former, now tried)) {
	t.Helper()
	for _, test := range resteerPlaces {
		eachFamily(t, func(t *testing.T, f family) {
			t.Run(test.backends[0]+" at "+test.place.String(), func(t *testing.T) {
				w := newWorldAt(t, test.place, f, resteer)
				former, now := resteered(t, w, test.place, test.backends...)
				if former.backend == now.backend {
					t.Fatalf("the SYN goes to %s again", now.backend)
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

// A SYN that is sent again goes to another backend, which gets the connection and its load. What the former
// one answers later is dropped.
func TestUnansweredSYNGoesToAnotherBackend(t *testing.T) {
	eachResteered(t, func(t *testing.T, former, now tried) {
		former.mustHave(t, 0)
		now.mustHave(t, 1)
		now.establish(t)
		former.arrives(t, tcp(former.backend, client, "S.")).drops(maps.ReasonDropAbandoned)
		former.arrives(t, tcp(former.backend, client, "R.")).drops(maps.ReasonDropAbandoned)
		now.says(t, second(now.proto, client, clusterIP))
		former.mustHave(t, 0)
		now.mustHave(t, 1)
	})
}

// A backend that was only slow keeps the connection, if the other one has not answered either.
func TestFirstAnswerGetsTheConnection(t *testing.T) {
	eachResteered(t, func(t *testing.T, former, now tried) {
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
	eachResteered(t, func(t *testing.T, former, now tried) {
		former.arrives(t, tcp(former.backend, client, "R.")).drops(maps.ReasonDropAbandoned)
		now.establish(t)
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
