package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// This executable is the demo, too, if this variable is set.
const demoVariable = "SLUICE_DEMO"

func TestMain(m *testing.M) {
	lab.Main()
	if os.Getenv(demoVariable) != "" {
		os.Exit(run())
	}
	os.Exit(m.Run())
}

// mustDemo returns a command that runs the demo. What that makes in /tmp, it
// makes in tmp.
func mustDemo(t *testing.T) (cmd *exec.Cmd, tmp string) {
	t.Helper()
	lab.NeedsRoot(t)
	tmp = t.TempDir()
	cmd = exec.Command("/proc/self/exe", "-sluice", sluice.MustBinary(t))
	cmd.Env = append(os.Environ(), demoVariable+"=yes", "TMPDIR="+tmp)
	cmd.Stderr = new(bytes.Buffer)

	return cmd, tmp
}

// mustBeGone waits until nothing is left of a demo; the last processes see it
// end.
func mustBeGone(t *testing.T, cmd *exec.Cmd, tmp string) {
	t.Helper()
	root, err := lab.CgroupRoot()
	lab.Must(t, err)
	ours := fmt.Sprintf("sluice*-%d-*", cmd.Process.Pid)
	var left []string
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		left = processesOf(tmp)
		for _, pattern := range []string{
			filepath.Join(tmp, "*"), filepath.Join("/run/netns", ours), filepath.Join(root, ours), filepath.Join(bpffs, ours),
		} {
			found, err := filepath.Glob(pattern)
			lab.Must(t, err)
			left = append(left, found...)
		}
		if len(left) == 0 {
			return
		}
	}
	t.Errorf("left behind: %s", left)
}

// processesOf returns the processes that have this TMPDIR.
func processesOf(tmp string) []string {
	environments, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is good
	var found []string
	for _, path := range environments {
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(text), "TMPDIR="+tmp) { // else it is gone
			found = append(found, filepath.Dir(path))
		}
	}

	return found
}

func TestDemo(t *testing.T) {
	cmd, tmp := mustDemo(t)
	begin := time.Now()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s\n%s", err, cmd.Stderr, out)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("it took %s, want less than 20 s", took)
	}
	mustBeGone(t, cmd, tmp)

	text := string(out)
	for _, scene := range scenes() {
		if !strings.Contains(text, scene.title+"\n") {
			t.Errorf("scene %q was not played", scene.title)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("there are colours in what is no terminal")
	}
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// Ctrl-C reaches all processes of the terminal at once.
func TestInterruptedDemo(t *testing.T) {
	cmd, tmp := mustDemo(t)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	lab.Must(t, err)
	lab.Must(t, cmd.Start())

	moments := []string{headline}
	for _, scene := range scenes()[:len(scenes())-1] {
		moments = append(moments, scene.title)
	}
	moment := moments[rand.N(len(moments))]
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.HasSuffix(lines.Text(), moment) {
	}
	pause := rand.N(200 * time.Millisecond)
	time.Sleep(pause)
	lab.Must(t, unix.Kill(-cmd.Process.Pid, unix.SIGINT))
	rest, err := io.ReadAll(out)
	lab.Must(t, err)
	_ = cmd.Wait() // the exit code is checked
	if code := cmd.ProcessState.ExitCode(); code != exitInterrupted {
		t.Errorf("interrupted %s after %q: exit code is %d, want %d: %s\n%s", pause, moment, code, exitInterrupted, cmd.Stderr, rest)
	}
	mustBeGone(t, cmd, tmp)
}
