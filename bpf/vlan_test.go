package bpf

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The kernel takes the tag off a frame before a program sees it. A frame with that of a VLAN belongs to another device,
// or to none: it begins no flow and gets no error. VLAN 0 has only a priority, and the ports of a bridge take in for the
// bridge itself.
func TestTagTakenOff(t *testing.T) {
	const deserted = "8.0.96.9:80" // without backends
	for _, test := range []struct {
		name string
		at   place
		tags []uint16
		want int // entries
	}{
		{name: "no tag", at: turning, want: 2},
		{name: "a priority", at: turning, tags: []uint16{0}, want: 4}, // the stack knows what to do with it
		{name: "a VLAN", at: turning, tags: []uint16{7}},
		{name: "a VLAN inside of another one", at: turning, tags: []uint16{7, 8}},
		{name: "a VLAN on a pod's device", at: podVeth, tags: []uint16{7}},
		{name: "a VLAN of a bridge", at: bridgedNIC, tags: []uint16{7}, want: 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{test.at}, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
				w.serve(t, service{at: []string{deserted}})
				outside := mustStation(t, w.outside, p.device)
				between := ends{src: macOf(at(p.client).Addr()), dst: w.links[p.device].Attrs().HardwareAddr}
				if p.bridgePort {
					between.dst = w.links["br0"].Attrs().HardwareAddr
				}
				w.attach(t, p.device, netlink.HANDLE_MIN_INGRESS, w.programs(t, p).Ingress)
				before, err := w.maps.ReasonCounts()
				lab.Must(t, err)
				for _, to := range []string{deserted, clusterIP} {
					outside.send(t, tcp(p.client, to, "S").tagged(test.tags...).frame(w.family, between), gsoNone, 0)
				}
				next := tcp(p.client, clusterIP, "S").fromPort(50000)
				outside.send(t, next.frame(w.family, between), gsoNone, 0)
				isNext := func(e entry) bool { return maps.Port(e.flow.ClientPort) == 50000 }
				lab.Eventually(t, "all frames have passed", func() bool { return slices.ContainsFunc(w.entries(t), isNext) })
				refused := uint64(1)
				if test.want == 0 {
					refused = 0
				}
				after, err := w.maps.ReasonCounts()
				lab.Must(t, err)
				if n := after[maps.ReasonRejectNoBackend] - before[maps.ReasonRejectNoBackend]; n != refused {
					t.Errorf("%d frames were refused, want %d", n, refused)
				}
				entries := slices.DeleteFunc(w.entries(t), isNext)
				if len(entries) != test.want {
					t.Errorf("%d entries, want %d: %+v", len(entries), test.want, entries)
				}
			})
		})
	}
}

// What leaves with the tag of a VLAN has passed that VLAN's own device, which has translated it.
func TestTagToBePutOn(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, hostPod)
		c.establish(t)
		here := mustStation(t, w.node, p.device)
		outside := mustStation(t, w.outside, p.device)
		reply := tcp(hostPod, client, ".")
		between := ends{src: w.links[p.device].Attrs().HardwareAddr, dst: macOf(at(client).Addr())}
		w.attach(t, p.device, netlink.HANDLE_MIN_EGRESS, w.programs(t, p).Egress)
		here.send(t, reply.frame(w.family, between), gsoNone, 0)
		outside.receive(t, reply.from(clusterIP), w.family)

		// Of two filters of a device, the newer one runs first.
		lab.Must(t, w.node.Netlink().FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: w.links[p.device].Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 2, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Fd: mustTagger(t, 7).FD(), Name: "tagger", DirectAction: true,
		}))
		here.send(t, reply.frame(w.family, between), gsoNone, 0)
		outside.receive(t, reply, w.family)
	})
}

// mustTagger returns a program that has the device put on the tag of a VLAN.
func mustTagger(t *testing.T, vlan int32) *ebpf.Program {
	t.Helper()
	const type8021Q = 0x0081 // in network order
	tagger, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R2, type8021Q),
		asm.Mov.Imm(asm.R3, vlan),
		asm.FnSkbVlanPush.Call(),
		asm.Mov.Imm(asm.R0, verdictNext),
		asm.Return(),
	}})
	lab.Must(t, err)
	t.Cleanup(func() { tagger.Close() })

	return tagger
}
