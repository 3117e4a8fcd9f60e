package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// elsewhere returns the configuration of the world with another bpf root.
func (w *world) elsewhere(t testing.TB) Config {
	t.Helper()
	cfg := w.cfg
	cfg.BPFRoot = lab.MustBPFRoot(t)
	t.Cleanup(func() { lab.Must(t, Remove(cfg.BPFRoot)) })

	return cfg
}

// mustBeInCharge fails the test unless the programs of d are the only ones of Sluice in its cgroup, and prove it.
func mustBeInCharge(t *testing.T, d *Datapath) {
	t.Helper()
	if n := len(effective(t, d.cfg.CgroupRoot, ebpf.AttachCGroupInet4Connect)); n != 1 {
		t.Errorf("%d programs at connect4, want 1", n)
	}
	if err := d.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	if others, err := d.Others(); err != nil || len(others) > 0 {
		t.Errorf("others are %v, %v, want none", others, err)
	}
}

// An agent that gets another bpf root takes over the maps of the one before, which ended: what is programmed stays in
// force, with the same links and ids, and nothing is left at the other place.
func TestAnotherBPFRoot(t *testing.T) {
	w := newWebWorld(t)
	w.addProbe(t)
	before := mustLinkID(t, w, "connect4")
	old := w.cfg.BPFRoot
	lab.Must(t, w.Close())

	w.cfg = w.elsewhere(t)
	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	mustBeInCharge(t, w.Datapath)
	if _, err := w.pod(t).Request("tcp4", webVIP); err != nil {
		t.Errorf("what was programmed: %v", err)
	}
	if after := mustLinkID(t, w, "connect4"); after != before {
		t.Errorf("link %d, want %d with its program replaced", after, before)
	}
	if _, err := os.Stat(old); !os.IsNotExist(err) {
		t.Errorf("the former bpf root is still there: %v", err)
	}
	if taken := w.TakenOver(); len(taken) != 1 || !strings.Contains(taken[0], old) || !strings.Contains(taken[0], "connect4") {
		t.Errorf("taken over is %q, want what was below %s", taken, old)
	}
}

// An agent that was killed while it moved pins leaves the links where they were, and the next one moves the rest.
func TestMovingPinsIsInterrupted(t *testing.T) {
	w := newWebWorld(t)
	old := w.cfg.BPFRoot
	lab.Must(t, w.Close())
	w.cfg = w.elsewhere(t)
	lab.Must(t, os.MkdirAll(w.cfg.BPFRoot, 0o700))
	for _, folder := range []string{maps.Version, maps.StateVersion} {
		lab.Must(t, os.Rename(filepath.Join(old, folder), filepath.Join(w.cfg.BPFRoot, folder)))
	}
	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	if _, err := w.pod(t).Request("tcp4", webVIP); err != nil {
		t.Errorf("what was programmed: %v", err)
	}
}

// Programs of another instance that run in front of ours are no proof that ours are in charge. They are detached as soon
// as no agent keeps their maps, and until then named, with where they are pinned.
func TestAnotherInstanceIsInCharge(t *testing.T) {
	w := buildWorld(t)
	ours := w.mustOpen(t, w.elsewhere(t)) // before the other one attaches
	w.Datapath = w.mustOpen(t, w.cfg)
	w.mustAttach(t)
	w.add(t, service{proto: "tcp", at: []string{webVIP}, to: w.all4()[:1]})
	w.addProbe(t)

	lock, err := LockMaps(w.cfg.BPFRoot)
	lab.Must(t, err)
	if _, err := Open(w.elsewhere(t)); !errors.Is(err, ErrRunning) {
		t.Errorf("a third instance beside an agent: %v, want %v", err, ErrRunning)
	}
	for range 2 {
		lab.Must(t, ours.Attach())
	}
	if noted := ours.TakenOver(); len(noted) != 1 || !strings.HasPrefix(noted[0], "not ended: ") || !strings.Contains(noted[0], w.cfg.BPFRoot) {
		t.Errorf("beside an agent, attaching notes %q, want once that those below %s are not ended", noted, w.cfg.BPFRoot)
	}
	next := world{Datapath: ours, cfg: ours.cfg}
	next.addProbe(t)
	if err := ours.Verify(t.Context()); !errors.Is(err, ErrNotEffective) || !strings.Contains(err.Error(), "another instance") {
		t.Errorf("behind another instance: %v, want %v", err, ErrNotEffective)
	}
	others, err := Others(ours.cfg.BPFRoot, ours.cfg.CgroupRoot)
	if err != nil || len(others) != 1 || others[0].BPFRoot != w.cfg.BPFRoot || !slices.Contains(others[0].Hooks, "connect4") {
		t.Errorf("others are %v, %v, want those below %s", others, err, w.cfg.BPFRoot)
	}
	if taken, err := inheritRoot(ours.cfg.BPFRoot, ours.cfg.CgroupRoot); err != nil || len(taken) > 0 {
		t.Errorf("beside an agent, with programs of its own in force, an agent takes over %q: %v", taken, err)
	}

	lab.Must(t, lock.Release())
	lab.Must(t, ours.Attach())
	mustBeInCharge(t, ours)
	if taken := ours.TakenOver(); len(taken) != 1 || !strings.Contains(taken[0], "detached") {
		t.Errorf("taken over is %q", taken)
	}
	if folders, err := maps.Folders(w.cfg.BPFRoot); err != nil || len(folders) > 0 {
		t.Errorf("of the other instance, %v is left, %v", folders, err)
	}
}

// An instance at a cgroup above or below acts on the same processes. It is found, and named with the place; an agent
// starts beside one that runs only if its own programs are in force, and ends one without an agent. One at a cgroup beside
// is none of its concern.
func TestAnotherInstanceAtAnotherCgroup(t *testing.T) {
	for name, test := range map[string]struct {
		theirs, ours func(outer, inner *lab.Cgroup) *lab.Cgroup
		hook         func(ours, theirs string) string
	}{
		"above": {
			theirs: func(outer, _ *lab.Cgroup) *lab.Cgroup { return outer },
			ours:   func(_, inner *lab.Cgroup) *lab.Cgroup { return inner },
			hook:   func(ours, _ string) string { return "connect4 above " + ours },
		},
		"below": {
			theirs: func(_, inner *lab.Cgroup) *lab.Cgroup { return inner },
			ours:   func(outer, _ *lab.Cgroup) *lab.Cgroup { return outer },
			hook:   func(_, theirs string) string { return "connect4 of " + theirs },
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := buildWorld(t)
			middle, err := w.cgroup.Child("middle")
			lab.Must(t, err)
			inner, err := middle.Child("inner")
			lab.Must(t, err)
			beside, err := w.cgroup.Child("beside")
			lab.Must(t, err)
			client := lab.MustCaller(t, w.client.Namespace, inner)

			besideCfg := w.elsewhere(t)
			besideCfg.CgroupRoot = beside.Path()
			theirs := test.theirs(middle, inner)
			w.cfg.CgroupRoot = theirs.Path()
			next := *w
			next.cfg, next.cgroup = w.elsewhere(t), test.ours(middle, inner)
			next.cfg.CgroupRoot = next.cgroup.Path()
			next.Datapath = next.mustOpen(t, next.cfg) // before the others attach
			lab.Must(t, w.mustOpen(t, besideCfg).Attach())
			w.Datapath = w.mustOpen(t, w.cfg)
			w.mustAttach(t)
			w.add(t, service{proto: "tcp", at: []string{webVIP}, to: w.all4()[:1]})
			lock, err := LockMaps(w.cfg.BPFRoot)
			lab.Must(t, err)

			third := next.elsewhere(t)
			if _, err := Open(third); !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), w.cfg.BPFRoot) {
				t.Errorf("with nothing of its own in force, an agent starts: %v, want %v that names %s", err, ErrRunning, w.cfg.BPFRoot)
			}
			next.mustAttach(t)
			hook := test.hook(next.cfg.CgroupRoot, theirs.Path())
			others, err := next.Others()
			if err != nil || len(others) != 1 || others[0].BPFRoot != w.cfg.BPFRoot || !slices.Contains(others[0].Hooks, hook) {
				t.Errorf("others are %v, %v, want those below %s at %q", others, err, w.cfg.BPFRoot, hook)
			}
			if noted := next.TakenOver(); len(noted) != 1 || !strings.HasPrefix(noted[0], "not ended: ") || !strings.Contains(noted[0], hook) {
				t.Errorf("beside an agent, attaching notes %q, want that those at %q are not ended", noted, hook)
			}
			if reply, err := client.Request("tcp4", webVIP); err != nil || !strings.HasPrefix(reply.Text, colours[0]+" ") {
				t.Errorf("at a Service of the other one alone: %+v, %v, want %s", reply, err, colours[0])
			}

			lab.Must(t, lock.Release())
			next.mustAttach(t)
			if others, err := next.Others(); err != nil || len(others) > 0 {
				t.Errorf("others are %v, %v, want none", others, err)
			}
			if taken := next.TakenOver(); len(taken) != 1 || !strings.HasPrefix(taken[0], "detached ") || !strings.Contains(taken[0], hook) {
				t.Errorf("taken over is %q, want those at %q", taken, hook)
			}
			if reply, err := client.Request("tcp4", webVIP); err == nil {
				t.Errorf("a Service of the instance that has ended leads to %+v", reply)
			}
			if n := len(effective(t, beside.Path(), ebpf.AttachCGroupInet4Connect)); n != 1 {
				t.Errorf("%d programs at the cgroup beside, want its own", n)
			}
		})
	}
}

// Another instance whose pins are not found here is alive: a process holds its links, or a bpffs of another container has
// their pins. It is found, told once, and left attached.
func TestAnotherInstanceWithoutPins(t *testing.T) {
	w := newWebWorld(t)
	lab.Must(t, os.RemoveAll(linkDir(w.cfg.BPFRoot))) // its links stay open
	next := world{cfg: w.elsewhere(t), node: w.node}
	next.Datapath = next.mustOpen(t, next.cfg)
	if waits, err := next.OtherMapsInUse(); err != nil || waits {
		t.Errorf("ours wait for every Service: %t, %v, though nothing of the other one is replaced", waits, err)
	}
	for range 2 {
		next.mustAttach(t)
	}
	if others, err := next.Others(); err != nil || len(others) != 1 || others[0].BPFRoot != "" {
		t.Errorf("others are %v, %v, want those without pins", others, err)
	}
	if n := len(effective(t, w.cfg.CgroupRoot, ebpf.AttachCGroupInet4Connect)); n != 2 {
		t.Errorf("%d programs at connect4, want the other one and ours", n)
	}
	if noted := next.TakenOver(); len(noted) != 1 || !strings.HasPrefix(noted[0], "left attached: ") {
		t.Errorf("noted is %q, want once what is left attached", noted)
	}
}

// At a device, an agent takes over the programs of another instance that has ended, and leaves those at a device of
// another network namespace, which may have the same number.
func TestAnotherInstanceAtDevices(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		other := newPort(t, by)
		other.attach(other.device())
		lab.Must(t, p.Close())

		before := p.cfg.BPFRoot
		p.moveElsewhere()
		lab.MustDo(t, p.node, func() error {
			others, err := Others(p.cfg.BPFRoot, p.cfg.CgroupRoot)
			if len(others) != 1 || others[0].BPFRoot != before || !slices.Equal(others[0].Hooks, []string{"eth0 egress", "eth0 ingress"}) {
				t.Errorf("others are %v, want those below %s at eth0", others, before)
			}

			return err
		})
		p.open(by)
		p.attach(p.device())
		p.wantState("eth0", by, "")
		p.wantPrograms(1)
		other.wantState("eth0", by, "")
	})
}

// The programs at devices of an instance whose agent runs stay, whatever another agent or a cleanup does. The other
// agent names it, and takes its place when it has ended.
func TestAnotherInstanceKeepsItsDevices(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		eachAttachment(t, func(t *testing.T, nextBy Attachment) {
			p := newPort(t, by)
			next := *p // before p attaches
			next.ours = nil
			next.moveElsewhere()
			next.open(nextBy)
			p.attach(p.device())
			lock, err := LockMaps(p.cfg.BPFRoot)
			lab.Must(t, err)

			for range 2 {
				failed := next.tryAttach(next.device())[p.index]
				if by == Clsact && nextBy == Clsact && (!errors.Is(failed, ErrRunning) || !strings.Contains(failed.Error(), p.cfg.BPFRoot)) {
					t.Errorf("beside an agent: %v, want %v that names %s", failed, ErrRunning, p.cfg.BPFRoot)
				}
				next.tryAttach()
			}
			if noted := next.TakenOver(); len(noted) != 1 || !strings.HasPrefix(noted[0], "not ended: ") || !strings.Contains(noted[0], p.cfg.BPFRoot) {
				t.Errorf("beside an agent, attaching notes %q, want once that those below %s are not ended", noted, p.cfg.BPFRoot)
			}
			lab.MustDo(t, p.node, func() error { return Remove(lab.MustBPFRoot(t)) })
			p.wantState("eth0", by, "")
			p.wantCounts(true, p.ours[0].ingress, p.ours[0].egress)

			lab.Must(t, lock.Release())
			next.attach(next.device())
			next.wantPrograms(1)
			next.wantCounts(true, next.ours[0].ingress, next.ours[0].egress)
			if taken := next.TakenOver(); len(taken) != 1 || !strings.HasPrefix(taken[0], "detached ") || !strings.Contains(taken[0], p.cfg.BPFRoot) {
				t.Errorf("taken over is %q", taken)
			}
			if folders, err := maps.Folders(p.cfg.BPFRoot); err != nil || len(folders) > 0 {
				t.Errorf("of the other instance, %v is left, %v", folders, err)
			}
		})
	})
}

// moveElsewhere gives the next agent another bpf root and another cgroup.
func (p *port) moveElsewhere() {
	p.t.Helper()
	root := lab.MustBPFRoot(p.t)
	p.cfg.BPFRoot, p.cfg.CgroupRoot = root, lab.MustCgroup(p.t, "next").Path()
	p.t.Cleanup(func() { lab.MustDo(p.t, p.node, func() error { return Remove(root) }) })
}

// wantPrograms fails the test unless so many programs of Sluice are at each hook of the port.
func (p *port) wantPrograms(want int) {
	p.t.Helper()
	lab.MustDo(p.t, p.node, func() error {
		for _, hook := range deviceHooks() {
			if n := programsAt(p.t, p.index, hook, p.cfg.Attachment); n != want {
				p.t.Errorf("%d programs at %s, want %d", n, hook.name, want)
			}
		}

		return nil
	})
}
