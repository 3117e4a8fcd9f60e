package datapath

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// newResteering returns a world that re-steers, in which a route leads to each pod, so that its packets pass
// the node, where programs are attached to its device.
func newResteering(t testing.TB) *world {
	t.Helper()
	w := buildWorldBy(t, lab.Routed, func(c *Config) { c.Heal, c.Resteer, c.Handshakes = true, true, false })
	w.Datapath = w.mustOpen(t, w.cfg)
	w.needsTracing(t)
	w.mustAttach(t)
	w.mustAttachPods(t)

	return w
}

// asker is a socket that is connected to a Service, and the backend that has answered it last.
type asker struct {
	*lab.Socket
	by string
}

// ask sends a question and returns whether there is an answer in time, which has to come from the Service.
func (a *asker) ask(t *testing.T, at string) bool {
	t.Helper()
	lab.Must(t, a.Send("who\n"))
	text, from, err := a.Recv()
	if err != nil {
		return false
	}
	if from.String() != at {
		t.Errorf("the answer comes from %s", from)
	}
	a.by = mustAnswer(t, text[:len(text)-1]).Name

	return true
}

// A resolver sends its query again from the same connected socket. When others on the node have found out that
// the backend does not answer, the next datagram goes to another one, also from a socket that it has answered
// before. The socket then stays there.
func TestConnectedDatagramsLeaveSuspect(t *testing.T) {
	w := newResteering(t)
	client := w.pod(t)
	const sockets, blue = 12, 2
	for network, at := range map[string]string{"udp4": "10.96.1.1:80", "udp6": "[fd00:96::1]:80"} {
		t.Run(network, func(t *testing.T) {
			to := w.all4()
			if network == "udp6" {
				to = w.all6()
			}
			s := w.add(t, service{proto: "udp", at: []string{at}, to: to})
			others := lab.Exchange{Network: network, Address: at}
			if report := mustRun(t, client, others, 200, 500*time.Millisecond); len(report.Failures) > 0 {
				t.Fatalf("%d failures before, such as %v", len(report.Failures), report.Failures[0])
			}

			all := make([]*asker, 2*sockets)
			for i := range all {
				all[i] = &asker{Socket: mustSocket(t, client, network)}
				lab.Must(t, all[i].SetTimeout(200*time.Millisecond), all[i].Connect(at))
				if i < sockets && !all[i].ask(t, at) {
					t.Fatal("no answer while all is well")
				}
			}
			answer, lost := silence(t, w.answers[blue]), 0
			for _, a := range all[sockets:] {
				if !a.ask(t, at) {
					lost++
				}
			}
			mustRun(t, client, others, 200, 1500*time.Millisecond)
			if h := w.health(s.backends[blue]); !h.IsSuspect() || lost == 0 {
				t.Fatalf("%d datagrams were lost, and it is %+v", lost, h)
			}
			left := 0
			for _, a := range all {
				had := a.by
				if !a.ask(t, at) || a.by == colours[blue] {
					t.Errorf("after an answer by %q: the next one is by %q", had, a.by)
				}
				if stays := had != "" && had != colours[blue]; stays && a.by != had {
					t.Errorf("it was answered by %s, and then by %s", had, a.by)
				} else if !stays {
					left++
				}
				if peer, err := a.Peer(); err != nil || peer.String() != at {
					t.Errorf("the peer is %s, %v", peer, err)
				}
			}
			w.mustLoad(t, s, left, blue)
			answer()
			for range 2 {
				for _, a := range all {
					if had := a.by; !a.ask(t, at) || a.by != had {
						t.Errorf("it was answered by %s, and then by %s", had, a.by)
					}
				}
			}
			for _, a := range all {
				lab.Must(t, a.Close())
			}
			for range 10 { // until a probe is answered
				if mustRun(t, client, others, 100, 300*time.Millisecond); !w.health(s.backends[blue]).IsSuspect() {
					break
				}
			}
			if h := w.health(s.backends[blue]); h.IsSuspect() {
				t.Errorf("it answers, and is %+v", h)
			}
			for _, id := range s.backends {
				if n := w.Maps().Loads.Load(id).Sockets; n != 0 {
					t.Errorf("after all were closed, %d sockets are counted", n)
				}
			}
		})
	}
}

// mustLoad checks that so many sockets are flows of other backends now, and none is in the load of this one.
func (w *world) mustLoad(t *testing.T, s *service, flows, without int) {
	t.Helper()
	have := 0
	for i, id := range s.backends {
		load := w.Maps().Loads.Load(id)
		have += int(load.Flows)
		if i == without && (load.Sockets != 0 || load.Flows != 0) {
			t.Errorf("the suspect has %d sockets and %d flows", load.Sockets, load.Flows)
		}
	}
	if have != flows {
		t.Errorf("%d flows are counted, want %d", have, flows)
	}
}

// A SYN that is sent again goes to another backend. The one that the socket has dialled may have this node's own
// address: what follows the SYN finds its flow past the filter for these.
func TestSYNLeavesBackendOnTheNode(t *testing.T) {
	w := newResteering(t)
	lab.Must(t, w.node.Netfilter(drop("silence", "input")))
	for network, backends := range map[string][]string{
		"tcp4": {netip.AddrPortFrom(w.node.IPv4, serverPort).String(), w.v4(0)},
		"tcp6": {netip.AddrPortFrom(w.node.IPv6, serverPort).String(), w.v6(0)},
	} {
		at := map[string]string{"tcp4": "10.96.0.1:80", "tcp6": "[fd00:96::1]:80"}[network]
		w.mark(t, netip.MustParseAddrPort(backends[0]).Addr(), maps.AddrNode)
		w.add(t, service{proto: "tcp", at: []string{at}, algorithm: maps.AlgorithmRR, to: backends})
		for range backends { // one of the two connections is to the node
			s := mustSocket(t, w.pod(t), network)
			lab.Must(t, s.SetTimeout(5*time.Second), s.Connect(at))
			if name, _ := ask(t, s, ""); name != colours[0] {
				t.Errorf("%s: answered by %s", at, name)
			}
		}
	}
}

// When the table of flows is full, a SYN that is sent again stays with its backend: a connection that is never
// made is better than one that is lost.
func TestSYNStaysWithoutRoom(t *testing.T) {
	w := newResteering(t)
	s := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, algorithm: maps.AlgorithmRR, to: w.all4()[:2]})
	silence(t, w.answers[0])
	room, err := w.Maps().FlowsRoom()
	lab.Must(t, err)
	w.Maps().FlowUsage.Add(maps.FlowsConnected, int64(room))
	connected := 0
	for range s.backends {
		socket := mustSocket(t, w.pod(t), "tcp4")
		lab.Must(t, socket.SetTimeout(1500*time.Millisecond)) // the SYN is sent again after a second
		if socket.Connect("10.96.0.1:80") == nil {
			connected++
		}
	}
	if connected != 1 {
		t.Errorf("%d of 2 sockets are connected, want the one that did not dial the silent backend", connected)
	}
}
