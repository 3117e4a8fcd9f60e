package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// One agent after the other takes over under load, and every packet passes a program.
func TestDeviceReplacement(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attachTheirs()
		p.attach(p.device())
		id := p.linkID()
		p.reset()
		p.underLoad(func() {
			for range 5 {
				lab.Must(t, p.Close()) // the old agent dies
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

// The next agent uses the other kind of attachment. Packets may pass both programs for a
// moment, but every packet passes one.
func TestDeviceSwitch(t *testing.T) {
	p := newPort(t, TCX)
	p.attachTheirs()
	p.attach(p.device())
	p.reset()
	p.underLoad(func() {
		for i, by := range []Attachment{Clsact, TCX, Clsact, TCX, Clsact, TCX, Clsact} {
			lab.Must(t, p.Close())
			time.Sleep(20 * time.Millisecond)
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

// A device to which attaching fails keeps the programs of the other kind of attachment
// until it succeeds.
func TestDeviceSwitchThatFails(t *testing.T) {
	p := newPort(t, Clsact)
	p.attach(p.device())
	lab.Must(t, p.Close())
	needsAttachment(t, TCX)
	p.open(TCX)
	obstacle := devicePin(p.cfg.BPFRoot, p.index, deviceHooks()[0])
	lab.Must(t, os.MkdirAll(obstacle, 0o700))
	if failed := p.tryAttach(p.device()); len(failed) != 1 || failed[p.index] == nil {
		t.Errorf("devices failed: %v", failed)
	}
	p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
	lab.Must(t, os.Remove(obstacle))
	p.attach(p.device())
	p.wantState("eth0", TCX, "")
	if p.hasClsact() {
		t.Errorf("the qdisc clsact is left, with %v", p.filterNames())
	}
}

// linkID returns the kernel's number of the link at ingress, if it is one.
func (p *port) linkID() link.ID {
	p.t.Helper()
	if p.cfg.Attachment != TCX {
		return 0
	}
	pinned, err := link.LoadPinnedLink(filepath.Join(deviceDir(p.cfg.BPFRoot), fmt.Sprint(p.index), "ingress"), nil)
	lab.Must(p.t, err)
	defer pinned.Close()
	info, err := pinned.Info()
	lab.Must(p.t, err)

	return info.ID
}

// reset sets all counters to zero.
func (p *port) reset() {
	p.t.Helper()
	time.Sleep(50 * time.Millisecond) // what is still on its way
	for _, c := range p.theirs {
		lab.Must(p.t, c.packets.Put(uint32(0), uint64(0)))
	}
	for _, c := range p.ours {
		lab.Must(p.t, c.ingress.packets.Put(uint32(0), uint64(0)), c.egress.packets.Put(uint32(0), uint64(0)))
	}
}

// underLoad calls f while packets are exchanged.
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

// wantEachSeen compares the counts of our programs with those of the other ones.
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

// The class and other properties of a device select its programs, and those that no
// device needs are not loaded.
func TestDevicePrograms(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		pods := p.device()
		pods.Class, pods.BridgePort = maps.DevicePods, true
		podCounters := p.count(pods)
		p.attach(p.device())
		p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
		p.wantCounts(false, podCounters.ingress, podCounters.egress)

		p.attach(pods)
		p.wantCounts(false, p.ours[0].ingress, p.ours[0].egress)
		p.wantCounts(true, podCounters.ingress, podCounters.egress)
		if n := len(p.devices.loaded); n != 2 {
			t.Errorf("%d pairs of programs are loaded, want 2", n)
		}
	})
}

// Every configuration of the real programs, on devices of both link layers.
func TestRealDevicePrograms(t *testing.T) {
	p := newPort(t, Clsact)
	clear(p.devices.loaded)
	p.addTun("tun0")
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
		t.Errorf("%d pairs of programs are loaded, want 6", n)
	}
}

// addTun adds a device whose packets begin with the IP header.
func (p *port) addTun(name string) {
	p.t.Helper()
	// udev would make this.
	err := os.MkdirAll("/dev/net", 0o755)
	if err == nil {
		err = unix.Mknod("/dev/net/tun", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200)))
	}
	if !errors.Is(err, unix.EEXIST) {
		lab.Must(p.t, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	lab.MustDo(p.t, p.node, func() error {
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN})
	})
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

// That attaching to a device fails does not affect other devices.
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

// The state of another version stays as long as hooks of it may be at work, although all devices are attached.
func TestStateStaysForHooks(t *testing.T) {
	p := newPort(t, Clsact)
	other := filepath.Join(p.cfg.BPFRoot, "state-v0")
	lab.Must(t, os.Mkdir(other, 0o700))
	p.attach(p.device())
	if _, err := os.Stat(other); err != nil {
		t.Errorf("before hooks are attached: %v", err)
	}
	lab.Must(t, p.Attach())
	p.attach(p.device())
	if _, err := os.Stat(other); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("when no program of another version is attached: %v", err)
	}
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
			lab.Must(t, d.Close())
		}
	}
}
