package senders

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// program is one that sends each line of its input as a datagram.
type program struct {
	name    string
	command func(to netip.AddrPort) []string
	// answers: it prints what it receives, a line for each datagram.
	answers bool
	// What it does when a datagram is refused, besides going on with its socket.
	ends, reopens bool
}

// mustPrograms returns the programs, those of testdata built.
func mustPrograms(t *testing.T) []program {
	t.Helper()
	compiled := filepath.Join(t.TempDir(), "sender")
	_, err := lab.Output(nil, nil, "go", "build", "-o", compiled, "testdata/sender.go")
	lab.Must(t, err)
	// with returns a command that ends with an address and a port.
	with := func(command ...string) func(netip.AddrPort) []string {
		return func(to netip.AddrPort) []string {
			return append(slices.Clone(command), to.Addr().String(), fmt.Sprint(to.Port()))
		}
	}

	return []program{
		{name: "Go", command: with(compiled), answers: true},
		{name: "Node.js", command: with("node", "testdata/sender.js"), answers: true},
		{name: "Java", command: with("java", "-Xmx64m", "testdata/Sender.java"), answers: true},
		{name: "asyncio", command: with("/usr/bin/python3", "testdata/asyncio_sender.py"), answers: true},
		{name: "SysLogHandler", command: with("/usr/bin/python3", "testdata/syslog_sender.py")},
		{name: "bash", command: with("bash", "testdata/sender.sh")},
		{name: "nc", command: with("nc.openbsd", "-u"), answers: true, ends: true},
		{name: "logger", command: func(to netip.AddrPort) []string {
			return []string{"logger", "-d", "-n", to.Addr().String(), "-P", fmt.Sprint(to.Port())}
		}, reopens: true},
	}
}

// sender is a program that runs.
type sender struct {
	program
	name string // with where it runs, to where it sends, and since when

	in      io.Writer
	printed *lab.Log
	pid     int
	sockets []string // as it has opened them
	sent    int
}

// mustStart starts a program in a namespace and in a cgroup, has it send a line, and waits until it has opened its socket.
func mustStart(t *testing.T, p program, ns *lab.Namespace, cgroup *lab.Cgroup, name string, to netip.AddrPort) *sender {
	t.Helper()
	command := p.command(to)
	cmd := exec.Command(command[0], command[1:]...)
	s := &sender{program: p, name: name, printed: &lab.Log{}}
	in, err := cmd.StdinPipe()
	lab.Must(t, err)
	cmd.Stdout, cmd.Stderr = s.printed, s.printed
	lab.Must(t, lab.Start(ns, cgroup, cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	s.in, s.pid = in, cmd.Process.Pid
	s.send(t) // before it has a line, SysLogHandler opens none
	lab.Eventually(t, name+" opens its socket", func() error {
		s.sockets, err = udpSockets(s.pid)
		if err == nil && len(s.sockets) == 0 {
			err = errors.New("it has none")
		}
		return err
	})

	return s
}

// send has the program send a line, and returns its text.
func (s *sender) send(t *testing.T) string {
	t.Helper()
	s.sent++
	text := fmt.Sprintf("<line %d of %s>", s.sent, s.name)
	_, err := fmt.Fprintln(s.in, text)
	lab.Must(t, err)

	return text
}

// udpSockets returns the UDP sockets that a process has open: "socket:[INODE]".
func udpSockets(pid int) ([]string, error) {
	proc := fmt.Sprintf("/proc/%d", pid)
	udp := make(map[string]bool)
	for _, table := range []string{"udp", "udp6"} {
		text, err := os.ReadFile(filepath.Join(proc, "net", table))
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); len(fields) > 9 {
				udp["socket:["+fields[9]+"]"] = true
			}
		}
	}
	files, err := filepath.Glob(filepath.Join(proc, "fd", "*"))
	if err != nil {
		return nil, err
	}
	var sockets []string
	for _, file := range files {
		if target, err := os.Readlink(file); err == nil && udp[target] {
			sockets = append(sockets, target)
		}
	}
	slices.Sort(sockets) // of bash, two files may be one socket for a moment

	return slices.Compact(sockets), nil
}
