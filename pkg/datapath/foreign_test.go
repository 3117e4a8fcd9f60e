package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Programs of others run before, beside and after ours, in whichever order they were
// attached, and stay when ours are removed.
func TestForeignDevicePrograms(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		for _, test := range []struct {
			name  string
			first bool // theirs are there before ours
		}{{"which were there before", true}, {"which come later", false}} {
			t.Run(test.name, func(t *testing.T) {
				p := newPort(t, by)
				if test.first {
					p.attachTheirs()
				}
				p.attach(p.device())
				if !test.first {
					p.attachTheirs()
				}
				theirs := []*counter{p.theirs["ingress"], p.theirs["egress"]}
				if !test.first { // one that takes the first place from ours
					ahead := newCounter(t, -1)
					p.attachTheir(deviceHooks()[1], ahead, link.Head(), 1)
					theirs = append(theirs, ahead)
				}
				p.wantCounts(true, slices.Concat(theirs, []*counter{p.ours[0].ingress, p.ours[0].egress})...)
				p.wantAhead(!test.first)
				lab.Must(t, p.Close())
				p.open(by)
				p.attach(p.device())
				p.wantCounts(true, slices.Concat(theirs, []*counter{p.ours[1].ingress, p.ours[1].egress})...)
				p.attach()
				p.wantCounts(true, theirs...)
				p.attach(p.device())
				lab.MustDo(t, p.node, func() error { return Remove(p.cfg.BPFRoot) })
				p.wantCounts(true, theirs...)
				p.wantCounts(false, p.ours[1].ingress, p.ours[1].egress)
				if by == Clsact && !p.hasClsact() {
					t.Error("the qdisc clsact is gone")
				}
			})
		}
	})
}

// theirName is the kernel's name of programs or filters of others.
func (p *port) theirName() string {
	return map[Attachment]string{TCX: "counter", Clsact: "theirs"}[p.cfg.Attachment]
}

// wantAhead fails the test unless the state has these programs ahead of ours.
func (p *port) wantAhead(alsoAtIngress bool) {
	p.t.Helper()
	want := []string{"egress: " + p.theirName()}
	if alsoAtIngress {
		want = append(want, "ingress: "+p.theirName())
	}
	if got := p.states()["eth0"].Ahead; !slices.Equal(got, want) {
		p.t.Errorf("ahead of ours are %q, want %q", got, want)
	}
}

// Ours is the first at ingress, even if another program was attached as the first one: so
// no program that ends the chain hides packets from ours.
func TestOursIsFirstAtIngress(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		ends := newCounter(t, verdictOK)
		p.attachTheir(deviceHooks()[1], ends, link.Head(), 1)
		p.attach(p.device())
		p.wantCounts(true, ends, p.ours[0].ingress)
	})
}

// Ours is the last at egress: it does not see packets that another program drops there.
func TestOursIsLastAtEgress(t *testing.T) {
	const shot = 2 // TC_ACT_SHOT
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		drops := newCounter(t, shot)
		p.attachTheir(deviceHooks()[0], drops, link.Tail(), 100)
		p.attach(p.device())
		before := p.ours[0].egress.count()
		lab.MustDo(t, p.node, func() error { // the other side hears nothing, and must not wait
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)

			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 0, 0, 2}})
		})
		lab.Eventually(t, "something is dropped", func() bool { return drops.count() > 0 })
		if got := p.ours[0].egress.count() - before; got != 0 {
			t.Errorf("ours saw %d packets that were dropped before", got)
		}
	})
}

const verdictOK = 0 // TC_ACT_OK ends the chain

// wantUnreached fails the test unless a trial finds these hooks, and again as given.
func (p *port) wantUnreached(wait func(), again bool, want ...Unreached) {
	p.t.Helper()
	lab.MustDo(p.t, p.node, func() error {
		trial, err := p.beginTrial([]Device{p.device()})
		var found []Unreached
		tries := false
		if err == nil && trial != nil {
			trial.count(wait)
			found, tries, err = p.endTrial(trial)
		}
		if tries != again || !reflect.DeepEqual(found, want) {
			p.t.Errorf("not reached are %v, want %v; to be tried again: %t, want %t", found, want, tries, again)
		}

		return err
	})
}

// If a program that ends the chain is attached before ours at ingress, ours becomes the first
// again; if the other is attached anew, the hook is found to be unreached.
func TestOursIsTheFirstAgain(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		ends := newCounter(t, verdictOK)
		ingress := deviceHooks()[1]
		undo := p.attachTheir(ingress, ends, link.Head(), 1)
		p.wantCounts(false, p.ours[0].ingress)
		for range 2 {
			p.attach(p.device())
			p.wantCounts(true, ends, p.ours[0].ingress)
			p.wantUnreached(p.exchange, false)
		}
		undo()
		undo = p.attachTheir(ingress, ends, link.Head(), 1)
		p.attach(p.device())
		p.wantCounts(false, p.ours[0].ingress)
		is := Unreached{Index: p.index, Hook: "ingress", Ahead: []string{p.theirName()}}
		p.wantUnreached(p.exchange, false, is)
		p.wantUnreached(func() {}, false, is) // in silence
		undo()
		p.attach(p.device())
		p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)
		p.wantUnreached(p.exchange, false)
	})
}

// At egress ours is the last, unless another one ends the chain before. The next agent leaves
// it where it is.
func TestOursIsFirstAtEgressIfAnotherEndsTheChain(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		p.attachTheirs()
		p.attach(p.device())
		p.wantUnreached(p.exchange, false)
		p.wantAhead(false)

		ends := newCounter(t, verdictOK)
		p.attachTheir(deviceHooks()[0], ends, link.Head(), 50)
		p.attach(p.device())
		p.wantCounts(false, p.ours[0].egress)
		p.wantUnreached(p.exchange, true)
		p.attach(p.device())
		p.wantCounts(true, ends, p.ours[0].egress)
		lab.Must(t, p.Close())
		p.open(by)
		p.attach(p.device())
		p.attach(p.device())
		p.wantCounts(true, ends, p.ours[1].ingress, p.ours[1].egress)
		p.wantUnreached(p.exchange, false)
	})
}

// Our program at a hook may be replaced while packets are counted there: that the old one does not run any more says nothing
// of what runs before the new one.
func TestProgramsAreReplacedDuringATrial(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		ingress := deviceHooks()[1]
		p.attachTheirs()
		ahead := newCounter(t, -1)
		undo := p.attachTheir(ingress, ahead, link.Head(), 1)
		p.attach(p.device())
		undo()
		p.attachTheir(ingress, ahead, link.Head(), 1) // ours stays behind it now
		p.attach(p.device())
		p.wantAhead(true)
		after := p.count(p.podDevice())
		waits := 0
		p.wantUnreached(func() {
			if waits++; waits == 1 {
				p.attach(p.podDevice())
			}
			p.exchange()
		}, false)
		p.wantCounts(true, after.ingress, after.egress)
		p.wantUnreached(p.exchange, false)
	})
}

// If a filter that is no program has the first priority, ours takes the next one.
func TestPriorityThatIsTaken(t *testing.T) {
	p := newPort(t, Clsact)
	lab.MustDo(t, p.node, func() error {
		if err := netlink.QdiscAdd(clsactOf(p.index)); err != nil {
			return err
		}

		return netlink.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{
			LinkIndex: p.index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Protocol: unix.ETH_P_ALL,
		}, ClassId: 1})
	})
	p.attach(p.device())
	p.attach(p.device())
	p.wantState("eth0", Clsact, "")
	if names := p.filterNames(); !slices.Equal(names, []string{"u32", "sluice_ingress", "sluice_egress"}) {
		t.Errorf("filters are %v", names)
	}
	p.attach()
	if names := p.filterNames(); !slices.Equal(names, []string{"u32"}) || !p.hasClsact() {
		t.Errorf("filters are %v", names)
	}
}

// Programs of others at the hooks of sockets are found, in the cgroup and above it, and whether
// they exclude others, as the kernel then does.
func TestForeignInCgroup(t *testing.T) {
	lab.NeedsRoot(t)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "theirs", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	lab.Must(t, err)
	t.Cleanup(func() { program.Close() })
	for _, test := range []struct {
		name     string
		flags    uint32
		below    bool // ask for a cgroup below
		excludes bool
	}{
		{"beside others", unix.BPF_F_ALLOW_MULTI, false, false},
		{"beside others, above", unix.BPF_F_ALLOW_MULTI, true, false},
		{"which may be overridden", unix.BPF_F_ALLOW_OVERRIDE, false, true},
		{"which may be overridden below", unix.BPF_F_ALLOW_OVERRIDE, true, false},
		{"alone", 0, false, true},
		{"alone, above", 0, true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			cgroup := lab.MustCgroup(t, "theirs")
			folder, err := os.Open(cgroup.Path())
			lab.Must(t, err)
			defer folder.Close()
			at := cgroup.Path()
			if test.below {
				at = filepath.Join(at, "below")
				lab.Must(t, os.Mkdir(at, 0o755))
				defer os.Remove(at)
			}
			lab.Must(t, link.RawAttachProgram(link.RawAttachProgramOptions{
				Target: int(folder.Fd()), Program: program, Attach: ebpf.AttachCGroupInet4Connect, Flags: test.flags,
			}))
			defer func() {
				lab.Must(t, link.RawDetachProgram(link.RawDetachProgramOptions{
					Target: int(folder.Fd()), Program: program, Attach: ebpf.AttachCGroupInet4Connect,
				}))
			}()
			want := []Foreign{{Hook: "connect4", Program: "theirs", Excludes: test.excludes}}
			found, err := ForeignInCgroup(at)
			lab.Must(t, err)
			if !slices.Equal(found, want) {
				t.Errorf("found are %+v, want %+v", found, want)
			}
			l, err := link.AttachCgroup(link.CgroupOptions{Path: at, Attach: ebpf.AttachCGroupInet4Connect, Program: program})
			if refused := errors.Is(err, unix.EPERM); refused != test.excludes {
				t.Errorf("another program is refused: %v, want %t", err, test.excludes)
			}
			if err == nil {
				lab.Must(t, l.Close())
			}
		})
	}
}

// Programs and filters of others at a device are found in the order in which they run, and whether
// that is before ours.
func TestForeignAtDevices(t *testing.T) {
	needsAttachment(t, TCX)
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})
	device, err := ns.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	index := device.Attrs().Index
	mustProgram := func(name string, kind ebpf.ProgramType) *ebpf.Program {
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: name, Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
		})
		lab.Must(t, err)
		t.Cleanup(func() { program.Close() })

		return program
	}
	attachTCX := func(name string, attach ebpf.AttachType) {
		l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: mustProgram(name, ebpf.SchedCLS), Attach: attach, Anchor: link.Tail()})
		lab.Must(t, err)
		t.Cleanup(func() { l.Close() })
	}
	var before []Foreign
	lab.MustDo(t, ns, func() error {
		for _, name := range []string{"ends_chain", "sluice_ingress", "after"} {
			attachTCX(name, ebpf.AttachTCXIngress)
		}
		attachTCX("counts", ebpf.AttachTCXEgress)
		lab.Must(t, netlink.QdiscAdd(clsactOf(index)))
		lab.Must(t, netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 7, Protocol: unix.ETH_P_ALL},
			Fd:          mustProgram("filter", ebpf.SchedCLS).FD(), Name: "filter", DirectAction: true,
		}))
		xdp, err := link.AttachXDP(link.XDPOptions{Interface: index, Program: mustProgram("first", ebpf.XDP), Flags: link.XDPGenericMode})
		lab.Must(t, err)
		defer xdp.Close()
		before, err = ForeignAtDevices([]int{index, 4242})

		return err
	})
	want := []Foreign{
		{Hook: "eth0 xdp", Program: "first", Ahead: true},
		{Hook: "eth0 ingress", Program: "ends_chain", Ahead: true},
		{Hook: "eth0 ingress", Program: "after"},
		{Hook: "eth0 ingress", Program: "filter"},
		{Hook: "eth0 egress", Program: "counts", Ahead: true},
	}
	if !slices.Equal(before, want) {
		t.Errorf("found are\n%+v, want\n%+v", before, want)
	}
}
