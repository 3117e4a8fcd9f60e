package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// namespace is the network namespace in which a cluster lives.
type namespace struct {
	file    *os.File
	foreign bool // threads are elsewhere unless they have been moved
}

// mustCurrentNamespace returns the namespace of the calling thread. It can be
// used until the test ends.
func mustCurrentNamespace(t testing.TB) *namespace {
	t.Helper()

	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatalf("network namespace of the thread: %v", err)
	}
	t.Cleanup(func() { file.Close() })
	own, err := file.Stat()
	if err != nil {
		t.Fatalf("network namespace of the thread: %v", err)
	}

	// A new goroutine is not on this thread if this one is locked to it.
	var usual os.FileInfo
	done := make(chan struct{})
	go func() {
		usual, err = os.Stat("/proc/thread-self/ns/net")
		close(done)
	}()
	<-done
	if err != nil {
		t.Fatalf("network namespace of the process: %v", err)
	}

	return &namespace{file: file, foreign: !os.SameFile(own, usual)}
}

// do calls f on a thread in the namespace, which is f's own until it returns.
func (n *namespace) do(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if !n.foreign {
			defer runtime.UnlockOSThread()
			result <- f()
			return
		}
		// Stays locked, so that the thread ends with the goroutine and nobody
		// else finds itself in this namespace.
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("entry into the network namespace: %w", err)
			return
		}
		result <- f()
	}()

	return <-result
}

// dial is [net.Dialer.DialContext] from within the namespace, for addresses
// that need no name resolution.
func (n *namespace) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := n.do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})

	return conn, err
}
