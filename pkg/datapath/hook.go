package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
)

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
	return queryHooks(loadPinned, bpfRoot, cgroupRoot, false)
}

// Hooks is [Hooks], including links that are open and not pinned.
func (d *Datapath) Hooks() ([]HookState, error) {
	return queryHooks(d.links.get, d.cfg.BPFRoot, d.cfg.CgroupRoot, d.cfg.CountBytes && !d.cfg.NoStats)
}

// errNoLink is the problem of a hook to which nothing was attached.
var errNoLink = errors.New("not attached: there is no link")

// queryHooks returns the state of all hooks. It omits optional ones that are not attached,
// unless optional is set.
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
