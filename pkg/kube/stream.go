package kube

import (
	"context"
	"io"
	"net"
	"syscall"
	"time"
	"unsafe"

	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
)

// Stream is a client of an API server, with a connection of its own for each request that it
// has at a time. It is for one [Watcher].
type Stream struct {
	client rest.Interface
	// drained is called before a connection waits for more to read. [NewWatcher] sets it.
	drained func()
}

// NewStream returns a client of the API server that cfg names. It speaks HTTP/1.1: with
// HTTP/2, another goroutine reads the connection for all requests, and hands over each part
// of an answer.
func NewStream(cfg *rest.Config) (*Stream, error) {
	s := &Stream{drained: func() {}}
	own := rest.CopyConfig(cfg)
	own.NextProtos = []string{"http/1.1"}
	// As client-go has it. With HTTP/2 it would ask a server that is silent after 30 s, and wait 15 s.
	dialer := net.Dialer{
		Timeout:         30 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
	own.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		tcp := c.(*net.TCPConn) // as the network of an HTTP transport is
		raw, err := tcp.SyscallConn()

		return &conn{TCPConn: tcp, raw: raw, stream: s}, err
	}
	client, err := discoveryclient.NewForConfig(own)
	if err != nil {
		return nil, err
	}
	s.client = client.RESTClient()

	return s, nil
}

// conn is a connection that is read without Go's scheduler being told of a system call that
// may take long: the socket does not block. If it is told, it wakes a thread that watches
// over system calls, which costs as much as the read itself.
type conn struct {
	*net.TCPConn
	raw    syscall.RawConn
	stream *Stream
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	var failed syscall.Errno
	err = c.raw.Read(func(fd uintptr) bool {
		for {
			got, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
			switch errno {
			case syscall.EINTR:
				continue
			case syscall.EAGAIN:
				c.stream.drained()

				return false // come again when there is something to read
			}
			n, failed = int(got), errno

			return true
		}
	})
	switch {
	case err != nil:
		return 0, err
	case failed != 0:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: failed}
	case n == 0:
		return 0, io.EOF
	}

	return n, nil
}
