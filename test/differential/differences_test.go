package differential

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// probe is what a difference may depend on.
type probe struct {
	client   *client
	frontend frontend
	settings settings
	objects  objects
	sources  map[netip.Addr]netip.Addr // what node-1 dials each backend with
}

// isAtSocket reports whether the client's socket is translated or dropped there. Which pods the source ranges of a
// Service admit is decided at their devices.
func (p probe) isAtSocket() bool {
	svc, ip := p.objects.services[p.frontend.service], p.frontend.address.Addr()
	if p.client.place == onNode || p.frontend.kind != vip || svc == nil || !restricts(svc, familyOf(ip)) {
		return p.client.socket
	}

	return p.client.socket && !admits(svc, podAddresses(p.client.pod)[familyOf(ip)])
}

// difference is one in which Sluice deliberately differs from kube-proxy. A run
// must see every one of them.
type difference struct {
	name  string
	where string // it is decided

	// changes reports whether kube-proxy's outcome is another one with Sluice, and
	// which. Nil: see [frontend.like], [comparison.reference] and lasting_test.go.
	changes func(p probe, o outcome) (outcome, bool)
}

// differences are all there are.
var differences = []difference{
	{"the client's address is preserved", "DESIGN.md 6.1", preservesClient},
	{"a process of the node has the address on the way to its backend", "DESIGN.md 2.1", sourceOfNode},
	{"a socket that dials itself sees itself", "DESIGN.md 2.1", hairpinOfSocket},
	{"a ClusterIP of another proxy passes", "docs/kube-proxy.md", passesForeign},
	{"a socket learns at once of a drop", "DESIGN.md 6.2", reportsDrop},
	{"the node dials a VIP of its own by its node IP", "docs/decisions/01-resolve-at-the-socket.md", checksNodeIP},
	{podElsewhere, "DESIGN.md 2.2", nil},
	{"a rejected datagram of the node is refused", "DESIGN.md 6.2", reportsRejection},
	{string(loopback), "DESIGN.md 6.3", nil},
	{string(lateAddress), "DESIGN.md 6.3", nil},
	{endsStale, "DESIGN.md 6.4", nil},
	{endsSocket, "docs/decisions/14-lead-datagrams-on.md", nil},
	{keepsUnserved, "docs/decisions/01-resolve-at-the-socket.md", nil},
}

// podElsewhere is that of a pod of another node, which detectLocalMode ClusterCIDR
// takes for one of this node's: with externalTrafficPolicy Local, kube-proxy sends it
// to backends whose answers are lost. To Sluice it is a client outside.
const podElsewhere = "a pod of another node is external"

// With externalTrafficPolicy Cluster, and whenever kube-proxy masquerades: if the
// reply comes back through this node anyway, the client's address is preserved.
// masqueradeAll restores kube-proxy's behaviour, but not for sockets: they are
// connected to the backend itself.
func preservesClient(p probe, o outcome) (outcome, bool) {
	c := p.client
	if o.failure != "" || o.seen == theClient || o.server == c.answers {
		return o, false
	}
	if c.place == onNode {
		return o, false
	}
	if p.settings.masqueradeAll && !p.isAtSocket() {
		return o, false
	}
	if !c.local() && !p.objects.isLocal(p.frontend.service, o.at) {
		return o, false
	}
	o.seen = theClient

	return o, true
}

// A process of the node is connected to the backend itself, with the address that
// the kernel prefers on the way there; with kube-proxy it is the one on the way to
// the destination, unless that is masqueraded.
func sourceOfNode(p probe, o outcome) (outcome, bool) {
	if o.failure != "" || p.client.place != onNode || o.server == elsewhere {
		return o, false
	}
	source := p.sources[o.at.Addr()].String()
	if o.seen == source {
		return o, false
	}
	o.seen = source

	return o, true
}

// A pod that reaches itself by a Service: its socket is connected to its own
// address, no packet leaves it.
func hairpinOfSocket(p probe, o outcome) (outcome, bool) {
	if o.failure != "" || o.server != p.client.answers || !p.isAtSocket() || o.seen == theClient {
		return o, false
	}
	o.seen = theClient

	return o, true
}

// kube-proxy drops what is sent to an address of a ServiceCIDR that is no ClusterIP of its own. Sluice passes what
// another proxy serves.
func passesForeign(p probe, o outcome) (outcome, bool) {
	svc := p.objects.services[p.frontend.service]
	if svc == nil || p.frontend.kind != clusterIP && p.frontend.kind != unusedPort ||
		o.failure != silence && o.failure != permDropped {
		return o, false
	}
	if _, foreign := svc.Labels[proxyNameLabel]; !foreign {
		return o, false
	}
	seen := theClient
	if p.client.place == onNode {
		seen = hostAddresses(1)[familyOf(p.frontend.address.Addr())].String()
	}

	return outcome{server: elsewhere, seen: seen}, true
}

// proxyNameLabel names the proxy of a Service.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// Where kube-proxy drops, a connect() of the node or its pods gets an error. A datagram vanishes, also one of the node,
// where kube-proxy's rules report EPERM.
func reportsDrop(p probe, o outcome) (outcome, bool) {
	if !p.isAtSocket() || o.failure != silence && o.failure != permDropped {
		return o, false
	}
	if p.frontend.protocol == "udp" {
		return outcome{failure: silence}, o.failure != silence
	}

	return outcome{failure: unreachable}, true
}

// What the node sends to a VIP that it has itself comes from that VIP, which may be
// in the source ranges when the node IP is not. Sluice checks the node's sockets
// by the node IP. A connect() of UDP passes, and its datagrams do not leave the node: the stack refuses them, because
// nothing listens there.
func checksNodeIP(p probe, o outcome) (outcome, bool) {
	svc, ip := p.objects.services[p.frontend.service], p.frontend.address.Addr()
	if o.failure != "" || p.client.place != onNode || p.frontend.kind != vip || svc == nil {
		return o, false
	}
	if !slices.Contains(boundVIPs, netip.PrefixFrom(ip, ip.BitLen())) || admits(svc, hostAddresses(1)[familyOf(ip)]) {
		return o, false
	}
	if p.frontend.protocol == "udp" {
		return outcome{failure: refused}, true
	}

	return outcome{failure: unreachable}, true
}

// restricts reports whether the source ranges of a Service restrict clients of a family: those of another family do not.
func restricts(svc *corev1.Service, f family) bool {
	return slices.ContainsFunc(svc.Spec.LoadBalancerSourceRanges, func(text string) bool {
		return familyOf(netip.MustParsePrefix(text).Addr()) == f
	})
}

// admits reports whether the source ranges of a Service admit an address.
func admits(svc *corev1.Service, ip netip.Addr) bool {
	return !restricts(svc, familyOf(ip)) || slices.ContainsFunc(svc.Spec.LoadBalancerSourceRanges, func(text string) bool {
		return netip.MustParsePrefix(text).Contains(ip)
	})
}

// Where kube-proxy rejects a datagram that the node itself sends, the kernel returns
// EPERM.
func reportsRejection(_ probe, o outcome) (outcome, bool) {
	if o.failure != permRefused {
		return o, false
	}

	return outcome{failure: refused}, true
}

// expect converts an outcome of dialing kube-proxy into the expected one of dialing
// Sluice, and names the differences that it used.
func expect(p probe, reference outcomes, listed []difference) (outcomes, []string) {
	want, used := outcomes{}, []string{}
	for o, count := range reference {
		for _, d := range listed {
			if d.changes == nil {
				continue
			}
			if changed, ok := d.changes(p, o); ok {
				o, used = changed, append(used, d.name)
			}
		}
		want[o] += count
	}

	return want, used
}

// differenceCounts counts how often each difference was seen.
type differenceCounts map[string]int

func (t differenceCounts) String() string {
	text := ""
	for _, d := range differences {
		text += fmt.Sprintf("%7d %s (%s)\n", t[d.name], d.name, d.where)
	}

	return text
}
