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

// Stream is a client of an API server that uses one connection per concurrent request.
// Only one [Watcher] may use it.
type Stream struct {
	client rest.Interface
	// drained is called when there is nothing more to read on a connection. [NewWatcher]
	// sets it.
	drained func()
}

// NewStream returns a client of the API server that cfg names. It uses HTTP/1.1, because
// with HTTP/2 another goroutine reads the connection for all requests and passes on each
// part of an answer, which costs time.
func NewStream(cfg *rest.Config) (*Stream, error) {
	s := &Stream{drained: func() {}}
	own := rest.CopyConfig(cfg)
	own.NextProtos = []string{"http/1.1"}
	// client-go's values. With HTTP/2 it would send a ping after 30 s of silence and wait 15 s.
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

// conn is a connection whose reads do not announce a system call to Go's scheduler: the
// socket does not block, and the announcement wakes the thread that monitors system calls,
// which costs as much as the read itself.
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

				return false // wait until there is something to read
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
