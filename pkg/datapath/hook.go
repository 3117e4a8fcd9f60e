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
// force, and Attach can be called again. It waits for [Datapath.Loaded].
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
		d.links.trace(filepath.Join(dir, hook.Name), hook, programs.NotTraced)
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
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("link directory: %w", err)
	}
	for _, entry := range entries {
		ours := slices.ContainsFunc(slices.Concat(programs.Sock, programs.Trace), func(h bpf.Hook) bool { return h.Name == entry.Name() })
		if ours || entry.IsDir() { // see deviceDir
			continue
		}
		if err := removeLink(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("link of another build: %w", err)
		}
	}

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

	return nil
}

// removeLinks detaches all pinned hooks of sockets.
func removeLinks(bpfRoot string) error {
	entries, err := os.ReadDir(linkDir(bpfRoot))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	slices.SortStableFunc(entries, func(a, b fs.DirEntry) int { return removalOrder(a.Name(), b.Name()) })
	var errs []error
	for _, entry := range entries {
		if !entry.IsDir() { // see deviceDir
			errs = append(errs, removeLink(filepath.Join(linkDir(bpfRoot), entry.Name())))
		}
	}

	return errors.Join(errs...)
}

// removalOrder compares the names of hooks by the reverse of the order of Attach: tracepoints come last.
func removalOrder(a, b string) int {
	hooks := bpf.SockHooks()
	order := func(name string) int {
		if n := slices.IndexFunc(hooks, func(h bpf.Hook) bool { return h.Name == name }); n >= 0 {
			return n
		}

		return len(hooks)
	}

	return order(a) - order(b)
}

// OtherMapsInUse reports whether programs that an earlier agent attached are in force
// and use other maps: those of another layout, or maps whose pins were lost.
func (d *Datapath) OtherMapsInUse() (bool, error) {
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
		used, err := mapsOf(filepath.Join(linkDir(d.cfg.BPFRoot), hook.Name))
		if err != nil {
			return false, fmt.Errorf("hook %s: %w", hook.Name, err)
		}
		if !slices.Contains(used, ours) {
			return true, nil
		}
	}

	return false, nil
}

// mapsOf returns the maps that the program of a pinned link uses.
func mapsOf(pin string) ([]ebpf.MapID, error) {
	pinned, err := loadPinned(pin)
	if err != nil {
		return nil, err
	}
	defer pinned.Close()
	info, err := pinned.Info()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", info.Program, err)
	}
	defer program.Close()
	ofProgram, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", info.Program, err)
	}
	used, _ := ofProgram.MapIDs()

	return used, nil
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

// Hooks returns the state of our hooks at the cgroup root, by their pins. It needs no agent.
func Hooks(bpfRoot, cgroupRoot string) ([]HookState, error) {
	states, err := queryHooks(loadPinned, bpfRoot, cgroupRoot, false)
	if err != nil {
		return nil, err
	}
	for _, hook := range bpf.TraceHooks(bpf.Config{Handshakes: true}) {
		state := traceState(loadPinned, bpfRoot, hook)
		if state.Problem != errNoLink.Error() {
			states = append(states, state)
		}
	}

	return states, nil
}

// Hooks is [Hooks], including links that are open and not pinned.
func (d *Datapath) Hooks() ([]HookState, error) {
	states, err := queryHooks(d.links.get, d.cfg.BPFRoot, d.cfg.CgroupRoot, d.config.Resteer)
	if err != nil {
		return nil, err
	}
	for _, hook := range bpf.TraceHooks(d.config) {
		states = append(states, traceState(d.links.get, d.cfg.BPFRoot, hook))
	}

	return states, nil
}

// errNoLink is the problem of a hook to which nothing was attached.
var errNoLink = errors.New("not attached: there is no link")

// queryHooks returns the state of all hooks of the cgroup. It omits optional ones that are not
// attached, unless optional is set.
func queryHooks(get linkGetter, bpfRoot, cgroupRoot string, optional bool) ([]HookState, error) {
	cgroup, err := os.Open(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()

	var states []HookState
	for _, hook := range bpf.SockHooks() {
		state := HookState{Name: hook.Name}
		err := queryHook(get, filepath.Join(linkDir(bpfRoot), hook.Name), cgroup, hook)
		if errors.Is(err, errNoLink) && hook.Optional() && !optional {
			continue
		}
		if err != nil {
			state.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		states = append(states, state)
	}

	return states, nil
}

// traceState returns the state of a tracepoint. No other program can keep ours from running there.
func traceState(get linkGetter, bpfRoot string, hook bpf.Hook) HookState {
	l, err := get(filepath.Join(linkDir(bpfRoot), hook.Name))
	if errors.Is(err, fs.ErrNotExist) {
		err = errNoLink
	}
	if err != nil {
		return HookState{hook.Name, strings.ReplaceAll(err.Error(), "\n", "; ")}
	}
	_ = l.Close() // it was only read

	return HookState{Name: hook.Name}
}

func queryHook(get linkGetter, pin string, cgroup *os.File, hook bpf.Hook) error {
	l, err := get(pin)
	if errors.Is(err, fs.ErrNotExist) {
		return errNoLink
	}
	if err != nil {
		return err
	}
	defer l.Close()
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
	for _, program := range result.Programs {
		if program.ID == info.Program {
			return nil
		}
	}

	return fmt.Errorf("not effective on %s: there is a link, but its program does not run there", cgroup.Name())
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
