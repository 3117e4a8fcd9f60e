package datapath

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// A scene is played by a process of its own, in a namespace and a cgroup: it makes
// system calls that [lab.Socket] does not make. The process prints its result.
type scene func(args []string) (string, error)

// sceneVariable names the scene that this executable plays.
const sceneVariable = "SLUICE_SCENE"

// scenes are all scenes, by name.
func scenes() map[string]scene {
	return map[string]scene{
		"cork":                 sceneCork,
		"datagram of":          sceneDatagramOf,
		"dial ahead":           sceneDialAhead,
		"exchange":             sceneExchange,
		"connect many":         sceneConnectMany,
		"fast open":            sceneFastOpen,
		"multipath":            sceneMultipath,
		"non-blocking connect": sceneNonBlocking,
		"error queue":          sceneErrorQueue,
		"inherit":              sceneInherit,
		"listen after connect": sceneListenAfterConnect,
		"time connect":         sceneTimeConnect,
		"time send":            sceneTimeSend,
		"time socket":          sceneTimeSocket,
		"time tcp":             sceneTimeTCP,
		"connect again":        sceneConnectAgain,
		"sort names":           sceneSortNames,
		"reset":                sceneReset,
		"half close":           sceneHalfClose,
		"hand on":              sceneHandOn,
		"storm":                sceneStorm,
		"two threads":          sceneTwoThreads,
		"sticky connects":      sceneStickyConnects,
	}
}

// playScene plays the scene that the environment names, and exits. It returns if there
// is none.
func playScene() {
	name := os.Getenv(sceneVariable)
	if name == "" {
		return
	}
	printed, err := scenes()[name](os.Args[1:])
	fmt.Print(printed)
	if err != nil {
		fmt.Print(errorWord(err))
	}
	os.Exit(0)
}

// errorWord returns the name of a system call's error, or else its text.
func errorWord(err error) string {
	errno := unix.Errno(0)
	if errors.As(err, &errno) {
		return unix.ErrnoName(errno)
	}

	return err.Error()
}

// play plays a scene in a namespace and in the cgroup of w, to its end, and
// returns what it printed.
func (w *world) play(t testing.TB, ns *lab.Namespace, name string, args ...string) string {
	t.Helper()
	running := w.start(t, ns, name, args...)

	return running.rest(t)
}

// runningScene is a scene that waits for the end of its input.
type runningScene struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out io.Reader
}

func (w *world) start(t testing.TB, ns *lab.Namespace, name string, args ...string) *runningScene {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), sceneVariable+"="+name)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	lab.Must(t, err)
	out, err := cmd.StdoutPipe()
	lab.Must(t, err)
	if err := lab.Start(ns, w.cgroup, cmd); err != nil {
		t.Fatalf("scene %s: %v", name, err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Wait() // its exit code was read, or the cgroup killed it
	})

	return &runningScene{cmd: cmd, in: in, out: out}
}

// rest lets the scene go on to its end and returns what it printed since.
func (r *runningScene) rest(t testing.TB) string {
	t.Helper()
	r.in.Close()
	printed, err := io.ReadAll(r.out)
	if err != nil {
		t.Fatalf("scene: %v", err)
	}

	return strings.TrimSpace(string(printed))
}

// line waits for the next line that the scene prints.
func (r *runningScene) line(t testing.TB) string {
	t.Helper()
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r.out, b); err != nil {
			t.Fatalf("scene: after %q: %v", line, err)
		}
		if b[0] == '\n' {
			return string(line)
		}
		line = append(line, b[0])
	}
}

// pause prints a line and waits until the test lets the scene go on.
func pause(line string) {
	fmt.Println(line)
	_, _ = io.Copy(io.Discard, os.Stdin)
}
