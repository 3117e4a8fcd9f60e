package devices

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestAnswersOfPods has a process of the node ask servers in pods from a port that is a Service's, as it may if the
// ports from which clients connect overlap the node ports. The answers are the process'.
//
//	node-1:30001 ─┬─▶ pod-1-0:5353, socket hooks
//	              └─▶ pod-1-0:5354, opted out
func TestAnswersOfPods(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	s := service{number: 1, backends: []backend{onPod(w.Nodes[1].Pods[0])}}
	w.start(t, s)
	pod := w.Nodes[0].Pods[0]
	process := lab.MustCaller(t, w.Nodes[0].Namespace, w.cgroups[0])
	for _, f := range families {
		network, asks := []string{"udp4", "udp6"}[f], s.at(nodePort, f, w.Nodes[0])
		for port, server := range map[uint16]*lab.Caller{5353: lab.MustCaller(t, pod.Namespace, w.cgroups[0]), 5354: w.optedOut(t, pod)} {
			at := netip.AddrPortFrom([]netip.Addr{pod.IPv4, pod.IPv6}[f], port).String()
			answers, err := server.Socket(network)
			lab.Must(t, err, answers.Bind(at))
			asker, err := process.Socket(network)
			lab.Must(t, err, asker.Bind(asks), asker.Connect(at), asker.Send("question"))
			_, client, err := answers.Recv()
			lab.Must(t, err)
			if client.String() != asks {
				t.Errorf("the server at %s sees %s, want %s", at, client, asks)
			}
			lab.Must(t, answers.SendTo("answer", client.String()))
			if text, from, err := asker.Recv(); err != nil || text != "answer" || from.String() != at {
				t.Errorf("received %q from %s, %v", text, from, err)
			}
			lab.Must(t, asker.Close())
			// The port is still that of the Service.
			other, err := server.Socket(network)
			lab.Must(t, err, other.Bind(netip.AddrPortFrom(netip.MustParseAddrPort(at).Addr(), port+10).String()))
			lab.Must(t, other.SendTo("who\n", asks))
			if text, from, err := other.Recv(); err != nil || from.String() != asks {
				t.Errorf("another server dials %s: %q from %s, %v", asks, text, from, err)
			}
		}
	}
}
