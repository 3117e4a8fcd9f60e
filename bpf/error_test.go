package bpf

import (
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// icmpErrors are the errors that are translated.
var icmpErrors = map[string]icmpKind{
	"too big": tooBig, "port unreachable": portUnreachable, "host unreachable": hostUnreachable,
	"time exceeded": timeExceeded, "bad parameter": badParameter,
}

// quotes are how a packet may be quoted: in full, or as far as its ports.
var quotes = []struct {
	name  string
	proto layers.IPProtocol
	shape func(packet) packet
	cut   int // bytes of the transport header that are quoted; 0: everything
}{
	{name: "all of TCP", proto: layers.IPProtocolTCP, shape: func(p packet) packet { return p.with("abc") }},
	{name: "eight bytes of TCP", proto: layers.IPProtocolTCP, shape: unchanged, cut: 8},
	{name: "TCP up to its checksum", proto: layers.IPProtocolTCP, shape: unchanged, cut: 18},
	{name: "all of UDP", proto: layers.IPProtocolUDP, shape: unchanged},
	{name: "eight bytes of UDP", proto: layers.IPProtocolUDP, shape: unchanged, cut: 8},
	{name: "UDP without a checksum", proto: layers.IPProtocolUDP, shape: packet.withoutSum},
	{name: "eight bytes of SCTP", proto: layers.IPProtocolSCTP, shape: unchanged, cut: 8},
	{name: "options and all of UDP", proto: layers.IPProtocolUDP, shape: func(p packet) packet { return p.withExtras(2) }},
}

// errorWorld is a conversation with a function that makes errors about it.
type errorWorld struct {
	*conversation
	shape func(packet) packet
	cut   int
}

// about returns an error about a packet of the conversation.
func (e errorWorld) about(what icmpKind, src, dst string, quoted packet) packet {
	quoted = e.shape(quoted)
	in := icmpError(what, src, dst, quoted)
	if e.cut > 0 {
		ip := len(quoted.network(e.w.family)) - len(quoted.transport(e.w.family))
		in = in.quoting(ip + e.cut)
	}

	return in
}

// eachError runs a test for each error and quote.
func eachError(t *testing.T, places []place, backend string, run func(*testing.T, errorWorld, icmpKind)) {
	t.Helper()
	for _, quote := range quotes {
		t.Run("quoting "+quote.name, func(t *testing.T) {
			each(t, places, func(t *testing.T, w *world, p place) {
				e := errorWorld{begin(t, w, p, quote.proto, backend), quote.shape, quote.cut}
				e.establish(t)
				for name, what := range icmpErrors {
					t.Run(name, func(t *testing.T) { run(t, e, what) })
				}
			})
		})
	}
}

// Errors of routers and clients about answers reach the backend, and errors of the backend and routers about
// the client's packets reach the client.
func TestErrorsAboutPlainFlows(t *testing.T) {
	eachError(t, []place{uplink, podTun}, tapPod, func(t *testing.T, e errorWorld, what icmpKind) {
		w, p, from := e.w, e.place, e.place.client
		sent := answer(e.proto, clusterIP, from)
		for _, src := range []string{router, from} {
			w.ingress(t, p, e.about(what, src, clusterIP, sent)).
				becomes(e.about(what, src, tapPod, sent.from(tapPod)), maps.ReasonFlowError)
		}
		got := second(e.proto, from, tapPod)
		for src, speaker := range map[string]string{tapPod: clusterIP, nodeAt(p): nodeAt(p)} {
			w.egress(t, p, e.about(what, src, from, got)).
				becomes(e.about(what, speaker, from, got.to(clusterIP)), maps.ReasonFlowError)
		}
		w.states(t, map[uint8]uint8{maps.FlowFromClient: maps.FlowOpen, maps.FlowToClient: maps.FlowOpen})
	})
}

// The same with masqueraded flows, through two hooks each.
func TestErrorsAboutMasqueradedFlows(t *testing.T) {
	eachError(t, []place{uplink}, remotePod, func(t *testing.T, e errorWorld, what icmpKind) {
		w, p, port := e.w, e.place, e.masqueradedPort

		// About an answer, from the side of the client.
		sent := answer(e.proto, clusterIP, client)
		w.ingress(t, p, e.about(what, router, clusterIP, sent)).
			becomes(e.about(what, router, remotePod, sent.from(remotePod)), maps.ReasonFlowError)
		seen := sent.from(remotePod)
		w.egress(t, p, e.about(what, router, remotePod, seen)).
			becomes(e.about(what, router, remotePod, seen.to(node).toPort(port)), maps.ReasonFlowError)
		w.egress(t, p, e.about(what, client, remotePod, seen)).
			becomes(e.about(what, node, remotePod, seen.to(node).toPort(port)), maps.ReasonFlowError)

		// About what the client sent, from the side of the backend.
		left := second(e.proto, client, remotePod)
		for src, speaker := range map[string]string{remotePod: clusterIP, farRouter: farRouter} {
			w.ingress(t, p, e.about(what, src, node, left.from(node).fromPort(port))).
				becomes(e.about(what, src, client, left), maps.ReasonFlowError)
			w.egress(t, p, e.about(what, src, client, left)).
				becomes(e.about(what, speaker, client, left.to(clusterIP)), maps.ReasonFlowError)
		}
	})
}

// If the stack sees another port of the client, errors quote the right one.
func TestErrorsAboutAChangedPort(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		for _, vip := range []string{clusterIP, otherIP} {
			w.serve(t, service{at: []string{vip}, proto: layers.IPProtocolUDP, to: []string{portPod}})
			w.ingress(t, p, udp(p.client, vip)).ends(verdictNext, maps.ReasonTranslated)
		}
		seen := maps.Port(w.flowOf(t, p.client, otherIP).StackPort)
		sent := udp(otherIP, p.client)
		w.ingress(t, p, icmpError(tooBig, router, otherIP, sent)).
			becomes(icmpError(tooBig, router, portPod, sent.from(portPod).toPort(seen)), maps.ReasonFlowError)
		got := udp(p.client, portPod).fromPort(seen)
		w.egress(t, p, icmpError(portUnreachable, portPod, p.client, got)).
			becomes(icmpError(portUnreachable, otherIP, p.client, udp(p.client, otherIP)), maps.ReasonFlowError)
	})
}

// Errors in frames and packets of every shape.
func TestShapesOfErrors(t *testing.T) {
	for name, shape := range map[string]func(packet) packet{
		"tagged":       func(p packet) packet { return p.tagged(3, 4) },
		"with options": func(p packet) packet { return p.withExtras(2) },
		"filled up":    func(p packet) packet { return p.quoting(28).padded(20) },
		"long":         func(p packet) packet { q := p.quote.long(500); p.quote = &q; return p },
	} {
		t.Run(name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				if name == "filled up" && w.family == ipv6 {
					return
				}
				c := begin(t, w, p, layers.IPProtocolUDP, portPod)
				c.establish(t)
				sent := udp(clusterIP, client)
				w.ingress(t, p, shape(icmpError(tooBig, router, clusterIP, sent))).
					becomes(shape(icmpError(tooBig, router, portPod, sent.from(portPod))), maps.ReasonFlowError)
				got := udp(client, portPod)
				w.egress(t, p, shape(icmpError(portUnreachable, portPod, client, got))).
					becomes(shape(icmpError(portUnreachable, clusterIP, client, got.to(clusterIP))), maps.ReasonFlowError)
			})
		})
	}
}

// Errors about other traffic are not translated, and not forwarded if they are to a Service.
func TestErrorsAboutOthers(t *testing.T) {
	for _, test := range []struct {
		name    string
		in      packet
		verdict int32
		why     maps.Reason
	}{
		{"an unknown flow", icmpError(tooBig, router, clusterIP, tcp(clusterIP, stranger, ".")), verdictDrop, maps.ReasonDropNoFlow},
		{"another port", icmpError(tooBig, router, clusterIP, tcp(clusterIP, client, ".").fromPort(81)), verdictDrop, maps.ReasonDropNoFlow},
		{"another protocol", icmpError(tooBig, router, clusterIP, udp(clusterIP, client)), verdictDrop, maps.ReasonDropNoFlow},
		{"one without ports", icmpError(timeExceeded, router, clusterIP, ping(clusterIP, client)), verdictDrop, maps.ReasonDropNoFlow},
		{"a later fragment", icmpError(timeExceeded, router, clusterIP, tcp(clusterIP, client, ".").long(400).rest(256)), verdictDrop, maps.ReasonDropNoFlow},
		{"a packet that its receiver did not send", icmpError(tooBig, router, node, tcp(clusterIP, client, ".")), verdictNext, maps.ReasonPassNoFlow},
		{"a packet that is not quoted", icmpError(timeExceeded, router, clusterIP, tcp(clusterIP, client, ".")).quoting(1), verdictNext, maps.ReasonPassMalformed},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink, podTun}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
				c.establish(t)
				o := w.ingress(t, p, test.in)
				o.ends(test.verdict, test.why)
				o.isUntouched()
			})
		})
	}
}

// An error about what the client was sent comes by a device of the class by which the client comes: no pod can
// lower the path MTU of a client outside.
func TestErrorsByAnotherClassOfDevices(t *testing.T) {
	each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
		c.establish(t)
		in := icmpError(tooBig, router, clusterIP, tcp(clusterIP, client, "."))
		w.ingress(t, p, in).drops(maps.ReasonDropNoFlow)
		w.ingress(t, uplink, in).ends(verdictNext, maps.ReasonFlowError)
	})
}

// A redirect about a flow would make the client bypass this node, or this node bypass the router.
func TestRedirectsAreDropped(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, proto, portPod)
				c.establish(t)
				w.egress(t, p, icmpError(redirect, node, client, second(proto, client, portPod))).drops(maps.ReasonDropRedirect)
				w.egress(t, p, icmpError(redirect, node, client, second(proto, client, otherServer))).passes(maps.ReasonPassNoFlow)
				w.ingress(t, p, icmpError(redirect, router, clusterIP, answer(proto, clusterIP, client))).drops(maps.ReasonDropRedirect)
			})
		})
	}
}
