package conformance

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// A client has one backend for each port, at whatever address of the Service;
// a client is identified by its address, and on a node by its pod.
func TestAffinityIsShared(t *testing.T) {
	t.Parallel()
	k := mustStick(t, scene.MustShare(t), forever)
	another := *k.Outside
	another.IPv4 = k.Lab.Client.IPv4
	seen := make(map[string]string)
	for _, c := range append(k.Clients(), &another) {
		memory := k.memory(t, c)
		seen[fmt.Sprint(memory)] = c.Name
		for i, want := range memory {
			for _, address := range k.addresses(i) {
				for range 3 {
					if answer := c.To("tcp", address).MustAsk(t); answer.Name != want {
						t.Errorf("%s at %s: %s answers, want %s", c.Name, address, answer.Name, want)
					}
				}
			}
		}
		if names := slices.Compact(slices.Sorted(slices.Values(memory))); len(names) < 2 {
			t.Errorf("%s: all ports have %v", c.Name, names)
		}
		twin := *c // another process of the same client
		cgroup := k.Cgroup
		if !c.AtSocket {
			cgroup = nil
		}
		twin.Caller = lab.MustCaller(t, c.Namespace, cgroup)
		if got := k.memory(t, &twin); !slices.Equal(got, memory) {
			t.Errorf("%s: another process has %v, want %v", c.Name, got, memory)
		}
	}
	if len(seen) != 5 {
		t.Errorf("of 5 clients, %d have backends of their own", len(seen))
	}
}

// The timeout runs from the last new connection: a client that connects often enough
// keeps its backend, one that does not loses it, also if what it has opened
// goes on.
func TestAffinityTimeout(t *testing.T) {
	t.Parallel()
	const seconds = 3
	k := mustStick(t, scene.MustShare(t), seconds)
	dials := []scene.Dial{
		k.Pod.To("tcp", k.addresses(0)[0]), k.Node.To("tcp", k.addresses(1)[1]),
		k.Guest.To("tcp", k.addresses(2)[0]), k.Outside.To("tcp", k.addresses(3)[2]),
	}
	lab.Eventually(t, "the machine is fast enough", func() bool { return slides(t, dials, seconds*time.Second) })

	open := make([]*scene.Connection, len(dials))
	forgotten := make([]bool, len(dials))
	for i, d := range dials {
		open[i] = d.MustOpen(t)
	}
	lab.Eventually(t, "those who stay away are forgotten", func() bool {
		for range 10 * seconds { // a bit longer than the timeout, with the work
			time.Sleep(100 * time.Millisecond)
			scene.MustGoOn(t, open...)
		}
		for i, d := range dials {
			forgotten[i] = forgotten[i] || d.MustAsk(t).Name != open[i].Pod
		}

		return !slices.Contains(forgotten, false)
	})
}

// slides dials thrice as long as the timeout, with pauses of a third of it. It is
// false if a pause took so long that the result would mean nothing.
func slides(t *testing.T, dials []scene.Dial, timeout time.Duration) bool {
	t.Helper()
	had := make([]string, len(dials))
	last := make([]time.Time, len(dials)) // before the last dial
	for range 9 {
		for i, d := range dials {
			begin := time.Now()
			name := d.MustAsk(t).Name
			switch {
			case had[i] == "":
			case time.Since(last[i]) > timeout*9/10:
				return false
			case name != had[i]:
				t.Errorf("%s: %s answers, want %s, %v later", d, name, had[i], time.Since(last[i]))
			}
			had[i], last[i] = name, begin
		}
		time.Sleep(timeout / 3)
	}

	return true
}

// Affinity is among the backends that a client may have: policies, hints and
// readiness come first. A client keeps the backend that it had last.
func TestAffinityWithinPolicies(t *testing.T) {
	t.Parallel()
	k := mustStick(t, scene.MustShare(t), forever)
	here, there := k.Local(), k.Remote()
	internal, external := k.Outside.To("tcp", k.addresses(0)[0]), k.Outside.To("tcp", k.addresses(0)[2])
	k.set(t, scene.ReadyAll(there...)...)
	lab.Eventually(t, "the client has a backend far away", func() bool {
		return slices.Contains(scene.Names(there...), internal.MustAsk(t).Name)
	})
	far := internal.MustAsk(t).Name
	k.set(t, scene.ReadyAll(k.endpoints...)...)
	k.ChangeService(t, "web", scene.ExternalLocal)
	var near string
	lab.Eventually(t, "the policy comes first", func() bool {
		near = external.MustAsk(t).Name

		return near != far
	})
	if !slices.Contains(scene.Names(here...), near) {
		t.Errorf("%s answers from outside, want one of %v", near, scene.Names(here...))
	}
	for _, d := range []scene.Dial{internal, external} {
		mustStay(t, d, near)
	}
	k.ChangeService(t, "web", scene.InternalLocal)
	mustStay(t, internal, near)
}

// mustStay fails the test if another pod answers.
func mustStay(t *testing.T, d scene.Dial, want string) {
	t.Helper()
	for range 20 {
		if answer := d.MustAsk(t); answer.Name != want {
			t.Fatalf("%s: %s answers, want %s", d, answer.Name, want)
		}
	}
}

// A terminating backend gets no new connections from the clients that had it, as
// long as there are others; of those that are left, each client keeps one. A
// backend that has gone and comes back within minutes has its clients again.
func TestAffinityOfLeavingBackends(t *testing.T) {
	t.Parallel()
	k := mustStick(t, scene.MustShare(t), forever)
	for _, c := range []*scene.Client{k.Pod, k.Outside} {
		d := c.To("tcp", k.addresses(0)[0])
		had := d.MustAsk(t).Name
		k.set(t, k.allBut(had, scene.Draining)...)
		next := mustMove(t, d, had)
		mustStay(t, d, next)
		k.set(t, scene.ReadyAll(k.endpoints...)...)
		mustHaveSeenAll(t, k.Scene)
		mustStay(t, d, next)
	}

	// All are leaving: they are as good as any.
	var leaving []scene.Endpoint
	for _, pod := range k.endpoints {
		leaving = append(leaving, scene.Endpoint{Pod: pod, Is: scene.Draining})
	}
	k.set(t, leaving...)
	mustHaveSeenAll(t, k.Scene)
	before := k.memory(t, k.Pod)
	if after := k.memory(t, k.Pod); !slices.Equal(after, before) {
		t.Errorf("among those who leave, the client has %v, had %v", after, before)
	}

	// All go, and come back within minutes: each is the backend that it was, and has its clients.
	k.set(t)
	pinned := sluice.MustLoad(t, k.Agent)
	lab.Eventually(t, "no backend is left", func() bool { return len(backendIDs(t, k.Scene, pinned, "web")) == 0 })
	k.set(t, scene.ReadyAll(k.endpoints...)...)
	mustHaveSeenAll(t, k.Scene)
	if after := k.memory(t, k.Pod); !slices.Equal(after, before) {
		t.Errorf("among backends that came back, the client has %v, had %v", after, before)
	}
}

// mustMove waits until another pod answers.
func mustMove(t *testing.T, d scene.Dial, from string) (to string) {
	t.Helper()
	lab.Eventually(t, d.String()+" leaves "+from, func() bool {
		to = d.MustAsk(t).Name

		return to != from
	})

	return to
}

// Affinity is switched on and off. New connections follow, those that are open
// go on.
func TestAffinitySwitch(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pods := append(s.Local(), s.Remote()...)
	s.SetEndpoints(t, "web", scene.ReadyAll(pods...)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	var open []*scene.Connection
	for range 2 {
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", web), scene.Names(pods...)...)
		}
		open = append(open, scene.MustOpenAll(t, s.Clients(), web, "tcp", "udp")...)
		s.ChangeService(t, "web", scene.Affinity(forever))
		for _, c := range s.Clients() {
			lab.Eventually(t, c.Name+" keeps its backend", func() bool {
				first := c.To("tcp", web).MustAsk(t).Name
				for range 30 {
					if c.To("tcp", web).MustAsk(t).Name != first {
						return false
					}
				}

				return true
			})
		}
		open = append(open, scene.MustOpenAll(t, s.Clients(), web, "tcp", "udp")...)
		scene.MustGoOn(t, open...)
		s.ChangeService(t, "web", scene.Affinity(0))
	}
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", web), scene.Names(pods...)...)
	}
	scene.MustGoOn(t, open...)
}

// Over UDP, affinity applies to new flows: a socket has one until it is idle.
func TestAffinityUDP(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pods := append(s.Local(), s.Remote()...)
	s.SetEndpoints(t, "web", scene.ReadyAll(pods...)...)
	web := scene.At(s.CreateService(t, "web", scene.Affinity(1)).Spec.ClusterIPs[0], 80)
	for _, c := range s.Clients() {
		d := c.To("udp", web)
		lab.Eventually(t, "the Service is programmed", func() bool {
			_, err := d.Ask()

			return err == nil
		})
		first := d.MustOpen(t)
		moved := false
		lab.Eventually(t, "a new socket of "+c.Name+" has another backend, after a while", func() bool {
			time.Sleep(1100 * time.Millisecond)
			scene.MustGoOn(t, first)
			moved = d.MustAsk(t).Name != first.Pod

			return moved
		})
	}
}

// Affinities survive a restart of the agent.
func TestAffinityOutlivesTheAgent(t *testing.T) {
	t.Parallel()
	s := scene.MustSet(t, scene.Config{})
	k := mustStick(t, s, forever)
	before := make(map[string][]string)
	for _, c := range s.Clients() {
		before[c.Name] = k.memory(t, c)
	}
	lab.Must(t, s.Agent.Kill())
	for _, c := range s.Clients() {
		if got := k.memory(t, c); !slices.Equal(got, before[c.Name]) {
			t.Errorf("without an agent, %s has %v, had %v", c.Name, got, before[c.Name])
		}
	}
	sluice.MustRestart(t, s.Agent)
	for _, c := range s.Clients() {
		if got := k.memory(t, c); !slices.Equal(got, before[c.Name]) {
			t.Errorf("with another agent, %s has %v, had %v", c.Name, got, before[c.Name])
		}
	}
}
