package datapath

import (
	"errors"
	stdmaps "maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

const webVIP = "10.96.0.1:80"

func newWebWorld(t testing.TB) *world {
	t.Helper()
	w := newWorld(t)
	w.add(t, service{proto: "tcp", at: []string{webVIP}, to: w.all4()})

	return w
}

// One agent after another takes over, while clients connect without a break.
func TestReplacement(t *testing.T) {
	t.Parallel() // it sleeps
	w := newWebWorld(t)
	before := mustLinkID(t, w, "connect4")
	load, err := w.pod(t).StartLoad(lab.Load{Exchange: lab.Exchange{Network: "tcp4", Address: webVIP}, Rate: 500})
	lab.Must(t, err)
	for range 5 {
		time.Sleep(100 * time.Millisecond)
		lab.Must(t, w.Close()) // the old agent dies
		time.Sleep(50 * time.Millisecond)
		w.Datapath = w.mustOpen(t, w.cfg)
		w.mustAttach(t)
	}
	report, err := load.Stop()
	lab.Must(t, err)
	if report.Succeeded < 200 || len(report.Failures) > 0 {
		t.Errorf("%d of %d connects succeeded; failures: %v", report.Succeeded, report.Started, report.Failures)
	}
	if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCGroupInet4Connect)); n != 1 {
		t.Errorf("%d programs at connect4, want 1", n)
	}
	if after := mustLinkID(t, w, "connect4"); after != before {
		t.Errorf("link %d, want %d with its program replaced", after, before)
	}
}

// mustLinkID returns the kernel's number of a pinned link.
func mustLinkID(t testing.TB, w *world, hook string) link.ID {
	t.Helper()
	pinned, err := link.LoadPinnedLink(filepath.Join(linkDir(w.cfg.BPFRoot), hook), nil)
	lab.Must(t, err)
	defer pinned.Close()
	info, err := pinned.Info()
	lab.Must(t, err)

	return info.ID
}

// effective returns the programs that run at a hook of a cgroup.
func effective(t testing.TB, path string, hook ebpf.AttachType) []link.AttachedProgram {
	t.Helper()
	cgroup, err := os.Open(path)
	lab.Must(t, err)
	defer cgroup.Close()
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: hook})
	lab.Must(t, err)

	return result.Programs
}

// Programs stay in force when the agent ends.
func TestClosed(t *testing.T) {
	w := newWebWorld(t)
	w.add(t, service{proto: "udp", at: []string{webVIP}, to: w.all4()})
	lab.Must(t, w.Close())
	client := w.pod(t)
	for _, x := range []lab.Exchange{
		{Network: "tcp4", Address: webVIP},
		{Network: "udp4", Address: webVIP},
		{Network: "udp4", Address: webVIP, Unconnected: true},
	} {
		if _, err := client.Exchange(x); err != nil {
			t.Errorf("%s: %v", x.Network, err)
		}
	}
}

// The links follow the configuration to another cgroup.
func TestAnotherCgroupRoot(t *testing.T) {
	w := newWebWorld(t)
	old := w.pod(t)
	next := lab.MustCgroup(t, "next")
	moved := *w
	moved.cfg.CgroupRoot, moved.cgroup = next.Path(), next
	moved.Datapath = w.mustOpen(t, moved.cfg)
	moved.mustAttach(t)

	if _, err := moved.pod(t).Request("tcp4", webVIP); err != nil {
		t.Errorf("in the new cgroup: %v", err)
	}
	if _, err := old.Exchange(lab.Exchange{Network: "tcp4", Address: webVIP, Timeout: 200 * time.Millisecond}); err == nil {
		t.Error("the old cgroup is still translated")
	}
	wantHooks(t, moved.cfg, "")
	wantHooks(t, w.cfg, "not effective on")
}

// wantHooks fails the test unless each hook has a problem like this.
func wantHooks(t testing.TB, cfg Config, problem string) {
	t.Helper()
	states, err := Hooks(cfg.BPFRoot, cfg.CgroupRoot)
	lab.Must(t, err)
	if optional := 1; len(states) < len(bpf.SockHooks())-optional {
		t.Errorf("%d hooks of %d", len(states), len(bpf.SockHooks()))
	}
	for _, state := range states {
		if problem == "not effective on" && isTraced(state.Name) {
			continue // tracepoints belong to no cgroup
		}
		if !strings.HasPrefix(state.Problem, problem) || (problem == "") != (state.Problem == "") {
			t.Errorf("hook %s: %q, want %q", state.Name, state.Problem, problem)
		}
	}
}

func isTraced(hook string) bool {
	traced := bpf.TraceHooks(bpf.Config{Handshakes: true})

	return slices.ContainsFunc(traced, func(h bpf.Hook) bool { return h.Name == hook })
}

// Without stats, that nothing is traced is no problem.
func TestNoHookToCountWith(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.NoStats = true })
	states, err := w.Hooks()
	lab.Must(t, err)
	if optional := 1; len(states) != len(bpf.SockHooks())-optional {
		t.Errorf("%d hooks, want %d", len(states), len(bpf.SockHooks())-optional)
	}
	for _, state := range states {
		if state.Problem != "" {
			t.Errorf("hook %s: %s", state.Name, state.Problem)
		}
	}
}

// A cgroup that was removed and created again with the same name is another one.
func TestRecreatedCgroup(t *testing.T) {
	w := newWebWorld(t)
	child, err := w.cgroup.Child("again")
	lab.Must(t, err)
	w.cfg.CgroupRoot = child.Path()
	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	lab.Must(t, child.Close())
	child, err = w.cgroup.Child("again")
	lab.Must(t, err)
	t.Cleanup(func() { child.Close() })
	wantHooks(t, w.cfg, "not effective on")

	w.mustAttach(t)
	wantHooks(t, w.cfg, "")
	w.cgroup = child
	if _, err := w.pod(t).Request("tcp4", webVIP); err != nil {
		t.Error(err)
	}
}

// Programs of others stay where they are.
func TestForeignPrograms(t *testing.T) {
	w := buildWorld(t)
	foreign, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	lab.Must(t, err)
	defer foreign.Close()
	theirs, err := link.AttachCgroup(link.CgroupOptions{
		Path: w.cfg.CgroupRoot, Attach: ebpf.AttachCGroupInet4Connect, Program: foreign,
	})
	lab.Must(t, err)
	defer theirs.Close()
	counts := func(want int) {
		t.Helper()
		if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCGroupInet4Connect)); n != want {
			t.Errorf("%d programs at connect4, want %d", n, want)
		}
	}

	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	counts(2)
	w.mustAttach(t)
	counts(2)
	lab.Must(t, Remove(w.cfg.BPFRoot))
	counts(1)
}

// Hooks go in the reverse of the order of Attach: no socket sees the address of a backend, and tracepoints see
// all sockets until then.
func TestRemovalOrder(t *testing.T) {
	names := []string{"tcp_retransmit_skb", "getpeername4", "inet_sock_set_state", "recvmsg4", "connect4"}
	slices.SortStableFunc(names, func(a, b string) int { return compareIn(removalOrder(), a, b) })
	want := []string{"connect4", "recvmsg4", "getpeername4", "tcp_retransmit_skb", "inet_sock_set_state"}
	if !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
}

// An agent of an older build ends links that it does not know, where it knows all of those that there are: each has to be
// one that can be detached, and a new kind of links needs a folder of its own.
func TestOlderBuildsCanEndLinks(t *testing.T) {
	l := newLoaded(t)
	l.needsTracing(t)
	entries, err := os.ReadDir(linkDir(l.cfg.BPFRoot))
	lab.Must(t, err)
	ended := 0
	for _, entry := range entries {
		if entry.IsDir() {
			continue
		}
		pinned, err := link.LoadPinnedLink(filepath.Join(linkDir(l.cfg.BPFRoot), entry.Name()), nil)
		lab.Must(t, err)
		if err := errors.Join(pinned.Detach(), pinned.Close()); err != nil {
			t.Errorf("%s: %v", entry.Name(), err)
		}
		ended++
	}
	if ended < len(bpf.SockHooks())-2 { // two are optional
		t.Errorf("%d links are there", ended)
	}
	for _, hook := range bpf.TraceHooks(l.config) {
		mustLinkID(t, l.world, "trace/"+hook.Name)
	}
}

// If a hook of requests cannot be detached, those that translate its answers stay.
func TestRemoveStops(t *testing.T) {
	w := newWebWorld(t)
	pin := filepath.Join(linkDir(w.cfg.BPFRoot), "connect4")
	lab.Must(t, os.Remove(pin))
	noLink, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	lab.Must(t, err)
	defer noLink.Close()
	lab.Must(t, noLink.Pin(pin))
	if err := Remove(w.cfg.BPFRoot); err == nil {
		t.Error("no error")
	}
	if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCGroupUDP4Recvmsg)); n != 1 {
		t.Errorf("%d programs at recvmsg4, want 1", n)
	}
	lab.Must(t, os.Remove(pin))
}

func TestRemove(t *testing.T) {
	w := newWebWorld(t)
	for _, other := range []string{"v0", "state-v0", "new-v9"} { // of other versions
		lab.Must(t, os.Mkdir(filepath.Join(w.cfg.BPFRoot, other), 0o700))
	}
	for range 2 {
		lab.Must(t, Remove(w.cfg.BPFRoot))
		if _, err := os.Stat(w.cfg.BPFRoot); !os.IsNotExist(err) {
			t.Errorf("pins are left: %v", err)
		}
		for _, hook := range bpf.SockHooks() {
			if programs := effective(t, w.cfg.CgroupRoot, hook.Attach); len(programs) > 0 {
				t.Errorf("%s: %v is attached", hook.Name, programs)
			}
		}
	}
	wantHooks(t, w.cfg, "not attached")
}

// Hooks names the one that is not there.
func TestHooks(t *testing.T) {
	w := newWebWorld(t)
	wantHooks(t, w.cfg, "")
	lab.Must(t, os.Remove(filepath.Join(linkDir(w.cfg.BPFRoot), "sendmsg6")))
	states, err := Hooks(w.cfg.BPFRoot, w.cfg.CgroupRoot)
	lab.Must(t, err)
	for _, state := range states {
		if missing := state.Problem != ""; missing != (state.Name == "sendmsg6") {
			t.Errorf("%s: %q", state.Name, state.Problem)
		}
	}
	if _, err := w.MendPins(); err != nil {
		t.Fatal(err)
	}
	wantHooks(t, w.cfg, "")
	t.Run("an error without the cgroup root", func(t *testing.T) {
		if _, err := Hooks(w.cfg.BPFRoot, "/sys/fs/cgroup/none"); err == nil {
			t.Error("no error")
		}
	})
}

// Programs stay in force without pins. MendPins pins the same links and maps again, and
// the next agent adopts them.
func TestPinsThatAreMissing(t *testing.T) {
	t.Run("hooks", func(t *testing.T) {
		w := newWebWorld(t)
		client := w.pod(t)
		loseAndMendPins(t, w.Datapath, filepath.Join(linkDir(w.cfg.BPFRoot), "connect4"), w.Attach, func() {
			if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCGroupInet4Connect)); n != 1 {
				t.Errorf("%d programs are attached, want 1", n)
			}
			if _, err := client.Request("tcp4", webVIP); err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("devices", func(t *testing.T) {
		p := newPort(t, TCX)
		p.attach(p.device())
		ingress := deviceHooks()[1]
		attach := func() error { return errors.Join(slices.Collect(stdmaps.Values(p.tryAttach(p.device())))...) }
		loseAndMendPins(t, p.Datapath, devicePin(p.cfg.BPFRoot, p.index, ingress), attach, func() {
			lab.MustDo(t, p.node, func() error {
				if n := programsAt(t, p.index, ingress, TCX); n != 1 {
					t.Errorf("%d programs are attached, want 1", n)
				}

				return nil
			})
		})
	})
}

// loseAndMendPins removes all pins of a Datapath that has this one, attaches without
// pins, restores them, and closes the Datapath. The check must hold after each step.
func loseAndMendPins(t *testing.T, d *Datapath, pin string, attach func() error, check func()) {
	t.Helper()
	root := d.cfg.BPFRoot
	before := pinnedIDs(t, root, pin)
	lab.Must(t, os.RemoveAll(root))
	time.Sleep(100 * time.Millisecond) // the kernel takes its time to detach what has no reference
	check()
	lab.Must(t, mustOpenLink(t, d, pin).Detach(), attach())
	if !slices.Contains(d.MissingPins(), pin) {
		t.Errorf("missing are %v", d.MissingPins())
	}
	check()

	before[0] = idOf(t, mustOpenLink(t, d, pin))
	missing, err := d.MendPins()
	lab.Must(t, err)
	if !slices.Contains(missing, pin) || !slices.Contains(missing, maps.PinOf(root, maps.NameFlows)) {
		t.Errorf("missing were %v", missing)
	}
	if after := pinnedIDs(t, root, pin); after != before {
		t.Errorf("ids of a link and a map are %v, were %v", after, before)
	}
	if missing, err := d.MendPins(); err != nil || len(missing) > 0 {
		t.Errorf("nothing is missing, but %v: %v", missing, err)
	}
	lab.Must(t, d.Close())
	time.Sleep(100 * time.Millisecond)
	check()
}

// mustOpenLink returns the link that a Datapath has open for a pin.
func mustOpenLink(t *testing.T, d *Datapath, pin string) link.Link {
	t.Helper()
	l, err := d.links.get(pin)
	lab.Must(t, err)
	t.Cleanup(func() { l.Close() })

	return l
}

func idOf(t *testing.T, l link.Link) uint32 {
	t.Helper()
	info, err := l.Info()
	lab.Must(t, err)

	return uint32(info.ID)
}

// pinnedIDs returns the kernel's numbers of a pinned link and of the pinned map of flows.
func pinnedIDs(t *testing.T, bpfRoot, pin string) [2]uint32 {
	t.Helper()
	l, err := link.LoadPinnedLink(pin, nil)
	lab.Must(t, err)
	defer l.Close()
	flows, err := ebpf.LoadPinnedMap(maps.PinOf(bpfRoot, maps.NameFlows), nil)
	lab.Must(t, err)
	defer flows.Close()
	ofFlows, err := flows.Info()
	lab.Must(t, err)
	id, _ := ofFlows.ID()

	return [2]uint32{idOf(t, l), uint32(id)}
}

// An agent finds out that the attached programs use other maps than its own.
func TestOtherMapsInUse(t *testing.T) {
	w := newWebWorld(t)
	mustWork := func(d *Datapath, want bool) {
		t.Helper()
		if others, err := d.OtherMapsInUse(); err != nil || others != want {
			t.Errorf("programs on other maps are at work: %t, %v, want %t", others, err, want)
		}
	}
	mustWork(w.mustOpen(t, w.cfg), false)
	lab.Must(t, os.RemoveAll(filepath.Join(w.cfg.BPFRoot, maps.Version)))
	next := w.mustOpen(t, w.cfg)
	mustWork(next, true)
	lab.Must(t, next.Attach())
	mustWork(next, false)
	lab.Must(t, Remove(w.cfg.BPFRoot))
	mustWork(w.mustOpen(t, w.cfg), false)
}

// A hook of an earlier build that this one does not have is detached.
func TestHookOfAnotherBuild(t *testing.T) {
	w := newWebWorld(t)
	dir := linkDir(w.cfg.BPFRoot)
	lab.Must(t, os.Rename(filepath.Join(dir, "sock_release"), filepath.Join(dir, "post_bind4")))
	lab.Must(t, w.Close())
	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	if _, err := os.Stat(filepath.Join(dir, "post_bind4")); !os.IsNotExist(err) {
		t.Errorf("the link is still there: %v", err)
	}
	if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCgroupInetSockRelease)); n != 1 {
		t.Errorf("%d programs at sock_release, want 1", n)
	}
}
