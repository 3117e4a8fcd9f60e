package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// Attach attaches every program of sockets to the cgroup root, or replaces, in one
// step, the one that an earlier agent attached. An optional one and one at a tracepoint may fail:
// [Datapath.Hooks] reports that. After an error, programs that were attached before are still in
// force, and Attach can be called again. Programs of other instances are detached, see [Datapath.TakenOver];
// that one cannot be ended is no error. It waits for [Datapath.Loaded].
func (d *Datapath) Attach() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}
	dir := linkDir(d.cfg.BPFRoot)
	cgroup, err := cgroupID(d.cfg.CgroupRoot)
	if err != nil {
		return err
	}
	// Tracepoints come first, to see all sockets that the hooks of the cgroup translate.
	for _, hook := range programs.Trace {
		d.links.trace(filepath.Join(traceDir(d.cfg.BPFRoot), hook.Name), hook, programs.NotTraced)
	}
	// The hooks that translate answers are attached before those that translate
	// requests, so that no socket sees the address of a backend.
	for _, hook := range slices.Backward(programs.Sock) {
		err := d.links.attach(filepath.Join(dir, hook.Name), hook.Program, func(l link.Link) bool {
			info, err := l.Info()

			return err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == cgroup
		}, func() (link.Link, error) {
			attached, err := link.AttachCgroup(link.CgroupOptions{
				Path: d.cfg.CgroupRoot, Attach: hook.Attach, Program: hook.Program,
			})
			if err != nil {
				return nil, fmt.Errorf("attach to %s: %w", d.cfg.CgroupRoot, err)
			}

			return attached, nil
		})
		if err != nil && !hook.Optional() {
			return fmt.Errorf("hook %s: %w", hook.Name, err)
		}
	}

	// Hooks of an earlier agent that are not among these are detached.
	among := func(hooks []bpf.Hook) func(name string) bool {
		return func(name string) bool {
			return slices.ContainsFunc(hooks, func(h bpf.Hook) bool { return h.Name == name })
		}
	}
	if err := errors.Join(removePinned(dir, nil, among(programs.Sock)), removePinned(traceDir(d.cfg.BPFRoot), nil, among(programs.Trace))); err != nil {
		return fmt.Errorf("hooks of another build: %w", err)
	}

	d.endOthers(isSock)
	if err := d.maps.CopyState(); err != nil {
		return err
	}

	// No program uses the maps of builds with another layout any more.
	others, err := maps.OtherFolders(d.cfg.BPFRoot)
	if err != nil {
		return err
	}
	for _, dir := range others {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("maps of another version: %w", err)
		}
	}
	d.hooked.Store(true)

	return nil
}

// isSock reports whether links of this type are those of hooks of sockets.
func isSock(kind link.Type) bool { return kind == link.CgroupType }

// removalOrder are the names of hooks in the order in which they are detached, the reverse of that of Attach.
// Tracepoints, which are not among them, come last.
func removalOrder() []string {
	var names []string
	for _, hook := range bpf.SockHooks() {
		names = append(names, hook.Name)
	}

	return names
}

// OtherMapsInUse reports whether programs that an earlier agent attached are in force
// and use other maps: those of another layout, or of another instance, or maps whose pins were lost. Instances that are left
// alone do not count: nothing of theirs is replaced.
func (d *Datapath) OtherMapsInUse() (bool, error) {
	others, err := d.Others()
	others = slices.DeleteFunc(others, func(o Other) bool { return o.BPFRoot == "" && len(o.Links) > 0 })
	if err != nil || len(others) > 0 {
		return len(others) > 0, err
	}
	hooks, err := Hooks(d.cfg.BPFRoot, d.cfg.CgroupRoot)
	if err != nil {
		return false, err
	}
	ours, err := d.maps.ID(maps.NameFrontends)
	if err != nil {
		return false, err
	}
	for _, hook := range hooks {
		// These use the map of frontends in every build.
		looksUp := strings.HasPrefix(hook.Name, "connect") || strings.HasPrefix(hook.Name, "sendmsg")
		if hook.Problem != "" || !looksUp {
			continue
		}
		program, err := programOf(filepath.Join(linkDir(d.cfg.BPFRoot), hook.Name))
		if err != nil {
			return false, fmt.Errorf("hook %s: %w", hook.Name, err)
		}
		info, err := program.Info()
		if err := errors.Join(err, program.Close()); err != nil {
			return false, fmt.Errorf("hook %s: program: %w", hook.Name, err)
		}
		if used, _ := info.MapIDs(); !slices.Contains(used, ours) {
			return true, nil
		}
	}

	return false, nil
}

// mapsInUse returns the maps of the programs whose links are pinned below a bpf root.
func mapsInUse(bpfRoot string) ([]ebpf.MapID, error) {
	links, err := pinnedLinks(bpfRoot)
	if err != nil {
		return nil, err
	}
	var inUse []ebpf.MapID
	seen := make(map[ebpf.ProgramID]bool)
	for _, id := range links {
		l, err := link.NewFromID(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("link %d: %w", id, err)
		}
		of, err := l.Info()
		if err := errors.Join(err, l.Close()); err != nil {
			return nil, fmt.Errorf("link %d: %w", id, err)
		}
		if seen[of.Program] {
			continue
		}
		seen[of.Program] = true
		program, err := ebpf.NewProgramFromID(of.Program)
		if err != nil {
			return nil, fmt.Errorf("program of link %d: %w", id, err)
		}
		info, err := program.Info()
		if err := errors.Join(err, program.Close()); err != nil {
			return nil, fmt.Errorf("program of link %d: %w", id, err)
		}
		ids, _ := info.MapIDs()
		inUse = append(inUse, ids...)
	}

	return inUse, nil
}

// HookState is the state of one hook in the kernel.
type HookState struct {
	Name string `json:"name"`
	// Problem is empty if the program of our link runs.
	Problem string `json:"problem,omitempty"`
}

// linkGetter returns the link that belongs to a pin. The error wraps [fs.ErrNotExist]
// if there is none. The caller closes it.
type linkGetter func(pin string) (link.Link, error)

// Hooks returns the state of our hooks, by their pins. It needs no agent. Those without which Services work are
// omitted if nothing was attached to them.
func Hooks(bpfRoot, cgroupRoot string) ([]HookState, error) {
	trace := bpf.TraceHooks(bpf.Config{Handshakes: true})

	return queryHooks(loadPinned, bpfRoot, cgroupRoot, trace, func(h bpf.Hook) bool { return h.Optional() || slices.Contains(trace, h) })
}

// Hooks is [Hooks], including links that are open and not pinned, and all hooks of the configuration.
func (d *Datapath) Hooks() ([]HookState, error) {
	omit := func(h bpf.Hook) bool { return h.Optional() && !d.config.Resteer }

	return queryHooks(d.links.get, d.cfg.BPFRoot, d.cfg.CgroupRoot, bpf.TraceHooks(d.config), omit)
}

// errNoLink is the problem of a hook to which nothing was attached.
var errNoLink = errors.New("not attached: there is no link")

// queryHooks returns the state of all hooks of the cgroup, and of these tracepoints, except those to omit if nothing
// was attached to them.
func queryHooks(get linkGetter, bpfRoot, cgroupRoot string, trace []bpf.Hook, omit func(bpf.Hook) bool) ([]HookState, error) {
	cgroup, err := os.Open(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()

	var states []HookState
	for i, hook := range slices.Concat(bpf.SockHooks(), trace) {
		state := HookState{Name: hook.Name}
		dir, isSock := linkDir(bpfRoot), i < len(bpf.SockHooks())
		if !isSock {
			dir = traceDir(bpfRoot)
		}
		l, err := get(filepath.Join(dir, hook.Name))
		if err == nil {
			if isSock { // no other program can keep ours from running at a tracepoint
				err = isEffective(l, cgroup, hook)
			}
			_ = l.Close() // it was only read
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = errNoLink
		}
		if errors.Is(err, errNoLink) && omit(hook) {
			continue
		}
		if err != nil {
			state.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		states = append(states, state)
	}

	return states, nil
}

// isEffective returns an error unless the program of a link runs for sockets in a cgroup.
func isEffective(l link.Link, cgroup *os.File, hook bpf.Hook) error {
	info, err := l.Info()
	if err != nil {
		return fmt.Errorf("link: %w", err)
	}
	result, err := link.QueryPrograms(link.QueryOptions{
		Target: int(cgroup.Fd()), Attach: hook.Attach, QueryFlags: unix.BPF_F_QUERY_EFFECTIVE,
	})
	if err != nil {
		return fmt.Errorf("query: %w", err)
	}
	if !slices.ContainsFunc(result.Programs, func(p link.AttachedProgram) bool { return p.ID == info.Program }) {
		return fmt.Errorf("not effective on %s: there is a link, but its program does not run there", cgroup.Name())
	}

	return nil
}

// AttachedToSockets returns the program that runs when a socket connects, by the pin of its link.
// The error wraps [fs.ErrNotExist] if there is none. The caller closes it.
func AttachedToSockets(bpfRoot string) (*ebpf.Program, error) {
	return programOf(filepath.Join(linkDir(bpfRoot), bpf.SockHooks()[0].Name))
}

// programOf returns the program of a pinned link.
func programOf(pin string) (*ebpf.Program, error) {
	l, err := loadPinned(pin)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	program, err := ebpf.NewProgramFromID(info.Program)

	return program, wrap("program of the link", err)
}
