package devices

import (
	"testing"

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
