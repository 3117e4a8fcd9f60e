package datapath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// port is a device of a node, and a peer that sends to it. Programs that count take the
// place of ours, so that every packet that passes them is counted; each hook has another
// program that counts and passes packets on, behind ours at ingress and before ours at
// egress.
//
//	node eth0 10.0.0.1/24 ┄┄ peer eth0 10.0.0.2/24
type port struct {
	*Datapath
	t          testing.TB
	cfg        Config
	node, peer *lab.Namespace
	index      int
	theirs     map[string]*counter // by hook
	ours       []*counters         // of each agent, one after the other
}

// counter is a program that counts packets.
type counter struct {
	t       testing.TB
	program *ebpf.Program
	packets *ebpf.Map
}

// counters are the two programs that take the place of ours.
type counters struct{ ingress, egress *counter }

// eachAttachment runs a test for each way to attach that the kernel has.
func eachAttachment(t *testing.T, test func(*testing.T, Attachment)) {
	t.Helper()
	for _, by := range []Attachment{TCX, Clsact} {
		t.Run(string(by), func(t *testing.T) {
			needsAttachment(t, by)
			test(t, by)
		})
	}
}

func needsAttachment(t testing.TB, by Attachment) {
	t.Helper()
	features, err := ProbeFeatures()
	lab.Must(t, err)
	if by == TCX && !features.TCX {
		t.Skip("this kernel has no tcx (Linux 6.6)")
	}
}

const nodeAddr = "10.0.0.1"

// newPort makes a port to which nothing of ours is attached yet.
func newPort(t testing.TB, by Attachment) *port {
	t.Helper()
	needsAttachment(t, by)
	p := &port{t: t, node: lab.MustNamespace(t, "node"), peer: lab.MustNamespace(t, "peer"), theirs: map[string]*counter{}}
	lab.MustVeth(t,
		lab.End{Namespace: p.node, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(nodeAddr + "/24")}},
		lab.End{Namespace: p.peer, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/24")}})
	p.index = p.indexOf("eth0")
	p.cfg = Config{
		CgroupRoot: lab.MustCgroup(t, "port").Path(),
		BPFRoot:    lab.MustBPFRoot(t),
		UDP:        bpf.UDPAll,
		Capacities: smallMaps(),
		Attachment: by,
	}
	t.Cleanup(func() { lab.MustDo(t, p.node, func() error { return Remove(p.cfg.BPFRoot) }) })
	for _, hook := range deviceHooks() {
		p.theirs[hook.name] = newCounter(t, -1)
	}
	p.open(by)

	return p
}

// open starts the next agent.
func (p *port) open(by Attachment) {
	p.t.Helper()
	p.cfg.Attachment = by
	lab.MustDo(p.t, p.node, func() (err error) {
		p.Datapath, err = Open(p.cfg)

		return err
	})
	d := p.Datapath
	p.t.Cleanup(func() { d.Close() })
	p.ours = append(p.ours, p.count(p.device()))
}

// count replaces the programs of a device by programs that count.
func (p *port) count(device Device) *counters {
	p.t.Helper()
	c := &counters{newNamedCounter(p.t, "sluice_ingress", -1), newNamedCounter(p.t, "sluice_egress", -1)}
	ingress, err := c.ingress.program.Clone()
	lab.Must(p.t, err)
	egress, err := c.egress.program.Clone()
	lab.Must(p.t, err)
	p.devices.loaded[p.devices.configOf(device)] = &bpf.DevicePrograms{ // Close closes them
		Ingress: ingress, Egress: egress, Kept: []string{p.keep(c.ingress), p.keep(c.egress)},
	}

	return c
}

// keep pins a program as those of an agent are pinned, and returns the pin.
func (p *port) keep(c *counter) string {
	p.t.Helper()
	info, err := c.program.Info()
	lab.Must(p.t, err)
	id, _ := info.ID()
	lab.Must(p.t, os.MkdirAll(programDir(p.cfg.BPFRoot), 0o700))
	pin := filepath.Join(programDir(p.cfg.BPFRoot), fmt.Sprintf("%s_%d", info.Name, id))
	lab.Must(p.t, c.program.Pin(pin))

	return pin
}

func (p *port) indexOf(device string) int {
	p.t.Helper()
	l, err := p.node.Netlink().LinkByName(device)
	lab.Must(p.t, err)

	return l.Attrs().Index
}

func (p *port) device() Device { return Device{Index: p.index, Class: maps.DeviceUplink} }

func (p *port) podDevice() Device { return Device{Index: p.index, Class: maps.DevicePods} }

// attach attaches as the agent does, and fails the test if that fails.
func (p *port) attach(devices ...Device) {
	p.t.Helper()
	if failed := p.tryAttach(devices...); len(failed) > 0 {
		p.t.Fatalf("devices failed: %v", failed)
	}
}

func (p *port) tryAttach(devices ...Device) (failed map[int]error) {
	p.t.Helper()
	lab.MustDo(p.t, p.node, func() (err error) {
		failed, err = p.AttachDevices(devices)

		return err
	})

	return failed
}

// states returns the state of all devices, by name.
func (p *port) states() map[string]DeviceState {
	p.t.Helper()
	states := make(map[string]DeviceState)
	lab.MustDo(p.t, p.node, func() error {
		list, err := Devices(p.cfg.BPFRoot)
		for _, state := range list {
			states[state.Name] = state
		}

		return err
	})

	return states
}

// wantState fails the test unless a device has this state.
func (p *port) wantState(device string, attached Attachment, problem string) {
	p.t.Helper()
	state := p.states()[device]
	if state.Attached != attached || state.Problem != problem {
		p.t.Errorf("%s is attached %q, problem %q; want %q, %q", device, state.Attached, state.Problem, attached, problem)
	}
}

// attachTheirs attaches the programs of another owner, until the test ends: nearer to
// the stack than ours.
func (p *port) attachTheirs() {
	p.t.Helper()
	for _, hook := range deviceHooks() {
		anchor := link.Tail()
		if hook.name == "egress" {
			anchor = link.Head()
		}
		p.attachTheir(hook, p.theirs[hook.name], anchor, 100)
	}
}

// attachTheir attaches a program of another owner by this Datapath's kind of attachment, until
// undo is called. Anchor is used with tcx, and priority with clsact.
func (p *port) attachTheir(hook deviceHook, c *counter, anchor link.Anchor, priority uint16) (undo func()) {
	p.t.Helper()
	lab.MustDo(p.t, p.node, func() error {
		if p.cfg.Attachment == TCX {
			l, err := link.AttachTCX(link.TCXOptions{Interface: p.index, Program: c.program, Attach: hook.attach, Anchor: anchor})
			if err == nil {
				undo = func() { l.Close() }
				p.t.Cleanup(undo)
			}

			return err
		}
		if err := netlink.QdiscReplace(clsactOf(p.index)); err != nil {
			return err
		}
		filter := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: p.index, Parent: hook.parent, Handle: 1, Priority: priority, Protocol: unix.ETH_P_ALL,
			},
			Fd: c.program.FD(), Name: "theirs", DirectAction: true,
		}
		undo = func() {
			p.t.Helper()
			lab.MustDo(p.t, p.node, func() error { return netlink.FilterDel(filter) })
		}

		return netlink.FilterAdd(filter)
	})

	return undo
}

// exchange has packets pass both hooks: the peer asks, and the node refuses.
func (p *port) exchange() {
	p.t.Helper()
	lab.MustDo(p.t, p.peer, func() error {
		refused := 0
		for tries := 0; refused < 10 && tries < 100; tries++ {
			_, err := net.DialTimeout("tcp4", nodeAddr+":9", 50*time.Millisecond) // and go on, if one is lost
			if errors.Is(err, unix.ECONNREFUSED) {
				refused++
			}
		}

		return nil
	})
}

// wantCounts exchanges packets and fails the test unless each of the counters
// sees all of them, or none.
func (p *port) wantCounts(seen bool, counters ...*counter) {
	p.t.Helper()
	var before []uint64
	for _, c := range counters {
		before = append(before, c.count())
	}
	p.exchange()
	for i, c := range counters {
		got := c.count() - before[i]
		if seen && got < 10 || !seen && got > 0 {
			p.t.Errorf("counter %d saw %d packets; want some: %t", i, got, seen)
		}
	}
}

// newCounter returns a program that counts, and then returns this verdict.
func newCounter(t testing.TB, verdict int32) *counter {
	t.Helper()

	return newNamedCounter(t, "counter", verdict)
}

func newNamedCounter(t testing.TB, name string, verdict int32) *counter {
	t.Helper()
	c := &counter{t: t}
	var err error
	c.packets, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	lab.Must(t, err)
	t.Cleanup(func() { c.packets.Close() })
	c.program, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, 0),
			asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
			asm.LoadMapPtr(asm.R1, c.packets.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
			asm.Return(),
		},
	})
	lab.Must(t, err)
	t.Cleanup(func() { c.program.Close() })

	return c
}

func (c *counter) count() uint64 {
	c.t.Helper()
	var n uint64
	lab.Must(c.t, c.packets.Lookup(uint32(0), &n))

	return n
}

// sum adds up what all agents' programs counted.
func (p *port) sum(of func(*counters) *counter) uint64 {
	var n uint64
	for _, c := range p.ours {
		n += of(c).count()
	}

	return n
}

// filterNames returns the filters at both hooks of the port, ingress first.
func (p *port) filterNames() []string {
	p.t.Helper()
	var names []string
	lab.MustDo(p.t, p.node, func() error {
		for _, hook := range slices.Backward(deviceHooks()) {
			filters, err := filtersAt(p.index, hook)
			if err != nil {
				return err
			}
			for _, filter := range filters {
				name := filter.Type()
				if f, ok := filter.(*netlink.BpfFilter); ok {
					name = f.Name
				}
				names = append(names, name)
			}
		}

		return nil
	})

	return names
}

// hasClsact reports whether the port has the qdisc.
func (p *port) hasClsact() bool {
	p.t.Helper()
	var has bool
	lab.MustDo(p.t, p.node, func() error {
		qdiscs, err := listQdiscs()
		has = qdiscs[p.index] == "clsact"

		return err
	})

	return has
}
