package datapath

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestAttachDevices(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.wantState("eth0", "", "")
		p.attach(p.device())
		p.wantState("eth0", by, "")
		p.wantState("lo", "", "")
		p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)

		p.attach(p.device()) // again, and nothing is twice
		before := p.ours[0].ingress.count()
		p.exchange()
		if got := p.ours[0].ingress.count() - before; got >= 20 {
			t.Errorf("%d packets at ingress, sent 10", got)
		}

		p.attach()
		p.wantState("eth0", "", "")
		p.wantCounts(false, p.ours[0].ingress, p.ours[0].egress)
		if p.hasClsact() {
			t.Error("there still is a qdisc clsact")
		}
		if left, err := filepath.Glob(deviceDir(p.cfg.BPFRoot) + "/*"); err != nil || len(left) > 0 {
			t.Errorf("pins are left: %v, %v", left, err)
		}
	})
}

// One agent after the other takes over under load, and no packet gets by.
func TestDeviceReplacement(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attachTheirs()
		p.attach(p.device())
		id := p.linkID()
		p.reset()
		p.underLoad(func() {
			for range 5 {
				must(t, p.Close()) // the old agent dies
				time.Sleep(20 * time.Millisecond)
				p.open(by)
				p.attach(p.device())
			}
		})
		p.wantEachSeen(true)
		if by == TCX && p.linkID() != id {
			t.Error("the link is another one, want its program replaced")
		}
		p.wantState("eth0", by, "")
	})
}

// The next agent attaches in another way. For a moment packets pass both, but
// none passes neither.
func TestDeviceSwitch(t *testing.T) {
	p := newPort(t, TCX)
	p.attachTheirs()
	p.attach(p.device())
	p.reset()
	p.underLoad(func() {
		for i, by := range []Attachment{Clsact, TCX, Clsact} {
			must(t, p.Close())
			p.open(by)
			p.attach(p.device())
			p.wantState("eth0", by, "")
			if by == TCX && p.hasClsact() {
				t.Errorf("switch %d: the qdisc clsact is still there", i)
			}
		}
	})
	p.wantEachSeen(false)
}

// linkID returns the kernel's number of the link at ingress, if it is one.
func (p *port) linkID() link.ID {
	p.t.Helper()
	if p.cfg.Attachment != TCX {
		return 0
	}
	pinned, err := link.LoadPinnedLink(filepath.Join(deviceDir(p.cfg.BPFRoot), fmt.Sprint(p.index), "ingress"), nil)
	must(p.t, err)
	defer pinned.Close()
	info, err := pinned.Info()
	must(p.t, err)

	return info.ID
}

// reset makes all counters begin anew.
func (p *port) reset() {
	p.t.Helper()
	time.Sleep(50 * time.Millisecond) // what is still on its way
	for _, c := range p.theirs {
		must(p.t, c.packets.Put(uint32(0), uint64(0)))
	}
	for _, c := range p.ours {
		must(p.t, c.ingress.packets.Put(uint32(0), uint64(0)), c.egress.packets.Put(uint32(0), uint64(0)))
	}
}

// underLoad does something while packets are exchanged.
func (p *port) underLoad(do func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				p.exchange()
			}
		}
	}()
	do()
	close(stop)
	<-stopped
	time.Sleep(50 * time.Millisecond)
}

// wantEachSeen compares what we counted with what somebody else did.
func (p *port) wantEachSeen(once bool) {
	p.t.Helper()
	for name, of := range map[string]func(*counters) *counter{
		"ingress": func(c *counters) *counter { return c.ingress },
		"egress":  func(c *counters) *counter { return c.egress },
	} {
		ours, theirs := p.sum(of), p.theirs[name].count()
		if theirs < 100 {
			p.t.Errorf("%s: only %d packets", name, theirs)
		}
		if ours < theirs || once && ours > theirs {
			p.t.Errorf("%s: ours saw %d packets of %d", name, ours, theirs)
		}
	}
}

// A device goes, comes back under another number, gets another name, and goes to
// another namespace and back.
func TestDeviceComesAndGoes(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		must(t, p.node.RemoveDevice("eth0"))
		p.attach(p.device()) // it is gone, and nobody has told us: no failure
		p.attach()
		if left, err := filepath.Glob(deviceDir(p.cfg.BPFRoot) + "/*"); err != nil || len(left) > 0 {
			t.Errorf("pins are left: %v, %v", left, err)
		}

		lab.MustVeth(t, lab.End{Namespace: p.node, Device: "eth0"}, lab.End{Namespace: p.peer, Device: "eth0"})
		p.index = p.indexOf("eth0")
		p.attach(p.device())
		p.wantState("eth0", by, "")

		eth0, err := p.node.Netlink().LinkByIndex(p.index)
		must(t, err, p.node.SetDown("eth0"), p.node.Netlink().LinkSetName(eth0, "uplink"), p.node.SetUp("uplink"))
		p.wantState("uplink", by, "")

		// In another namespace it is none of our business.
		other := lab.MustNamespace(t, "other")
		must(t, p.node.Netlink().LinkSetNsFd(eth0, int(other.Handle())))
		p.attach()
		moved, err := other.Netlink().LinkByName("uplink")
		must(t, err)
		lab.MustDo(t, other, func() error {
			for _, hook := range deviceHooks() {
				if n := programsAt(t, moved.Attrs().Index, hook, by); n != 0 {
					t.Errorf("%d programs at %s of the other namespace", n, hook.name)
				}
			}

			return nil
		})
		must(t, other.Netlink().LinkSetNsFd(moved, int(p.node.Handle())))
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
		must(t, err)

		return len(filters)
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
	must(t, err)

	return len(result.Programs)
}

// A link to a device in another namespace is not taken for one to that which has
// its number here.
func TestDeviceThatHasTheNumberOfAnother(t *testing.T) {
	p := newPort(t, TCX)
	p.attach(p.device())
	other := lab.MustNamespace(t, "other")
	eth0, err := p.node.Netlink().LinkByIndex(p.index)
	must(t, err, p.node.Netlink().LinkSetNsFd(eth0, int(other.Handle())))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "eth0", p.index
	must(t, p.node.Netlink().LinkAdd(&netlink.Ifb{LinkAttrs: attrs}))
	p.wantState("eth0", "", "egress: the link is pinned, but its program does not run there; "+
		"ingress: the link is pinned, but its program does not run there")
	p.attach(p.device())
	p.wantState("eth0", TCX, "")
}

// What somebody else undoes is told, and mended.
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
		}, "ingress: the link is pinned, but its program does not run there; only egress is attached"},
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
			eventually(t, "what was undone is gone", func() bool { // the kernel takes its time
				state := p.states()["eth0"]

				return state.Problem == test.problem && state.Attached == attached
			})

			eventually(t, "the device is attached again", func() bool { return len(p.tryAttach(p.device())) == 0 })
			p.wantState("eth0", test.by, "")
			p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
		})
	}
}

// Class and other traits choose among programs; those that nobody needs are not
// loaded.
func TestDeviceVariants(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		pods := p.device()
		pods.Class, pods.BridgePort = maps.DevicePods, true
		podCounters := p.count(variantOf(pods))
		p.attach(p.device())
		p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
		p.wantCounts(false, podCounters.ingress, podCounters.egress)

		p.attach(pods)
		p.wantCounts(false, p.ours[0].ingress, p.ours[0].egress)
		p.wantCounts(true, podCounters.ingress, podCounters.egress)
		if n := len(p.devices.loaded); n != 2 {
			t.Errorf("%d variants are loaded, want 2", n)
		}
	})
}

// Every variant of the real programs, on devices of both link layers.
func TestRealDevicePrograms(t *testing.T) {
	p := newPort(t, Clsact)
	clear(p.devices.loaded)
	must(t, p.node.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "tun0"

		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN})
	}))
	attachments := []Attachment{Clsact}
	if p.Features().TCX {
		attachments = append(attachments, TCX)
	}
	for _, by := range attachments {
		p.Datapath.cfg.Attachment = by
		for _, class := range []uint32{maps.DevicePods, maps.DeviceUplink} {
			for _, port := range []bool{false, true} {
				p.attach(
					Device{Index: p.index, Class: class, BridgePort: port},
					Device{Index: p.indexOf("tun0"), Class: class, NoEthernet: true})
				p.wantState("eth0", by, "")
				p.wantState("tun0", by, "")
			}
		}
	}
	if n := len(p.devices.loaded); n != 6 {
		t.Errorf("%d variants are loaded, want 6", n)
	}
}

func TestManyDevicesAtOnce(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		const count = 100
		devices := []Device{p.device()}
		for i := range count {
			name := fmt.Sprintf("veth%d", i)
			lab.MustVeth(t, lab.End{Namespace: p.node, Device: name}, lab.End{Namespace: p.peer, Device: name})
			devices = append(devices, Device{Index: p.indexOf(name), Class: maps.DevicePods})
		}
		start := time.Now()
		p.attach(devices...)
		took := time.Since(start)
		start = time.Now()
		p.attach(devices...)
		again := time.Since(start)
		start = time.Now()
		states := p.states()
		t.Logf("%d devices: attached in %v, again in %v, queried in %v", len(devices), took, again, time.Since(start))
		attached := 0
		for _, state := range states {
			if state.Attached == by && state.Problem == "" {
				attached++
			}
		}
		if attached != count+1 {
			t.Errorf("%d of %d devices are attached", attached, count+1)
		}
	})
}

// A device to which nothing can be attached does not keep others from it.
func TestIngressQdisc(t *testing.T) {
	p := newPort(t, Clsact)
	lab.MustVeth(t, lab.End{Namespace: p.node, Device: "eth1"}, lab.End{Namespace: p.peer, Device: "eth1"})
	eth1 := Device{Index: p.indexOf("eth1"), Class: maps.DeviceUplink}
	lab.MustDo(t, p.node, func() error {
		return netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: eth1.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
		}})
	})
	failed := p.tryAttach(eth1, p.device())
	if len(failed) != 1 || failed[eth1.Index] == nil || !strings.Contains(failed[eth1.Index].Error(), "qdisc ingress") {
		t.Errorf("devices failed: %v", failed)
	}
	p.wantState("eth0", Clsact, "")
	p.wantState("eth1", "", "")
}

func TestAttachmentIsChosen(t *testing.T) {
	p := newPort(t, Clsact)
	for _, test := range []struct {
		configured Attachment
		has        bool
		want       Attachment // empty: refused
	}{
		{"", true, TCX}, {"", false, Clsact},
		{TCX, true, TCX}, {TCX, false, ""},
		{Clsact, true, Clsact}, {Clsact, false, Clsact},
	} {
		cfg := p.cfg
		cfg.Attachment = test.configured
		d, err := open(cfg, Features{TCX: test.has})
		switch {
		case err != nil && test.want != "":
			t.Errorf("%+v: %v", test, err)
		case err == nil && test.want == "":
			t.Errorf("%+v: no error", test)
		case err == nil && d.Attachment() != test.want:
			t.Errorf("%+v: it is %s", test, d.Attachment())
		}
		if err == nil {
			must(t, d.Close())
		}
	}
}

// Cleanup takes away both kinds of attachment, those of other builds too, and
// leaves what belongs to others.
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
			return attachTCX(p.cfg.BPFRoot, p.index, hook, p.ours[1].ingress.program)
		})
		p.wantState("eth0", TCX, "only ingress is attached; attached to tcx and to clsact")
	}
	for range 2 {
		lab.MustDo(t, p.node, func() error { return Remove(p.cfg.BPFRoot) })
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

// A build that had other numbers is taken over, too.
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
	p.wantCounts(false, old)
	p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
}

// Links of hooks and devices that another build left below a device are gone with
// the device.
func TestLinkOfAnotherBuildBelowADevice(t *testing.T) {
	p := newPort(t, TCX)
	p.attach(p.device())
	dir := filepath.Dir(devicePin(p.cfg.BPFRoot, p.index, deviceHooks()[0]))
	must(t, os.Rename(filepath.Join(dir, "egress"), filepath.Join(dir, "v0")))
	p.attach()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	p.wantCounts(false, p.ours[0].ingress, p.ours[0].egress)
	must(t, p.Attach()) // the socket hooks do not mind the folder of devices
	if _, err := fs.Stat(os.DirFS(deviceDir(p.cfg.BPFRoot)), "."); err != nil {
		t.Error(err)
	}
}
