package kube

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// connected returns both ends of a connection: ours is one of a Stream.
func connected(t *testing.T) (ours *conn, peer *net.TCPConn, drained *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	c, err := net.Dial("tcp", listener.Addr().String())
	must(t, err)
	accepted, err := listener.Accept()
	must(t, err)
	raw, err := c.(*net.TCPConn).SyscallConn()
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		_ = accepted.Close()
	})
	drained = &atomic.Int32{}
	stream := &Stream{drained: func() { drained.Add(1) }}

	return &conn{TCPConn: c.(*net.TCPConn), raw: raw, stream: stream}, accepted.(*net.TCPConn), drained
}

func TestConnReads(t *testing.T) {
	ours, peer, drained := connected(t)
	if n, err := ours.Read(nil); n != 0 || err != nil || drained.Load() != 0 {
		t.Errorf("reading nothing: %d, %v, drained %d times", n, err, drained.Load())
	}
	time.AfterFunc(20*time.Millisecond, func() { _, _ = peer.Write([]byte("first")) })
	buf := make([]byte, 3)
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "fir" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if got := drained.Load(); got != 1 {
		t.Errorf("drained %d times before there was anything, want once", got)
	}
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "st" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if got := drained.Load(); got != 1 {
		t.Errorf("drained %d times while there was more", got)
	}
	must(t, peer.CloseWrite())
	if n, err := ours.Read(buf); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d, %v", n, err)
	}
}

func TestConnFails(t *testing.T) {
	t.Run("with a reset", func(t *testing.T) {
		ours, peer, _ := connected(t)
		must(t, peer.SetLinger(0))
		must(t, peer.Close())
		var failed *net.OpError
		if _, err := ours.Read(make([]byte, 1)); !errors.As(err, &failed) {
			t.Errorf("read %v", err)
		}
	})
	t.Run("at a deadline", func(t *testing.T) {
		ours, _, _ := connected(t)
		must(t, ours.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
		if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read %v", err)
		}
	})
	t.Run("when it is closed", func(t *testing.T) {
		ours, _, _ := connected(t)
		time.AfterFunc(20*time.Millisecond, func() { _ = ours.Close() })
		if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read %v", err)
		}
	})
}
