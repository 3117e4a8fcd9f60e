package devices

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestMasqueradeAll checks that every backend sees the node for every client, where the
// policy lets it:
//
//	client, pod-1-0 ─▶ pod-1-1 sees node-1, as it is on the way to pod-1-1
//	client ─▶ pod-1-1, policy Local, sees the client
func TestMasqueradeAll(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450, Attachment: lab.PointToPoint},
		filter: bridgeCNI,
		agent:  []string{"--masquerade-all"},
	})
	w.mustBeStrict(t)
	c := casesOf(w)
	w.start(t, c.services()...)
	first, second := w.Nodes[0], w.Nodes[1]
	client, pod := w.outside(t), w.optedOut(t, first.Pods[0])
	here, there := sourcesTo(t, first, onPod(first.Pods[1])), sourcesTo(t, first, onPod(second.Pods[0]))

	for _, test := range []dialTest{
		{name: "client to a pod here", from: client, to: c.local, ways: everyWay, backend: "pod-1-1", seen: here},
		{name: "client to a pod there", from: client, to: c.remote, ways: everyWay, backend: "pod-2-0", seen: there},
		{name: "client to a pod here, policy Local", from: client, to: c.keeps, ways: fromOutside, backend: "pod-1-1",
			seen: hostIPs(w.Client)},
		{name: "pod to a pod here", from: pod, to: c.local, ways: everyWay, backend: "pod-1-1", seen: here},
		{name: "pod to a pod there", from: pod, to: c.remote, ways: everyWay, backend: "pod-2-0", seen: there},
	} {
		test.run(t, w)
	}
}

// TestPodComes has a pod, and with it a device, appear under a running agent.
//
//	pod-1-0, pod-1-1, and then pod-1-2 ─▶ cluster IP ── pod-2-0
func TestPodComes(t *testing.T) {
	for _, attach := range []string{"tcx", "clsact"} {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{OverlayMTU: 1450},
				filter: bridgeCNI,
				agent:  []string{"--device-attach", attach},
			})
			w.mustBeStrict(t)
			c := casesOf(w)
			w.start(t, c.remote)
			pod, err := w.Nodes[0].AddPod()
			lab.Must(t, err)
			caller := w.optedOut(t, pod)
			for _, f := range families {
				lab.Eventually(t, "the new pod reaches the Service", func() error {
					reply, err := caller.Exchange(lab.Exchange{
						Network: "tcp", Address: c.remote.at(clusterIP, f, nil), Timeout: silence,
					})
					if err != nil {
						return err
					}
					return expect(reply, "pod-2-0", podIPs(pod)[f])
				})
			}
		})
	}
}

// TestFailover has clients outside dial node-1, which has no endpoint of Services with the policy Local:
//
//	fallback:    client ─▶ node-1 ─▶ pod-2-0 sees node-1
//	passthrough: client ─▶ node-1, which routes external addresses to node-2 ─▶ pod-2-0 sees the client
//	             client ─▶ node port of node-1: dropped
func TestFailover(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
	here, there := w.Nodes[0], w.Nodes[1]
	leads := func(number int, failover string) service {
		return service{
			number: number, local: true, backends: []backend{onPod(there.Pods[0])},
			annotations: map[string]string{"sluice-lb.io/external-failover": failover},
		}
	}
	falls, passes := leads(80, "fallback"), leads(81, "passthrough")
	for _, w := range fromOutside[1:] {
		for f, via := range []netip.Addr{there.IPv4, there.IPv6} {
			vip := netip.MustParseAddr(passes.ip(w, family(f)))
			lab.Must(t, here.AddRoute(netip.PrefixFrom(vip, vip.BitLen()), via))
		}
	}
	w.start(t, falls, passes)
	client := w.outside(t)
	for _, test := range []dialTest{
		{name: "fallback", from: client, to: falls, ways: fromOutside, backend: "pod-2-0", seen: sourcesTo(t, here, falls.backends[0])},
		{name: "passthrough", from: client, to: passes, ways: fromOutside[1:], backend: "pod-2-0", seen: hostIPs(w.Client)},
		{name: "passthrough, by a node port", from: client, to: passes, ways: fromOutside[:1], errno: unix.ETIMEDOUT},
	} {
		test.run(t, w)
	}
	for to, want := range map[string]string{
		falls.ip(loadBalancer, ipv4):  "policy     traffic policy Local, and no usable endpoint is on this node: those of others (external-failover: fallback)",
		passes.ip(loadBalancer, ipv4): "leaves packets from outside to the routes (external-failover: passthrough)",
	} {
		shown, err := w.agents[0].Run("explain", "--from", w.Client.IPv4.String(), "--to", to+":80")
		if err != nil || !strings.Contains(shown, want) {
			t.Errorf("%v, sluice explain --to %s shows\n%swant %q", err, to, shown, want)
		}
	}
}
