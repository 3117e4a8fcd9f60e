package lab

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Sweep removes the namespaces, cgroups and pins, and ends the processes in those
// cgroups, that dead runs have left behind. The lab calls it once when it makes
// its first namespace, cgroup or place for pins.
func Sweep() error { return sweep(isGone) }

// sweep removes what belongs to owners that are gone.
func sweep(gone func(pid int) bool) error {
	err := errors.Join(
		sweepDir(netnsDir, gone, func(path string) error { return removeNetns(filepath.Base(path)) }),
		sweepDir(bpffs, gone, os.RemoveAll),
	)
	root, notMounted := CgroupRoot()
	if notMounted != nil {
		return errors.Join(err, notMounted)
	}
	roots := []string{root}
	if filepath.Base(root) == "unified" { // beside it are the hierarchies of v1, where a cluster's nodes have cgroups of the same names
		roots, _ = filepath.Glob(filepath.Join(filepath.Dir(root), "*"))
	}
	for _, root := range roots {
		err = errors.Join(err, sweepDir(root, gone, removeCgroup))
	}

	return err
}

func sweepDir(dir string, gone func(pid int) bool, remove func(path string) error) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = nil
	for _, entry := range entries {
		if owner, ours := ownerOf(entry.Name()); ours && gone(owner) {
			err = errors.Join(err, remove(filepath.Join(dir, entry.Name())))
		}
	}

	return err
}

// prepare runs before the first thing is made. Neither part is worth failing
// for: what is left behind does no harm, and the next run tries again.
var prepare = sync.OnceFunc(func() {
	_ = Sweep()
	if mainCalled.Load() {
		_ = startGuardian()
	}
})

// startGuardian starts the process that cleans up should this one die without
// doing so: a panic, a test that timed out, Ctrl-C. It notices the death by
// the end of its standard input, and outlives signals to our process group.
func startGuardian() error {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	// The kernel closes our end of the pipe, pipe[1].
	stdin := os.NewFile(uintptr(pipe[0]), "guardian")
	cmd := again(roleGuardian, strconv.Itoa(os.Getpid()))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Stdin = stdin

	return errors.Join(cmd.Start(), stdin.Close())
}

// guard waits for the end of the process that args name, our parent, and cleans
// up after it.
func guard(stdin io.Reader, args []string) error {
	if len(args) != 1 {
		return errors.New("guardian: want one argument, the process to look after")
	}
	parent, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("guardian: %w", err)
	}
	if _, err := io.Copy(io.Discard, stdin); err != nil {
		return fmt.Errorf("guardian: %w", err)
	}
	// A dying process closes its files a moment before its children see another
	// parent; until then it might still make something.
	for os.Getppid() == parent {
		time.Sleep(time.Millisecond)
	}

	return sweep(func(pid int) bool { return pid == parent })
}

// Everything the lab creates outside of a namespace is named
// sluice-<pid>-<random>-<what>: the process with this ID cleans it up, and
// [Sweep] does so once that process has ended.
const namePrefix = "sluice-"

var nameFormat = regexp.MustCompile(`^sluice-([0-9]+)-[0-9a-z]{6}(-|$)`)

// newName returns a name that no other run uses.
func newName(what string) string {
	return fmt.Sprintf("%s%d-%s-%s", namePrefix, os.Getpid(), strings.ToLower(rand.Text()[:6]), what)
}

// ownerOf returns the process that made what carries this name. It is false for
// names that are not the lab's.
func ownerOf(name string) (pid int, ok bool) {
	match := nameFormat.FindStringSubmatch(name)
	if match == nil {
		return 0, false
	}
	pid, err := strconv.Atoi(match[1])

	return pid, err == nil && pid > 0
}

// isGone reports whether no process has this ID any more.
func isGone(pid int) bool {
	return errors.Is(unix.Kill(pid, 0), unix.ESRCH)
}
