package devices

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestServices dials Services as every client does that has no socket that Sluice
// sees, on every kind of network, with both ways of attaching:
//
//	           who answers                       whom it sees
//	client ┬─▶ pod-1-1, node-1   (local)         the client
//	       └─▶ pod-2-0, node-2   (remote)        node-1, as it is on the way there
//	pod-1-0 ┬▶ pod-1-1, node-1, pod-2-0, node-2  pod-1-0
//	        └▶ itself                            node-1
//
// Where checksums are not left to the receiver (which a veth does not check)
// every receiver checks what Sluice made of them.
func TestServices(t *testing.T) {
	for _, test := range []struct {
		name       string
		attachment lab.Attachment
		filter     string
		checksums  bool   // are real
		bridgeSees string // whether netfilter sees what a bridge forwards
		agent      []string
	}{
		{"bridge, tcx", lab.Bridged, bridgeCNI, false, "1", []string{"--device-attach=tcx"}},
		{"bridge that netfilter does not see, clsact, real checksums", lab.Bridged, flannelCNI, true, "0",
			[]string{"--device-attach=clsact"}},
		{"routed, tcx, local by address, real checksums", lab.Routed, flannelCNI, true, "1",
			[]string{"--device-attach=tcx", "--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}},
		{"point to point, clsact", lab.PointToPoint, bridgeCNI, false, "1", []string{"--device-attach=clsact"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{Attachment: test.attachment, OverlayMTU: 1450},
				filter: test.filter,
				agent:  test.agent,
			})
			w.mustBeStrict(t)
			w.mustSetBridgeNetfilter(t, test.bridgeSees)
			if test.checksums {
				w.mustOffload(t, lab.Checksums, false)
			}
			c := casesOf(w)
			w.start(t, c.services()...)
			for _, test := range slices.Concat(c.outside(t), c.inside(t), c.hooked(t)) {
				test.run(t, w)
			}
		})
	}
}

// cases are Services that differ in where their backends are.
type cases struct {
	*world
	local, remote, host, remoteHost service
	self                            service // pod-1-0, which is also the client in the cluster
	keeps                           service // traffic policy Local, backends on both nodes
	elsewhere                       service // traffic policy Local, no backend on node-1
	empty                           service
}

func casesOf(w *world) *cases {
	first, second := w.Nodes[0], w.Nodes[1]

	return &cases{
		world:      w,
		local:      service{number: 1, backends: []backend{onPod(first.Pods[1])}},
		remote:     service{number: 2, backends: []backend{onPod(second.Pods[0])}},
		host:       service{number: 3, backends: []backend{onHost(first)}},
		remoteHost: service{number: 4, backends: []backend{onHost(second)}},
		self:       service{number: 5, backends: []backend{onPod(first.Pods[0])}},
		keeps:      service{number: 6, local: true, backends: []backend{onPod(second.Pods[0]), onPod(first.Pods[1])}},
		elsewhere:  service{number: 7, local: true, backends: []backend{onPod(second.Pods[0])}},
		empty:      service{number: 8},
	}
}

func (c *cases) services() []service {
	return []service{c.local, c.remote, c.host, c.remoteHost, c.self, c.keeps, c.elsewhere, c.empty}
}

// every way that a client outside of the cluster can dial, if routes lead the
// cluster IPs.
var everyWay = []way{nodePort, loadBalancer, externalIP, clusterIP}

// outside is what the client does.
func (c *cases) outside(t *testing.T) []dialTest {
	t.Helper()
	first, second := c.Nodes[0], c.Nodes[1]
	client, caller := hostIPs(c.Client), c.world.outside(t)
	masquerade := func(b backend) [2]netip.Addr { return sourcesTo(t, first, b) }

	return []dialTest{
		{name: "client to a pod here", from: caller, to: c.local, ways: everyWay,
			backend: first.Pods[1].Name, seen: client},
		{name: "client to a pod on another node", from: caller, to: c.remote, ways: everyWay,
			backend: second.Pods[0].Name, seen: masquerade(onPod(second.Pods[0]))},
		{name: "client to this node", from: caller, to: c.host, ways: everyWay,
			backend: first.Name, seen: client},
		{name: "client to another node", from: caller, to: c.remoteHost, ways: everyWay,
			backend: second.Name, seen: masquerade(onHost(second))},
		{name: "client to a pod here, policy Local", from: caller, to: c.keeps, ways: fromOutside,
			backend: first.Pods[1].Name, seen: client},
		{name: "client to no pod here, policy Local", from: caller, to: c.elsewhere, ways: fromOutside,
			errno: unix.ETIMEDOUT},
		// Six refusals is what an address gets in a moment.
		{name: "client to a Service without endpoints", from: caller, to: c.empty, ways: []way{nodePort, loadBalancer}, errno: unix.ECONNREFUSED},
		{name: "client to the pod that dials itself", from: caller, to: c.self, ways: everyWay,
			backend: first.Pods[0].Name, seen: client},
	}
}

// inside is the dials of a pod whose sockets no hook sees.
func (c *cases) inside(t *testing.T) []dialTest {
	t.Helper()
	first, second := c.Nodes[0], c.Nodes[1]
	pod, caller := podIPs(first.Pods[0]), c.optedOut(t, first.Pods[0])

	return []dialTest{
		{name: "pod to a pod here", from: caller, to: c.local, ways: everyWay, backend: first.Pods[1].Name, seen: pod},
		{name: "pod to a pod on another node", from: caller, to: c.remote, ways: everyWay,
			backend: second.Pods[0].Name, seen: pod},
		{name: "pod to its node", from: caller, to: c.host, ways: everyWay, backend: first.Name, seen: pod},
		// The CNI plugin's masquerade, not ours.
		{name: "pod to another node", from: caller, to: c.remoteHost, ways: everyWay,
			backend: second.Name, seen: hostIPs(&first.Host)},
		{name: "pod to itself", from: caller, to: c.self, ways: everyWay, backend: first.Pods[0].Name,
			seen: sourcesTo(t, first, onPod(first.Pods[0]))},
		{name: "pod to no pod here, policy Local", from: caller, to: c.elsewhere, ways: everyWay,
			backend: second.Pods[0].Name, seen: pod},
		{name: "pod to a Service without endpoints", from: caller, to: c.empty, ways: []way{clusterIP, nodePort}, errno: unix.ECONNREFUSED},
	}
}

// hooked is the dials of a pod whose sockets are translated: devices do not translate them.
func (c *cases) hooked(t *testing.T) []dialTest {
	t.Helper()
	first, second := c.Nodes[0], c.Nodes[1]
	pod, caller := podIPs(first.Pods[1]), lab.MustCaller(t, first.Pods[1].Namespace, c.cgroups[0])

	return []dialTest{
		{name: "hooked pod to a pod here", from: caller, to: c.self, ways: everyWay, backend: first.Pods[0].Name, seen: pod},
		{name: "hooked pod to a pod on another node", from: caller, to: c.remote, ways: everyWay,
			backend: second.Pods[0].Name, seen: pod},
	}
}
