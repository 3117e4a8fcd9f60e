package devices

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestForeignProgramEndsTheChain puts a program ahead of Sluice's that lets every packet pass
// and calls none behind it. Sluice takes the first place again.
//
//	client ══ load balancer ══▶ other program, Sluice ── node-1 ── pod-1-1
func TestForeignProgramEndsTheChain(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{})
	node := w.Nodes[0]
	uplink, err := node.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "ends_chain", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}, // TC_ACT_OK
	})
	lab.Must(t, err)
	defer program.Close()
	c := casesOf(w)
	w.start(t, c.local)
	caller, address := w.outside(t), c.local.at(loadBalancer, ipv4, nil)
	works := func() error {
		reply, err := caller.Exchange(lab.Exchange{Network: "tcp4", Address: address, Timeout: dialTimeout / 10})
		if err == nil {
			err = expect(reply, "pod-1-1", hostIPs(w.Client)[ipv4])
		}

		return err
	}
	lab.Must(t, works())
	var other link.Link
	err = node.Do(func() error {
		other, err = link.AttachTCX(link.TCXOptions{
			Interface: uplink.Attrs().Index, Program: program, Attach: ebpf.AttachTCXIngress, Anchor: link.Head(),
		})

		return err
	})
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skip("this kernel has no tcx (Linux 6.6)")
	}
	lab.Must(t, err)
	defer other.Close()
	if works() == nil {
		t.Error("it works although Sluice sees no packet")
	}
	// The agent checks when a device comes.
	lab.MustVeth(t, lab.End{Namespace: node.Namespace, Device: "new"}, lab.End{Namespace: w.Client.Namespace, Device: "new"})
	lab.Eventually(t, "it works again", works)
}
