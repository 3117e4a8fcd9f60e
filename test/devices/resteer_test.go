package devices

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// deaf lets a machine receive no segment, and mute lets it accept no connection.
const (
	deaf = "table inet dead { chain in { type filter hook input priority 0; meta l4proto tcp drop; }; }"
	mute = "table inet dead { chain out { type filter hook output priority 0; tcp flags & (syn | ack) == syn | ack drop; }; }"

	unmute = "delete table inet dead"
)

// A SYN is sent again after a second, and then after another one.
const (
	soon        = 50 * time.Millisecond // where the handshakes of the backend are fast
	again       = 900 * time.Millisecond
	secondAgain = 1900 * time.Millisecond
)

// warm is after how many connections the handshake of a backend is known: the first one may have waited for
// an Ethernet address.
const warm = 20

func roundRobin(s service) service {
	s.annotations = map[string]string{"sluice-lb.io/algorithm": "rr"}

	return s
}

// TestResteer connects to a Service of which one backend receives nothing any more. Every connection
// succeeds by the SYN that is sent again, and the client has the peer that it has dialled.
//
//	pod-1-0, socket hooks ─┬─▶ pod-2-0, which receives nothing
//	client, node port ─────┼─▶ pod-2-1
//	                       └─▶ pod-1-1
//	node-1, socket hooks ────▶ the first two, which are behind one device
func TestResteer(t *testing.T) {
	for name, attachment := range map[string]lab.Attachment{"bridge": lab.Bridged, "routed": lab.Routed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: attachment}, agent: []string{"--heal=resteer"}})
			dead := w.Nodes[1].Pods[0]
			backends := []backend{onPod(dead), onPod(w.Nodes[1].Pods[1]), onPod(w.Nodes[0].Pods[1])}
			inside, outside := roundRobin(service{number: 1, backends: backends}), roundRobin(service{number: 2, backends: backends})
			own := roundRobin(service{number: 3, backends: backends[:2]})
			apart := roundRobin(service{number: 4, backends: []backend{backends[0], backends[2]}})
			w.start(t, inside, outside, own, apart)
			pod, client := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0]), w.outside(t)
			process := lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0])
			for _, f := range families { // so the handshakes of all backends are known
				connectEach(t, pod, inside.at(clusterIP, f, nil), warm*len(backends))
				connectEach(t, process, own.at(clusterIP, f, nil), warm*len(own.backends))
			}
			lab.Must(t, dead.Netfilter(deaf))

			var connecting sync.WaitGroup
			for _, f := range families {
				connecting.Go(func() {
					to := inside.at(clusterIP, f, nil)
					if late := connectEach(t, pod, to, len(backends)); late < soon || late > again {
						t.Errorf("%s: the SYN was sent again after %v", to, late)
					}
				})
				connecting.Go(func() {
					to := own.at(clusterIP, f, nil)
					if late := connectEach(t, process, to, len(own.backends)); late < soon || late > again {
						t.Errorf("%s: the SYN was sent again after %v", to, late)
					}
				})
				connecting.Go(func() { // the other backend is behind another device
					lost, to := 0, apart.at(clusterIP, f, nil)
					for range apart.backends {
						if _, err := process.Exchange(lab.Exchange{Network: "tcp", Address: to, Timeout: secondAgain}); err != nil {
							lost++
						}
					}
					if lost != 1 {
						t.Errorf("%s: %d connections of the node are lost, want the one to %s", to, lost, dead.Name)
					}
				})
				connecting.Go(func() {
					to := outside.at(nodePort, f, w.Nodes[0])
					if late := connectEach(t, client, to, len(backends)); late < again || late > secondAgain {
						t.Errorf("%s: the SYN was sent again after %v", to, late)
					}
				})
			}
			connecting.Wait()
		})
	}
}

// connectEach connects to each of n backends in turn, and returns how long the slowest connection took.
func connectEach(t *testing.T, from *lab.Caller, to string, n int) (slowest time.Duration) {
	for range n {
		reply, err := from.Exchange(lab.Exchange{Network: "tcp", Address: to, Timeout: dialTimeout})
		if err != nil {
			t.Errorf("%s: %v", to, err)
		} else if reply.Peer.String() != to {
			t.Errorf("%s: the peer is %s", to, reply.Peer)
		}
		slowest = max(slowest, reply.Connect)
	}

	return slowest
}

// TestSYNTimeout connects to a Service whose only backend has died. The socket sends its SYN again soon, and
// more often, so that connect(2) takes as long to fail as it would without Sluice: 3 s, as the pod gives up
// after one SYN more.
//
//	pod-1-0, socket hooks ──▶ pod-2-0, which receives nothing
func TestSYNTimeout(t *testing.T) {
	t.Parallel()
	const untouched = 3 * time.Second
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: lab.Routed}, agent: []string{"--heal=resteer"}})
	client, dead := w.Nodes[0].Pods[0], w.Nodes[1].Pods[0]
	for name, value := range map[string]string{"net/ipv4/tcp_syn_retries": "1", "net/ipv4/tcp_syn_linear_timeouts": "0"} {
		if err := client.Sysctl(name, value); err != nil && !errors.Is(err, fs.ErrNotExist) { // before Linux 6.5
			t.Fatal(err)
		}
	}
	s := service{number: 1, backends: []backend{onPod(dead)}}
	w.start(t, s)
	pod := lab.MustCaller(t, client.Namespace, w.cgroups[0])
	connectEach(t, pod, s.at(clusterIP, ipv4, nil), warm)
	lab.Must(t, dead.Netfilter(deaf))

	socket, err := pod.Socket("tcp4")
	lab.Must(t, err)
	lab.Must(t, socket.SetTimeout(dialTimeout))
	begin := time.Now()
	err = socket.Connect(s.at(clusterIP, ipv4, nil))
	took := time.Since(begin)
	syns, failed := socket.Option(unix.IPPROTO_TCP, unix.TCP_SYNCNT)
	lab.Must(t, failed)
	if lab.Errno(err) != unix.ETIMEDOUT || took < untouched || took > 2*untouched || syns < 2 {
		t.Errorf("connect: %v after %v with %d SYNs more, want %v after %v, with more than one", err, took, syns, unix.ETIMEDOUT, untouched)
	}
}

// TestLateAnswer has a backend answer late, when its connections were already given to another backend. If
// that one has answered, the client hears nothing of the former; if not, the former gets the connection back.
//
//	pod-1-0 ─┬─▶ pod-2-0, whose answers come late
//	         └─▶ pod-2-1, or pod-1-1, which receives nothing
func TestLateAnswer(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: lab.Routed}, agent: []string{"--heal=resteer"}})
	slow, other, dead, client := w.Nodes[1].Pods[0], w.Nodes[1].Pods[1], w.Nodes[0].Pods[1], w.Nodes[0].Pods[0]
	well, lost := roundRobin(service{number: 1, backends: []backend{onPod(slow), onPod(other)}}), roundRobin(service{number: 2, backends: []backend{onPod(slow), onPod(dead)}})
	w.start(t, well, lost)
	lab.Must(t, dead.Netfilter(deaf), slow.Netfilter(mute))
	lab.Must(t, client.Netfilter(fmt.Sprintf("table inet heard { counter accepted {}; chain in { type filter hook input priority 0; "+
		"ip saddr %s tcp flags & (syn | ack) == syn | ack counter name accepted; }; }", slow.IPv4)))
	pod := lab.MustCaller(t, client.Namespace, w.cgroups[0])

	var sockets []*lab.Socket
	var names []string
	for _, s := range []service{well, lost} {
		if s.number == lost.number { // the slow backend's second answer is the first to be heard
			answering := time.AfterFunc(1500*time.Millisecond, func() { lab.Must(t, slow.Netfilter(unmute)) })
			defer answering.Stop()
		}
		var connecting sync.WaitGroup
		both := make([]*lab.Socket, 2) // in turn, one to each backend
		for i := range both {
			connecting.Go(func() { both[i] = mustConnect(t, pod, "tcp4", s.at(clusterIP, ipv4, nil)) })
		}
		connecting.Wait()
		sockets, names = append(sockets, both...), append(names, other.Name, other.Name)
	}
	names[2], names[3] = slow.Name, slow.Name
	for range 2 {
		for i, socket := range sockets {
			lab.Must(t, answeredBy(socket, names[i]))
		}
		time.Sleep(3 * time.Second) // the slow backend answers once more
	}
	// What other has answered in its place, and what it has answered itself.
	counters, err := client.NetfilterCounters()
	lab.Must(t, err)
	if counters["accepted"] != 2 {
		t.Errorf("the client has heard %d answers from %s, want 2", counters["accepted"], slow.Name)
	}
}

// refusing is a ruleset by which a machine refuses connections to a port.
func refusing(port uint16) string {
	return fmt.Sprintf("table inet refusing_%d { chain in { type filter hook input priority 0; tcp dport %d reject with tcp reset; }; }", port, port)
}

// TestRefusedIsTriedElsewhere connects to a Service of which one backend refuses. The connections go to the
// others after some milliseconds, and the client has the peer that it has dialled. It is told at once if
// there is no other backend, and if the Service wants it. If all refuse, a pod's socket may try two others
// first, the second one after a second.
//
//	pod-1-0, socket hooks ─┬─▶ pod-2-0, which refuses
//	client, node port ─────┼─▶ pod-2-1
//	                       └─▶ pod-1-1
//	node-1, socket hooks ────▶ the first two, which are behind one device
func TestRefusedIsTriedElsewhere(t *testing.T) {
	for name, attachment := range map[string]lab.Attachment{"bridge": lab.Bridged, "routed": lab.Routed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: attachment}, agent: []string{"--heal=resteer"}})
			pods := []*lab.Pod{w.Nodes[1].Pods[0], w.Nodes[1].Pods[1], w.Nodes[0].Pods[1]}
			backends := []backend{onPod(pods[0]), onPod(pods[1]), onPod(pods[2])}
			const allRefuse = podPort + 1
			saved, ejects := roundRobin(service{number: 1, backends: backends}), roundRobin(service{number: 2, backends: backends})
			ejects.annotations["sluice-lb.io/heal"] = "eject"
			alone, all := service{number: 3, backends: backends[:1]}, service{number: 4, port: allRefuse, backends: backends}
			own := roundRobin(service{number: 5, backends: backends[:2]})
			w.start(t, saved, ejects, alone, all, own)
			pod, client := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0]), w.outside(t)
			process := lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0])
			for _, f := range families { // so Ethernet addresses are known
				connectEach(t, pod, saved.at(clusterIP, f, nil), len(backends))
				connectEach(t, client, saved.at(nodePort, f, w.Nodes[0]), len(backends))
			}
			lab.Must(t, pods[0].Netfilter(refusing(podPort)))
			for _, pod := range pods {
				lab.Must(t, pod.Netfilter(refusing(allRefuse)))
			}
			for _, f := range families {
				for _, test := range []struct {
					service
					refused int
					within  time.Duration
				}{{saved, 0, again}, {ejects, 1, again}, {alone, len(backends), again}, {all, len(backends), secondAgain}} {
					connectRefused(t, pod, test.at(clusterIP, f, nil), len(backends), test.refused, test.within)
					connectRefused(t, client, test.at(nodePort, f, w.Nodes[0]), len(backends), test.refused, test.within)
				}
				connectRefused(t, process, own.at(clusterIP, f, nil), 2*len(own.backends), 0, again)
				connectRefused(t, process, ejects.at(clusterIP, f, nil), len(backends), 1, again)
				connectRefused(t, process, alone.at(clusterIP, f, nil), len(backends), len(backends), again)
			}
		})
	}
}

// connectRefused connects n times, of which so many must be refused, each within this time.
func connectRefused(t *testing.T, from *lab.Caller, to string, n, refused int, within time.Duration) {
	t.Helper()
	for range n {
		begin := time.Now()
		reply, err := from.Exchange(lab.Exchange{Network: "tcp", Address: to, Timeout: dialTimeout})
		if took := time.Since(begin); took > within {
			t.Errorf("%s: %v after %v", to, err, took)
		}
		switch {
		case lab.Errno(err) == unix.ECONNREFUSED:
			refused--
		case err != nil:
			t.Errorf("%s: %v", to, err)
		case reply.Peer.String() != to:
			t.Errorf("%s: the peer is %s", to, reply.Peer)
		}
	}
	if refused != 0 {
		t.Errorf("%s: %d too few were refused", to, refused)
	}
}
