// Sluice-demo shows what Sluice does: it makes a node with pods on this
// machine, runs the real agent there, makes real connections and prints the
// results. What it prints was observed; where that is not as it should
// be, it ends with exit code 1. It leaves nothing behind, Ctrl-C or not.
//
// It is no test of Sluice, and no benchmark: see test/ and bench/ for those.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

const (
	exitFailed      = 1
	exitInterrupted = 128 + int(unix.SIGINT)
)

const headline = "Sluice: Kubernetes Services without kube-proxy"

// config is what the flags set.
type config struct {
	sluice string // the binary that is shown
	stay   bool
}

func main() {
	lab.Main()
	os.Exit(run())
}

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	// If the reader of a pipe ends, printing fails, and the process can still clean up.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)

	var cfg config
	flag.StringVar(&cfg.sluice, "sluice", besideMe("sluice"), "the sluice binary to show")
	flag.BoolVar(&cfg.stay, "stay", false, "keep everything running after the last scene, until Ctrl-C")
	flag.Parse()

	return show(ctx, cfg, newPrinter(os.Stdout))
}

// besideMe is the path of another file in the folder of this executable.
func besideMe(name string) string {
	me, err := os.Executable()
	if err != nil {
		return name
	}

	return filepath.Join(filepath.Dir(me), name)
}

// show is the demo from the first line to the last. It returns the exit code.
func show(ctx context.Context, cfg config, out *printer) int {
	begin := time.Now()
	if err := checkMachine(cfg.sluice); err != nil {
		return complain(err)
	}
	s := newStage(cfg, out)
	code, err := 0, play(ctx, s)
	played := time.Since(begin)
	switch {
	case err == nil:
	case interrupted(ctx, out):
		code = exitInterrupted
		out.heading("Interrupted")
	default:
		code = complain(err)
	}
	if err := s.close(); err != nil {
		return complain(fmt.Errorf("on cleaning up: %w", err))
	}
	out.gap()
	s.showRemoved()
	if code == 0 && !cfg.stay {
		out.seen("all of this took %s", short(played))
	}

	return code
}

// complain prints what went wrong, and returns the exit code.
func complain(err error) int {
	fmt.Fprintf(os.Stderr, "sluice-demo: %v\n", err)

	return exitFailed
}

// play builds the stage and plays every scene on it.
func play(ctx context.Context, s *stage) error {
	s.out.heading(headline)
	s.out.story("A Kubernetes Service is one address for many pods. Sluice leads connections from the one to the others, at the moment in which a program calls connect(). Here, a node and four pods are made out of network namespaces, the real agent follows a folder of manifests, and real connections are made. What stands after a ✓ was observed just now.")
	if err := s.build(ctx); err != nil {
		return err
	}
	for i, scene := range scenes() {
		s.out.heading(fmt.Sprintf("%d. %s", i+1, scene.title))
		s.out.story(scene.story)
		if err := scene.play(ctx, s); err != nil {
			return fmt.Errorf("scene %d, %s: %w%s", i+1, scene.title, err, s.agentLog())
		}
		if err := s.out.broken; err != nil {
			return err
		}
	}
	if s.cfg.stay {
		return s.stay(ctx)
	}
	s.showNext()

	return nil
}

// interrupted reports whether Ctrl-C caused an error. A terminal sends that to
// the agent and to the clients too: their end may reach us before the signal
// does.
func interrupted(ctx context.Context, out *printer) bool {
	if errors.Is(out.broken, unix.EPIPE) {
		return true // the reader of the output has gone
	}
	select {
	case <-ctx.Done():
		return true
	case <-time.After(100 * time.Millisecond):
		return false
	}
}

const bpffs = "/sys/fs/bpf"

// checkMachine returns an error that names what the machine lacks. `make demo` sees to
// most of it.
func checkMachine(binary string) error {
	if os.Geteuid() != 0 {
		return errors.New("only root may make network namespaces and load BPF programs: run it as root (sudo make demo)")
	}
	if info, err := os.Stat(binary); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("there is no program %s to show: `make demo` builds it, and -sluice takes another one", binary)
	}
	if _, err := lab.CgroupRoot(); err != nil {
		return fmt.Errorf("cgroup v2 is mounted nowhere, and its sockets are what Sluice attaches to: `make demo` mounts it, as does `mount -t cgroup2 none /sys/fs/cgroup` (%w)", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(bpffs, &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("there is no BPF file system at %s, and Sluice keeps its maps there: `make demo` mounts it, as does `mount -t bpf bpf %s`", bpffs, bpffs)
	}

	return nil
}
