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

// HookState is one hook as the kernel has it.
type HookState struct {
	Name string `json:"name"`
	// Problem is empty when the program of this agent's pinned link runs.
	Problem string `json:"problem,omitempty"`
}

// Hooks asks the kernel which of our hooks are attached to the cgroup root.
// It works without an agent.
func Hooks(bpfRoot, cgroupRoot string) ([]HookState, error) {
	cgroup, err := os.Open(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()

	var states []HookState
	for _, hook := range bpf.SockHooks() {
		state := HookState{Name: hook.Name}
		if err := queryHook(filepath.Join(linkDir(bpfRoot), hook.Name), cgroup, hook); err != nil {
			state.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		states = append(states, state)
	}

	return states, nil
}

func queryHook(pin string, cgroup *os.File, hook bpf.Hook) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("not attached: there is no pinned link")
	}
	if err != nil {
		return fmt.Errorf("pinned link: %w", err)
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

	return fmt.Errorf("not effective on %s: the link is pinned, but its program does not run there", cgroup.Name())
}
