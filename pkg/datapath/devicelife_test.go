package datapath

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
)

// A device goes, comes back under another number, gets another name, and goes to
// another namespace and back.
func TestDeviceComesAndGoes(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		lab.Must(t, p.node.RemoveDevice("eth0"))
		p.attach(p.device()) // it is gone, which is not an error
		p.attach()
		if left, err := filepath.Glob(deviceDir(p.cfg.BPFRoot) + "/*"); err != nil || len(left) > 0 {
			t.Errorf("pins are left: %v, %v", left, err)
		}

		lab.MustVeth(t, lab.End{Namespace: p.node, Device: "eth0"}, lab.End{Namespace: p.peer, Device: "eth0"})
		p.index = p.indexOf("eth0")
		p.attach(p.device())
		p.wantState("eth0", by, "")

		eth0, err := p.node.Netlink().LinkByIndex(p.index)
		lab.Must(t, err, p.node.SetDown("eth0"), p.node.Netlink().LinkSetName(eth0, "uplink"), p.node.SetUp("uplink"))
		p.wantState("uplink", by, "")

		// In another namespace nothing is attached to it.
		other := lab.MustNamespace(t, "other")
		lab.Must(t, p.node.Netlink().LinkSetNsFd(eth0, int(other.Handle())))
		p.attach()
		moved, err := other.Netlink().LinkByName("uplink")
		lab.Must(t, err)
		lab.MustDo(t, other, func() error {
			for _, hook := range deviceHooks() {
				if n := programsAt(t, moved.Attrs().Index, hook, by); n != 0 {
					t.Errorf("%d programs at %s of the other namespace", n, hook.name)
				}
			}

			return nil
		})
		lab.Must(t, other.Netlink().LinkSetNsFd(moved, int(p.node.Handle())))
		p.index = p.indexOf("uplink")
		p.attach(p.device())
		p.wantState("uplink", by, "")
	})
}

// programsAt counts all programs at a hook of a device of the thread's namespace.
func programsAt(t testing.TB, index int, hook deviceHook, by Attachment) int {
	t.Helper()
	if by == Clsact {
		filters, err := filtersAt(index, hook)
		lab.Must(t, err)

		return len(filters)
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
	lab.Must(t, err)

	return len(result.Programs)
}

// A link to a device in another namespace is not mistaken for a link to the device that
// has the same index here.
func TestDeviceThatHasTheNumberOfAnother(t *testing.T) {
	p := newPort(t, TCX)
	p.attach(p.device())
	other := lab.MustNamespace(t, "other")
	eth0, err := p.node.Netlink().LinkByIndex(p.index)
	lab.Must(t, err, p.node.Netlink().LinkSetNsFd(eth0, int(other.Handle())))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "eth0", p.index
	lab.Must(t, p.node.Netlink().LinkAdd(&netlink.Ifb{LinkAttrs: attrs}))
	p.wantState("eth0", "", "egress: there is a link, but its program does not run there; "+
		"ingress: there is a link, but its program does not run there")
	p.attach(p.device())
	p.wantState("eth0", TCX, "")
}

// Changes by other programs are reported, and undone.
func TestDeviceMending(t *testing.T) {
	for _, test := range []struct {
		name    string
		by      Attachment
		harm    func(p *port) error
		problem string
	}{
		{"a pin", TCX, func(p *port) error {
			return os.Remove(devicePin(p.cfg.BPFRoot, p.index, deviceHooks()[0]))
		}, "only ingress is attached"},
		{"all pins", TCX, func(p *port) error { return os.RemoveAll(deviceDir(p.cfg.BPFRoot)) }, ""},
		{"a link", TCX, func(p *port) error {
			l, err := link.LoadPinnedLink(devicePin(p.cfg.BPFRoot, p.index, deviceHooks()[1]), nil)
			if err != nil {
				return err
			}
			defer l.Close()

			return l.Detach()
		}, "ingress: there is a link, but its program does not run there; only egress is attached"},
		{"a filter", Clsact, func(p *port) error {
			filters, err := filtersAt(p.index, deviceHooks()[1])
			if err != nil {
				return err
			}

			return netlink.FilterDel(filters[0])
		}, "only egress is attached"},
		{"the qdisc", Clsact, func(p *port) error { return netlink.QdiscDel(clsactOf(p.index)) }, ""},
	} {
		t.Run("it mends "+test.name, func(t *testing.T) {
			p := newPort(t, test.by)
			p.attach(p.device())
			lab.MustDo(t, p.node, func() error { return test.harm(p) })
			attached := test.by
			if test.problem == "" {
				attached = ""
			}
			lab.Eventually(t, "what was undone is gone", func() bool { // the kernel takes its time
				state := p.states()["eth0"]

				return state.Problem == test.problem && state.Attached == attached
			})

			lab.Eventually(t, "the device is attached again", func() bool { return len(p.tryAttach(p.device())) == 0 })
			_, err := p.MendPins()
			lab.Must(t, err)
			p.wantState("eth0", test.by, "")
			p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
		})
	}
}
