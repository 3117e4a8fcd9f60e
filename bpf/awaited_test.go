package bpf

import (
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Datagrams to a port of the node that is a Service's, and that answer one from there.

const resolver = "8.0.100.53:53" // outside

// serveNodePort publishes a node port, and a load balancer that has the node's address, and returns both.
func (w *world) serveNodePort(t *testing.T) []string {
	t.Helper()
	w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, proto: layers.IPProtocolUDP, to: []string{tapPod}})
	w.serve(t, service{at: []string{"8.0.51.1:123"}, kind: maps.KindLoadBalancer, proto: layers.IPProtocolUDP, to: []string{tapPod}})

	return []string{"8.0.50.1:30080", "8.0.51.1:123"}
}

// An answer goes to the pod whose query netfilter has masqueraded with the port of a Service, or to the process of
// the node that has sent from there; other senders to that port get the Service.
func TestAnswersThatNetfilterAwaits(t *testing.T) {
	needsConntrack(t)
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		for _, at := range w.serveNodePort(t) {
			for _, asked := range []string{tapPod, at} {
				w.track(t, layers.IPProtocolUDP, asked, resolver, at, 0)
				w.ingress(t, p, udp(resolver, at)).passes(maps.ReasonPassNoFrontend)
				lab.Must(t, w.forgetTracked())
			}
			w.track(t, layers.IPProtocolUDP, tapPod, resolver, at, 0)
			in := udp(resolver, at).fromPort(54)
			w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
			lab.Must(t, w.forgetTracked())
		}
	})
}

// What netfilter has only seen come in from there awaits nothing: it may be kube-proxy's.
func TestDatagramsThatNetfilterHasSeen(t *testing.T) {
	needsConntrack(t)
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		for _, at := range w.serveNodePort(t) {
			w.track(t, layers.IPProtocolUDP, resolver, at, resolver, 0)
			w.ingress(t, p, udp(resolver, at)).ends(verdictNext, maps.ReasonTranslated)
			lab.Must(t, w.forgetTracked())
		}
	})
}

// A socket of the node that is connected to the sender gets its datagrams. One that is only bound does not, as
// with kube-proxy.
func TestAnswersThatASocketAwaits(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		for _, at := range w.serveNodePort(t) {
			local, peer := w.family.addrPort(netip.MustParseAddrPort(at)), w.family.addrPort(netip.MustParseAddrPort(resolver))
			var bound, connected *net.UDPConn
			lab.Must(t, w.node.Do(func() (err error) {
				bound, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(local))

				return err
			}))
			w.ingress(t, p, udp(resolver, at).fromPort(55)).ends(verdictNext, maps.ReasonTranslated)
			lab.Must(t, bound.Close(), w.node.Do(func() (err error) {
				connected, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(local), net.UDPAddrFromAddrPort(peer))

				return err
			}))
			w.ingress(t, p, udp(resolver, at)).passes(maps.ReasonPassNoFrontend)
			w.ingress(t, p, udp(resolver, at).fromPort(54)).ends(verdictNext, maps.ReasonTranslated)
			lab.Must(t, connected.Close())
		}
	}, func(c *DeviceConfig) { c.Conntrack = false })
}
