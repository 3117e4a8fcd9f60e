package bpf

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// routeFrom adds a default route for packets from an address of the node.
func (w *world) routeFrom(t testing.TB, from, via, device string) {
	t.Helper()
	const table = 51
	h := w.node.Netlink()
	source := w.family.addr(at(from).Addr())
	rule := netlink.NewRule()
	rule.Src = &net.IPNet{IP: source.AsSlice(), Mask: net.CIDRMask(source.BitLen(), source.BitLen())}
	rule.Table, rule.Priority = table, 100
	any := w.family.prefix("0.0.0.0/0")
	route := &netlink.Route{
		LinkIndex: w.links[device].Attrs().Index, Table: table, Gw: w.family.addr(netip.MustParseAddr(via)).AsSlice(),
		Dst: &net.IPNet{IP: any.Addr().AsSlice(), Mask: net.CIDRMask(any.Bits(), any.Addr().BitLen())},
	}
	lab.Must(t, h.RouteAdd(route), h.RuleAdd(rule))
	t.Cleanup(func() { lab.Must(t, h.RuleDel(rule), h.RouteDel(route)) })
}

// A reply leaves by the device on which the client came, if the route from the VIP leads there.
func TestRepliesReturnByTheDeviceOfTheClient(t *testing.T) {
	second := place{device: "eth1", client: client, class: maps.DeviceUplink}
	for _, backend := range []string{tapPod, remotePod} {
		t.Run("of "+backend, func(t *testing.T) {
			each(t, []place{second}, func(t *testing.T, w *world, p place) {
				w.routeFrom(t, nodeOther, "8.0.51.3", "eth1")
				for vip, returns := range map[string]bool{"8.0.51.1:30001": true, "8.0.50.1:30001": false} {
					w.serve(t, service{at: []string{vip}, kind: maps.KindExternalIP, to: []string{backend}})
					in := tcp(p.client, vip, "S")
					o := w.ingress(t, p, in)
					f := w.flowOf(t, p.client, vip)
					seen := maps.Port(f.StackPort)
					o.becomes(in.to(backend).fromPort(seen), maps.ReasonTranslated)
					out := in.to(backend).fromPort(seen)
					if f.IsMasqueraded() {
						w.egress(t, uplink, out).becomes(out.from(node).fromPort(maps.Port(f.MasqueradePort)), maps.ReasonFlow)
					}
					reply := tcp(backend, p.client, "S.").toPort(seen)
					want := reply.from(vip).to(p.client)
					w.egress(t, second, reply).becomes(want, maps.ReasonFlow)
					o = w.egress(t, uplink, reply)
					if !returns {
						o.becomes(want, maps.ReasonFlow)

						continue
					}
					o.ends(verdictRedirect, maps.ReasonFlow)
					o.compare(w.bytes(uplink, want, o.between))
					w.encrypt(t, uplink)
					w.egress(t, uplink, reply).becomes(want, maps.ReasonFlow) // another route may have another policy
				}
			})
		})
	}
}

// encrypt has the stack have policies of IPsec.
func (w *world) encrypt(t *testing.T, p place) {
	t.Helper()
	device, _, err := w.maps.Devices.Lookup(w.index(p.device))
	lab.Must(t, err)
	device.Flags |= maps.DeviceEncrypts
	lab.Must(t, w.maps.Devices.Put(w.index(p.device), device))
}
