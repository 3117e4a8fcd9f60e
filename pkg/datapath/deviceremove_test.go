package datapath

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Remove detaches both kinds of attachment, those of other builds too, and leaves the
// programs of other owners.
func TestRemoveDevices(t *testing.T) {
	p := newPort(t, Clsact)
	p.attach(p.device())
	lab.MustDo(t, p.node, func() error { // one with other numbers, as another build may have
		return netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: p.index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 7, Priority: 77, Protocol: unix.ETH_P_ALL,
			},
			Fd: p.theirs["egress"].program.FD(), Name: "sluice_v0", DirectAction: true,
		})
	})
	if p.Features().TCX {
		p.open(TCX)
		hook := deviceHooks()[1]
		lab.MustDo(t, p.node, func() error {
			return p.links.attachTCX(p.index, hook, p.ours[1].ingress.program, func([]attached) bool { return true }, nil)
		})
		p.wantState("eth0", TCX, "only ingress is attached; attached to tcx and to clsact")
	}
	for range 2 {
		only, err := LockCleanup(p.cfg.BPFRoot)
		lab.Must(t, err)
		lab.MustDo(t, p.node, func() error { return Remove(p.cfg.BPFRoot) })
		lab.Must(t, only.Release())
		if _, err := os.Stat(p.cfg.BPFRoot); !os.IsNotExist(err) {
			t.Errorf("pins are left: %v", err)
		}
		p.wantState("eth0", "", "")
		if p.hasClsact() {
			t.Errorf("the qdisc clsact is left, with %v", p.filterNames())
		}
	}
	for _, c := range p.ours {
		p.wantCounts(false, c.ingress, c.egress)
	}
}

// The filter of a build with another handle and priority is replaced, too.
func TestFilterOfAnotherBuild(t *testing.T) {
	p := newPort(t, Clsact)
	old := newCounter(t, -1)
	lab.MustDo(t, p.node, func() error {
		if err := netlink.QdiscAdd(clsactOf(p.index)); err != nil {
			return err
		}

		return netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: p.index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 7, Priority: 77, Protocol: unix.ETH_P_ALL,
			},
			Fd: old.program.FD(), Name: "sluice_ingress", DirectAction: true,
		})
	})
	p.attach(p.device())
	if names := p.filterNames(); !slices.Equal(names, []string{"sluice_ingress", "sluice_egress"}) {
		t.Errorf("filters are %v", names)
	}
	if taken := p.TakenOver(); len(taken) != 1 || !strings.HasPrefix(taken[0], "detached ") || !strings.Contains(taken[0], "eth0 ingress") {
		t.Errorf("taken over is %q, want the filter, of which no pin is found", taken)
	}
	p.wantCounts(false, old)
	p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
}

// Links that another build has pinned in the folder of a device are removed with it.
func TestLinkOfAnotherBuildBelowADevice(t *testing.T) {
	p := newPort(t, TCX)
	p.attach(p.device())
	dir := filepath.Dir(devicePin(p.cfg.BPFRoot, p.index, deviceHooks()[0]))
	lab.Must(t, os.Rename(filepath.Join(dir, "egress"), filepath.Join(dir, "v0")))
	p.attach()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	p.wantCounts(false, p.ours[0].ingress, p.ours[0].egress)
	lab.Must(t, p.Attach()) // the socket hooks do not mind the folder of devices
	if _, err := fs.Stat(os.DirFS(deviceDir(p.cfg.BPFRoot)), "."); err != nil {
		t.Error(err)
	}
}
