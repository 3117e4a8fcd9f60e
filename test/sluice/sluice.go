// Package sluice runs the real binary, for tests and for the demo: agents in
// namespaces and cgroups of the lab, and the other verbs against them.
package sluice

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// Build builds the binary with a version of its own into dir, and returns its
// path. The binary appears there at once and complete: tests of other packages
// may build and run the same one.
func Build(dir, version string) (string, error) { return build(dir, version, "") }

// BuildOtherLayout builds one to which the maps of all others are of another layout, those
// of the agent (in the folder v3x) and those of programs (in state-v2x).
func BuildOtherLayout(dir string) (string, error) {
	const maps = "github.com/sluice-lb/sluice/maps."

	return build(dir, "other-layout", " -X "+maps+"Version=v3x -X "+maps+"StateVersion=state-v2x")
}

// BuildOldSweep builds one that ends what it does not know among the pinned links as builds do that know no tracepoints: a
// link that cannot be detached keeps it from being done, and it does not look where those of tracepoints are. It has to
// run with OldSweepArgs.
func BuildOldSweep(dir string) (string, error) {
	root, err := moduleFolder()
	if err != nil {
		return "", err
	}
	replaced := make(map[string]string)
	for file, text := range map[string]string{
		"links.go": ` && !errors.Is(err, link.ErrNotSupported)`,
		"hook.go":  `, removePinned(traceDir(d.cfg.BPFRoot), nil, among(programs.Trace))`,
	} {
		source := filepath.Join(root, "pkg/datapath", file)
		today, err := os.ReadFile(source)
		if err != nil {
			return "", err
		}
		old := strings.Replace(string(today), text, "", 1)
		if old == string(today) {
			return "", fmt.Errorf("%s has no %q any more", source, text)
		}
		replaced[source] = filepath.Join(dir, file)
		if err := os.WriteFile(replaced[source], []byte(old), 0o600); err != nil {
			return "", err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		return "", err
	}
	of := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(of, overlay, 0o600); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "sluice-old-sweep")

	return path, buildIn(root, "old-sweep", "", path, "-overlay", of)
}

// OldSweepArgs are the flags with which an agent has no programs at tracepoints.
var OldSweepArgs = []string{"--heal=off", "--handshake-metrics=false"}

// moduleFolder returns the folder of the product's own module: that of the caller may be bench's.
func moduleFolder() (string, error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/sluice-lb/sluice").Output()
	if err != nil {
		return "", fmt.Errorf("folder of the module: %w", err)
	}

	return strings.TrimSpace(string(root)), nil
}

// buildIn builds the binary of the sources in a folder. Flags are the linker's.
func buildIn(root, version, flags, path string, more ...string) error {
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X main.version=" + version + flags, "-o", path}, more...)
	cmd := exec.Command("go", append(args, "github.com/sluice-lb/sluice/cmd/sluice")...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build of sluice: %w: %s", err, out)
	}

	return nil
}

func build(dir, version, flags string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("folder of binaries: %w", err)
	}
	aside, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", fmt.Errorf("folder of binaries: %w", err)
	}
	defer os.RemoveAll(aside)
	root, err := moduleFolder()
	if err != nil {
		return "", err
	}
	name := "sluice-" + version
	if err := buildIn(root, version, flags, filepath.Join(aside, name)); err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)

	return path, os.Rename(filepath.Join(aside, name), path)
}

// Config is where a node's Sluice has its files and hooks, and where Services come from.
type Config struct {
	Binary    string         // see [Build]
	Namespace *lab.Namespace // the node's
	Cgroup    *lab.Cgroup    // what the agent attaches to; the agent itself is not in it
	NodeName  string

	// One of these is where Services come from.
	Manifests  string
	Kubeconfig string

	// Production leaves the agent its own defaults. Otherwise it gets what suits
	// many agents on one machine: small tables of flows.
	Production bool
	// Log is what the agent writes its log to, a file, so that it is the agent itself which does; nil: see
	// [Node.Log].
	Log *os.File
	// Args are more flags of `sluice agent`, which win over all others.
	Args []string
}

// Node is one node's Sluice: places for pins and a socket of its own, and an
// agent while one is started.
type Node struct {
	cfg     Config
	bpfRoot string
	dir     string
	cgroup  *lab.Cgroup // the agent's own, so that it ends with the test also if that is killed
	log     lab.Log
	running *exec.Cmd
	done    chan error
}

// NewNode makes the folders and the cgroup, and starts nothing. The caller closes it.
func NewNode(cfg Config) (*Node, error) {
	if err := mountBPFFS(); err != nil {
		return nil, err
	}
	sweep()
	dir, err := os.MkdirTemp("", fmt.Sprintf(nodePattern, os.Getpid(), "*"))
	if err != nil {
		return nil, fmt.Errorf("folder of the node: %w", err)
	}
	cgroup, err := lab.NewCgroup("agent")
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}

	return &Node{
		cfg:     cfg,
		bpfRoot: filepath.Join(bpffs, filepath.Base(dir)),
		dir:     dir,
		cgroup:  cgroup,
	}, nil
}

func mountBPFFS() error {
	var stat unix.Statfs_t
	if err := unix.Statfs(bpffs, &stat); err != nil {
		return fmt.Errorf("%s: %w", bpffs, err)
	}
	if stat.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount of %s: %w", bpffs, err)
	}

	return nil
}

// BPFRoot is where the node's maps and links are pinned.
func (n *Node) BPFRoot() string { return n.bpfRoot }

// AgentCgroup is the cgroup of the agent and of other verbs, and of no other process.
func (n *Node) AgentCgroup() *lab.Cgroup { return n.cgroup }

// Socket is where the node's agent answers.
func (n *Node) Socket() string { return filepath.Join(n.dir, "agent.sock") }

// Client returns a client of the agent's socket.
func (n *Node) Client() *status.Client { return status.NewClient(n.Socket()) }

// Binary is what Start and Run start; another one may be set while no agent runs.
func (n *Node) Binary() string { return n.cfg.Binary }

// SetBinary sets the binary of the next agent, as an upgrade does.
func (n *Node) SetBinary(path string) { n.cfg.Binary = path }

// SetArgs sets the further flags of the next agent, see [Config].
func (n *Node) SetArgs(args ...string) { n.cfg.Args = args }

// Places are the flags by which verbs find the node's agent and pins.
func (n *Node) Places() []string {
	return []string{
		"--bpf-root", n.bpfRoot,
		"--cgroup-root", n.cfg.Cgroup.Path(),
		"--socket", n.Socket(),
	}
}

// Start starts the agent in the node's namespace and returns at once.
func (n *Node) Start() error {
	args := append(n.Places(), "agent", "--hostname-override", n.cfg.NodeName)
	if !n.cfg.Production {
		args = append(args, "--flow-table-memory", "4Mi") // the last of several counts
	}
	if n.cfg.Manifests != "" {
		args = append(args, "--manifests", n.cfg.Manifests)
	}
	if n.cfg.Kubeconfig != "" {
		args = append(args, "--kubeconfig", n.cfg.Kubeconfig)
	}
	cmd := exec.Command(n.cfg.Binary, append(args, n.cfg.Args...)...)
	cmd.Stdout, cmd.Stderr = &n.log, &n.log
	if n.cfg.Log != nil {
		cmd.Stdout, cmd.Stderr = n.cfg.Log, n.cfg.Log
	}
	if err := lab.Start(n.cfg.Namespace, n.cgroup, cmd); err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	n.running, n.done = cmd, make(chan error, 1)
	go func(done chan<- error) { done <- cmd.Wait() }(n.done)

	return nil
}

// Log returns what agents of this node have printed.
func (n *Node) Log() string { return n.log.String() }

// PID is the agent's process, or zero.
func (n *Node) PID() int {
	if n.running == nil {
		return 0
	}

	return n.running.Process.Pid
}

// Kill ends the agent with SIGKILL and waits for its end.
func (n *Node) Kill() error { return n.end(unix.SIGKILL) }

// Stop ends the agent with SIGTERM and waits for its end.
func (n *Node) Stop() error { return n.end(unix.SIGTERM) }

func (n *Node) end(signal unix.Signal) error {
	if n.running == nil {
		return nil
	}
	if err := n.running.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("agent: %w", err)
	}
	err := <-n.done
	n.running = nil
	if signal == unix.SIGTERM && err != nil {
		return fmt.Errorf("agent: %w: %s", err, n.Log())
	}

	return nil
}

// Run runs another verb, in the node's namespace, and returns what it printed.
// The error of one that fails includes what it printed.
func (n *Node) Run(verb ...string) (string, error) {
	return lab.Output(n.cfg.Namespace, n.cgroup, n.cfg.Binary, append(n.Places(), verb...)...)
}

// Exec is Run with two outputs and the plain error of the process. The verb's own
// flags come after those of the node's places, and override them.
func (n *Node) Exec(stdout, stderr io.Writer, verb ...string) error {
	cmd := exec.Command(n.cfg.Binary, append(n.Places(), verb...)...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := lab.Start(n.cfg.Namespace, n.cgroup, cmd); err != nil {
		return err
	}

	return cmd.Wait()
}

// Status runs `sluice status`, whatever its exit code.
func (n *Node) Status() (status.Status, error) {
	var stdout, stderr bytes.Buffer
	err := n.Exec(&stdout, &stderr, "status", "-o", "json")
	var status status.Status
	if jsonErr := json.Unmarshal(stdout.Bytes(), &status); jsonErr != nil {
		return status, errors.Join(fmt.Errorf("sluice status: %w: %s", jsonErr, &stderr), err)
	}

	return status, nil
}

// Services runs `sluice services`.
func (n *Node) Services() ([]status.Service, error) {
	out, err := n.Run("services", "-o", "json")
	if err != nil {
		return nil, err
	}
	var services []status.Service
	if err := json.Unmarshal([]byte(out), &services); err != nil {
		return nil, fmt.Errorf("sluice services: %w", err)
	}

	return services, nil
}

// Wait waits until [status.Status.Well], or until ctx ends.
func (n *Node) Wait(ctx context.Context) error {
	return n.wait(ctx, status.Status.Well)
}

// WaitSynced waits until the agent is synced, see [Synced], or ctx ends.
func (n *Node) WaitSynced(ctx context.Context) error {
	return n.wait(ctx, Synced)
}

// Synced reports whether an agent has programmed what it could, checked its hooks, and
// attached to devices.
func Synced(s status.Status) bool {
	unattached := slices.ContainsFunc(s.Devices, func(d datapath.DeviceState) bool { return d.Problem != "" })

	return s.Synced && s.Effective == "" && !unattached
}

func (n *Node) wait(ctx context.Context, well func(status.Status) bool) error {
	client := n.Client()
	var last error
	for {
		status, err := client.Status(ctx)
		if err == nil && well(status) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("agent is not well: synced %t, effective %q, errors %v, devices %+v",
				status.Synced, status.Effective, status.Errors, status.Devices)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w; it printed: %s", ctx.Err(), last, strings.TrimSpace(n.Log()))
		case end := <-n.done:
			n.done <- end

			return fmt.Errorf("agent ended: %w: %s", end, strings.TrimSpace(n.Log()))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Close ends the agent, detaches everything and removes the places.
func (n *Node) Close() error {
	remove := func() error { return datapath.Remove(n.bpfRoot) }

	return errors.Join(n.Kill(), n.cgroup.Close(), n.cfg.Namespace.Do(remove), os.RemoveAll(n.dir))
}

const bpffs = "/sys/fs/bpf"

// nodePattern names a node's folder and its pins after the process that made
// them.
const nodePattern = "sluice-node-%d-%s"

// sweep removes what processes that died have left pinned. Their agents went
// with their cgroups, see [lab.Sweep].
var sweep = sync.OnceFunc(func() {
	owned := strings.TrimSuffix(nodePattern, "-%s")
	for _, parent := range []string{bpffs, os.TempDir()} {
		left, _ := filepath.Glob(filepath.Join(parent, "sluice-node-*"))
		for _, path := range left {
			var owner int
			_, err := fmt.Sscanf(filepath.Base(path), owned, &owner)
			if err == nil && unix.Kill(owner, 0) == unix.ESRCH {
				// What a test has pinned among the links is none of them. The next run tries again.
				_ = errors.Join(datapath.Remove(path), os.RemoveAll(path))
			}
		}
	}
})
