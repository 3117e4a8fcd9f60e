package bpf

import (
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// Only packets from clients to Services are marked: neither replies nor other traffic. Bits outside of the
// mask stay.
func TestMark(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}, flags: maps.PoolMasquerade})
		in := tcp(p.client, clusterIP, "S")
		w.marked = 0x100
		w.ingress(t, p, in).becomes(in.to(remotePod), maps.ReasonTranslated)
		f := w.flowOf(t, p.client, clusterIP)
		source, port := f.MasqueradeAddrPort(), maps.Port(f.MasqueradePort)
		in = tcp(p.client, clusterIP, "P.")
		w.ingress(t, p, in).becomes(in.to(remotePod), maps.ReasonFlow)

		w.marked = 0
		w.ingress(t, p, tcp(p.client, otherServer, "S")).passes(maps.ReasonPassOtherTraffic)
		w.egress(t, uplink, tcp(p.client, remotePod, "S")).ends(verdictNext, maps.ReasonFlow)
		back := tcp(remotePod, node, "S.").toPort(port)
		if source.Addr() != w.mapAddr(node).IP() {
			return // the address of another device
		}
		w.ingress(t, p, back).becomes(back.to(p.client), maps.ReasonFlow)
		w.egress(t, p, back.to(p.client)).becomes(back.to(p.client).from(clusterIP), maps.ReasonFlow)
	}, func(c *DeviceConfig) { c.Mark = Mark{Value: 0x100, Mask: 0xf00} })
}
