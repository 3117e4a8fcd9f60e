package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespace is the network namespace of a cluster's servers.
type namespace struct {
	file    *os.File
	foreign bool // threads are elsewhere unless they have been moved
}

// currentNamespace returns the namespace of the calling thread. The caller
// closes it.
func currentNamespace() (*namespace, error) {
	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("network namespace of the thread: %w", err)
	}
	own, err := file.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("network namespace of the thread: %w", err), file.Close())
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
		return nil, errors.Join(fmt.Errorf("network namespace of the process: %w", err), file.Close())
	}

	return &namespace{file: file, foreign: !os.SameFile(own, usual)}, nil
}

// close lets go of the namespace. Closing twice is not an error.
func (n *namespace) close() error {
	if err := n.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}

	return nil
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
		// Stays locked, so that the thread ends with the goroutine and no other one
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
