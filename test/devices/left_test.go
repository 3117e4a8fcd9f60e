package devices

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// sender is a UDP socket that connects once, and then only sends and receives, as most programs do.
type sender struct {
	*lab.Socket
	to string
}

// mustSend returns a sender to a Service.
func mustSend(t *testing.T, from *lab.Caller, f family, to string) sender {
	t.Helper()
	socket, err := from.Socket([]string{"udp4", "udp6"}[f])
	lab.Must(t, err)
	lab.Must(t, socket.SetTimeout(300*time.Millisecond), socket.Connect(to))

	return sender{socket, to}
}

// answered asks, and returns an error unless this backend answers, from the Service.
func (s sender) answered(backend string) error {
	if err := s.Send("who\n"); err != nil {
		return err
	}
	text, from, err := s.Recv()
	if err != nil {
		return err
	}
	answer, err := lab.ParseAnswer(text)
	if err != nil {
		return err
	}
	if answer.Name != backend || from.String() != s.to {
		return fmt.Errorf("answered by %s from %s, want %s from %s", answer.Name, from, backend, s.to)
	}
	if peer, err := s.Peer(); err != nil || peer.String() != s.to {
		return fmt.Errorf("the peer is %s, %v", peer, err)
	}

	return nil
}

// refused asks, and returns an error unless that is refused.
func (s sender) refused() error {
	if err := s.Send("who\n"); errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	text, _, err := s.Recv()
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("answered %q, %w; want %w", text, err, unix.ECONNREFUSED)
	}

	return nil
}

// silent asks, and returns an error if there is an answer, or an error other than that there is none.
func (s sender) silent() error {
	if err := s.Send("who\n"); err != nil {
		return err
	}
	text, _, err := s.Recv()
	if !errors.Is(err, unix.ETIMEDOUT) {
		return fmt.Errorf("answered %q, %w; want none", text, err)
	}

	return nil
}

// TestConnectedUDPFollows has a Service lose and get backends under sockets that have connected once, before it
// existed or after. Each of their datagrams reaches a backend that the Service has, or none, and they see nothing
// but the Service.
//
//	pod-1-0, socket hooks ─┐              ┌─ pod-2-0, the first backend
//	pod-1-0, opted out ────┼─ cluster IP ─┼─ pod-1-1, pod-2-1, node-2
//	node-1 ────────────────┘              └─
func TestConnectedUDPFollows(t *testing.T) {
	for name, c := range map[string]lab.Config{
		"bridge":         {OverlayMTU: 1450, Attachment: lab.Bridged},
		"routed":         {Attachment: lab.Routed},
		"point to point": {OverlayMTU: 1450, Attachment: lab.PointToPoint},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: c, filter: bridgeCNI})
			w.mustBeStrict(t)
			backends := map[string]backend{"node-2": onHost(w.Nodes[1])}
			for _, pod := range w.Pods() {
				backends[pod.Name] = onPod(pod)
			}
			with := func(name string) service { return service{number: 1, backends: []backend{backends[name]}} }
			first := with("pod-2-0")
			w.start(t)
			callers := map[string]*lab.Caller{
				"pod":           lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0]),
				"opted-out pod": w.optedOut(t, w.Nodes[0].Pods[0]),
				"node":          lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0]),
			}
			senders := make(map[string]sender)
			each := func(what string, ask func(sender) error) {
				t.Helper()
				for who, s := range senders {
					lab.Eventually(t, who+": "+what, func() error { return ask(s) })
				}
			}
			add := func(when string) {
				for who, caller := range callers {
					for _, f := range families {
						senders[fmt.Sprintf("%s of the %s, connected %s", f, who, when)] = mustSend(t, caller, f, first.at(clusterIP, f, nil))
					}
				}
			}
			answered := func(backend string) {
				t.Helper()
				each("answered by "+backend, func(s sender) error { return s.answered(backend) })
			}

			add("before the Service existed")
			each("no answer without the Service", sender.silent)
			w.publish(t, service{number: 1})
			each("refused without a backend", sender.refused)
			add("while it had no backend")
			w.publish(t, first)
			answered("pod-2-0")
			add("while it had one")
			answered("pod-2-0")
			for _, next := range []string{"pod-2-1", "pod-1-1", "node-2", "pod-2-0"} {
				w.publish(t, with(next))
				answered(next)
			}
			w.publish(t, service{number: 1})
			each("refused after the last backend has gone", sender.refused)
			w.publish(t, with("pod-1-1"))
			answered("pod-1-1")
			lab.Must(t, w.agents[0].Kill())
			w.publish(t, with("pod-2-1"))
			w.restart(t)
			answered("pod-2-1")
			w.publish(t)
			each("no answer after the Service has gone", sender.silent)
			w.publish(t, with("pod-1-1"))
			answered("pod-1-1")
		})
	}
}

// TestConnectedUDPLeavesBackendHere has a Service leave a pod of the node. A socket sees nothing but the Service, unless
// its pod and the backend are behind one bridge, which takes the datagrams there by itself: such a socket is ended, and
// gets another backend when it connects anew.
//
//	pod-1-0, node-1 ── cluster IP ─┬─ pod-1-1, goes
//	                               └─ pod-2-0, comes
func TestConnectedUDPLeavesBackendHere(t *testing.T) {
	for name, c := range map[string]lab.Config{
		"bridge":         {OverlayMTU: 1450, Attachment: lab.Bridged},
		"routed":         {Attachment: lab.Routed},
		"point to point": {OverlayMTU: 1450, Attachment: lab.PointToPoint},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: c, filter: bridgeCNI})
			w.mustBeStrict(t)
			goes, comes := w.Nodes[0].Pods[1], w.Nodes[1].Pods[0]
			s := service{number: 1, backends: []backend{onPod(goes)}}
			w.start(t, s)
			pod := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0])
			process := lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0])
			var senders, ended []sender
			for _, f := range families {
				at := s.at(clusterIP, f, nil)
				senders = append(senders, mustSend(t, process, f, at))
				if c.Attachment == lab.Bridged {
					ended = append(ended, mustSend(t, pod, f, at))
				} else {
					senders = append(senders, mustSend(t, pod, f, at))
				}
			}
			for _, sender := range append(senders, ended...) {
				lab.Eventually(t, "answered by "+goes.Name, func() error { return sender.answered(goes.Name) })
			}
			s.backends = nil
			w.publish(t, s)
			for _, sender := range append(senders, ended...) {
				lab.Eventually(t, "refused without a backend", sender.refused)
			}
			s.backends = []backend{onPod(comes)}
			w.publish(t, s)
			for _, sender := range senders {
				lab.Eventually(t, "answered by "+comes.Name, func() error { return sender.answered(comes.Name) })
			}
			for _, sender := range ended {
				lab.Eventually(t, "ended", func() error {
					if pending, err := sender.Option(unix.SOL_SOCKET, unix.SO_ERROR); unix.Errno(pending) != unix.ECONNABORTED {
						return fmt.Errorf("pending is %v, %w", unix.Errno(pending), err)
					}
					return nil
				})
				lab.Must(t, sender.Connect(sender.to), sender.answered(comes.Name))
			}
		})
	}
}

// TestFirstDatagramOfALedSocket has sockets of the node connect before their Service exists. The first datagram that is
// led on reaches the backend, whose Ethernet address the node has yet to ask for: there is no second one.
//
//	process, node-1 ─┬─ pod-1-1, node-1
//	                 └─ pod-2-0, node-2
func TestFirstDatagramOfALedSocket(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{filter: looseCNI})
	c := casesOf(w)
	services := []service{c.local, c.remote}
	w.start(t)
	process := lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0])
	senders := make(map[string]sender)
	for _, s := range services {
		for _, f := range families {
			sender := mustSend(t, process, f, s.at(clusterIP, f, nil))
			lab.Must(t, sender.SetTimeout(dialTimeout))
			senders[s.at(clusterIP, f, nil)] = sender
		}
	}
	w.publish(t, services...)
	lab.Eventually(t, "the agent has the Services", func() error {
		s, err := w.agents[0].Status()
		if err == nil && s.Services != len(services) {
			err = fmt.Errorf("it has %d", s.Services)
		}

		return err
	})
	for _, s := range services {
		for _, f := range families {
			if err := senders[s.at(clusterIP, f, nil)].answered(s.backends[0].name); err != nil {
				t.Errorf("%s of %s: %v", f, s.name(), err)
			}
		}
	}
}
