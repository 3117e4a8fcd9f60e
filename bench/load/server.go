package load

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Server is a process that answers in a namespace, at all addresses that are the
// namespace's own, those of AnyIP routes included:
//
//	ip route add local 100.64.0.0/12 dev lo
type Server struct{ process *process }

// Serve starts a server, TCP and UDP, IPv4 and IPv6, and returns when it listens. Of
// the connections it serves 96 at a time, of IPv6 16. The caller closes it.
func Serve(ns *lab.Namespace, port uint16) (*Server, error) {
	if !mainCalled.Load() {
		return nil, errMainNotCalled
	}
	p, err := startProcess(ns, nil, again(roleServer, serverThreads))
	if err != nil {
		return nil, err
	}
	err = json.NewEncoder(p.stdin).Encode(port)
	line := ""
	if err == nil {
		line, err = bufio.NewReader(p.stdout).ReadString('\n')
	}
	if err != nil || strings.TrimSpace(line) != listening {
		_ = p.stdin.Close() // so that it ends
		if failed := p.wait(); failed != nil {
			err = failed // it has the reason why there is no line
		}

		return nil, fmt.Errorf("serve port %d: %w", port, errors.Join(err, p.close()))
	}

	return &Server{process: p}, nil
}

// PID is the process.
func (s *Server) PID() int { return s.process.cmd.Process.Pid }

// Pause makes the server stand still until [Server.Resume]: what comes meanwhile
// waits. One that merely has nothing to do still takes a percent of a processor.
func (s *Server) Pause() error { return s.signal(unix.SIGSTOP) }

// Resume lets a paused server go on.
func (s *Server) Resume() error { return s.signal(unix.SIGCONT) }

func (s *Server) signal(signal unix.Signal) error {
	if err := s.process.cmd.Process.Signal(signal); err != nil {
		return fmt.Errorf("signal server: %w", err)
	}

	return nil
}

// Close ends the server with all its connections. Closing twice is not an error.
func (s *Server) Close() error { return s.process.close() }
