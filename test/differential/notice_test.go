package differential

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// What is not the same is noticed: two proxies with different objects, and
// differences that are not listed.
func TestNoticesWhatDiffers(t *testing.T) {
	c := cluster.Shared(t)
	a := mustAPI(t, c)
	reference := settings{nodePortAddresses: firstSegment, detect: "ClusterCIDR"}
	candidate := settings{nodePortAddresses: everyAddress, detect: "ClusterCIDR", masqueradeAll: true}
	p := mustPlay(t, c, a, reference, candidate, differenceCounts{})
	p.attempts = 1
	now, later := directed()
	lab.Must(t, p.publish(t, now))
	p.objects, p.comparison.way = now, p.api.way
	all := slices.DeleteFunc(p.settings.frontends(now, objects{}), func(f frontend) bool {
		return f.address.String() != "10.96.10.10:53" && f.address.String() != "192.168.51.1:30900"
	})
	lab.Must(t, p.compare(all))
	t.Logf("with different objects:\n%s", p.report())
	for _, want := range []string{
		"pod by device dials s9 ClusterIP udp/10.96.10.10:53", // masqueraded
		"pod dials s9 node port udp/192.168.51.1:30900",       // answers
	} {
		if !strings.Contains(p.report(), want) {
			t.Errorf("not noticed: %s", want)
		}
	}

	p.wrongs = nil
	// One pair in four differs: it has pod-1-1, and kube-proxy picks another backend for it anew.
	var pairs []*lasting
	for range 10 {
		more, err := p.connect(all, somePairs)
		lab.Must(t, err)
		pairs = append(pairs, more...)
	}
	lab.Must(t, p.publish(t, later))
	p.objects, p.comparison.way = later, p.api.way
	p.listed = nil
	lab.Must(t, p.compareFates(pairs))
	t.Logf("connections, nothing is listed:\n%s", p.report())
	if len(p.wrongs) == 0 {
		t.Error("not noticed: connections")
	}
}

// Each difference changes what it is about, and nothing else.
func TestDifferences(t *testing.T) {
	node, pod, guest, backend, podOfOther := clients[0], clients[1], clients[2], clients[4], clients[6]
	local, remote := netip.MustParseAddrPort("10.244.1.4:8080"), netip.MustParseAddrPort("10.244.2.2:8080")
	answer := func(server string, at netip.AddrPort, seen string) outcome {
		return outcome{server: server, at: at, seen: seen}
	}
	failed := func(f failure) outcome { return outcome{failure: f} }
	localSeen, remoteSeen := answer("pod-1-2", local, "10.244.1.1"), answer("pod-2-0", remote, "192.168.50.1")
	for _, test := range []struct {
		name   string
		client *client
		all    bool // masqueradeAll
		is     outcome
		want   outcome
	}{
		{"an outsider is preserved for a backend here", outsider, false, localSeen, answer("pod-1-2", local, theClient)},
		{"an outsider is not preserved for a backend elsewhere", outsider, false, remoteSeen, remoteSeen},
		{"an outsider is not preserved with masqueradeAll", outsider, true, localSeen, localSeen},
		{"a pod of another node is not preserved for a backend elsewhere", podOfOther, false, remoteSeen, remoteSeen},
		{"a pod is preserved", guest, false, remoteSeen, answer("pod-2-0", remote, theClient)},
		{"a pod is not preserved at its device with masqueradeAll", guest, true, remoteSeen, remoteSeen},
		{"a pod's socket is preserved with masqueradeAll", pod, true, remoteSeen, answer("pod-2-0", remote, theClient)},
		{"the node shows the address on its way", node, false, answer("pod-2-0", remote, "10.244.1.1"), remoteSeen},
		{"a socket dials itself", backend, false, answer("pod-1-1", local, "10.244.1.1"), answer("pod-1-1", local, theClient)},
		{"a socket learns of a drop", pod, false, failed(silence), failed(unreachable)},
		{"a device does not learn of a drop", guest, false, failed(silence), failed(silence)},
		{"the node does not learn of a dropped datagram", node, false, failed(permDropped), failed(silence)},
		{"the node learns of a rejected datagram", node, false, failed(permRefused), failed(refused)},
		{"a refusal stays one", outsider, false, failed(refused), failed(refused)},
		{"elsewhere stays elsewhere", node, false, answer(elsewhere, netip.AddrPort{}, "192.168.50.1"), answer(elsewhere, netip.AddrPort{}, "192.168.50.1")},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, _ := directed()
			o.putOne(o.services["s9"], directedSlices(map[string]discoveryv1.EndpointConditions{"pod-1-2": {}, "pod-2-0": {}}))
			protocol := "tcp"
			if test.is.failure == permDropped || test.is.failure == permRefused {
				protocol = "udp"
			}
			p := probe{
				client: test.client, frontend: frontend{service: "s9", protocol: protocol}, settings: settings{masqueradeAll: test.all}, objects: o,
				sources: map[netip.Addr]netip.Addr{remote.Addr(): netip.MustParseAddr("192.168.50.1")},
			}
			got, used := expect(p, outcomes{test.is: 1}, differences)
			if _, ok := got[test.want]; !ok || len(got) != 1 || (len(used) > 0) != (test.is != test.want) {
				t.Errorf("%v, using %v, want %v", got, used, test.want)
			}
		})
	}
}

// Source ranges are checked for the node by its node IP, for a pod that they do not admit at its socket, and for others
// at their device.
func TestDifferencesOfSourceRanges(t *testing.T) {
	o, _ := directed()
	svc := o.services["s8"]
	svc.Spec.LoadBalancerSourceRanges = append(svc.Spec.LoadBalancerSourceRanges, "10.244.1.3/32")
	at := netip.MustParseAddrPort("10.244.1.3:8080")
	masqueraded, own := outcome{server: "pod-1-1", at: at, seen: "10.244.1.1"}, outcome{server: "pod-1-1", at: at, seen: theClient}
	dropped, noRoute := outcome{failure: silence}, outcome{failure: unreachable}
	node, pod, backend := clients[0], clients[1], clients[4]
	for _, test := range []struct {
		client   *client
		kind     kind
		protocol string
		is       outcome
		want     outcome
	}{
		{node, vip, "tcp", masqueraded, noRoute},
		{node, vip, "udp", masqueraded, outcome{failure: refused}}, // by its stack, which has the address
		{pod, vip, "tcp", dropped, noRoute},
		{pod, vip, "udp", dropped, dropped},
		{backend, vip, "tcp", dropped, dropped},
		{backend, vip, "tcp", masqueraded, masqueraded},
		{backend, clusterIP, "tcp", masqueraded, own},
	} {
		f := frontend{service: "s8", kind: test.kind, protocol: test.protocol, address: netip.AddrPortFrom(boundVIPs[0].Addr(), 53)}
		p := probe{client: test.client, frontend: f, objects: o, sources: map[netip.Addr]netip.Addr{
			at.Addr(): netip.MustParseAddr("10.244.1.1"),
		}}
		if got, _ := expect(p, outcomes{test.is: 1}, differences); got[test.want] != 1 {
			t.Errorf("%s dials %s: %v, want %v", test.client.name, f, got, test.want)
		}
	}
}

// The same seed makes the same objects, and others make others.
func TestObjectsAreReproducible(t *testing.T) {
	made := func(seed uint64) []string {
		r := rand.New(rand.NewPCG(seed, 0))
		o := randomObjects(r, serviceCount)
		for range 10 {
			o = randomChange(r, o, serviceCount)
		}
		return slices.Sorted(maps.Keys(o.slices))
	}
	same, differ := true, false
	for seed := range uint64(10) {
		same = same && slices.Equal(made(seed), made(seed))
		differ = differ || !slices.Equal(made(seed), made(seed+1))
	}
	if !same || !differ {
		t.Errorf("the same: %t, different: %t", same, differ)
	}
}
