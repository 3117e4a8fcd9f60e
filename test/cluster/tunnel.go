package cluster

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
)

// Listener is a network namespace in which one can listen.
type Listener interface {
	Listen(network, address string) (net.Listener, error)
}

// Tunnel leads from a node to the API server: a client of the API server's
// address on the node's loopback device is connected to the real one. A tunnel can be
// cut, and opened again.
type Tunnel struct {
	cluster *Cluster
	node    Listener

	mu       sync.Mutex
	listener net.Listener // nil while cut
	conns    map[net.Conn]struct{}
}

// Tunnel opens a tunnel to the API server. The caller closes it.
func (c *Cluster) Tunnel(node Listener) (*Tunnel, error) {
	w := &Tunnel{cluster: c, node: node, conns: make(map[net.Conn]struct{})}
	if err := w.open(); err != nil {
		return nil, err
	}

	return w, nil
}

func (w *Tunnel) open() error {
	listener, err := w.node.Listen("tcp", w.cluster.address())
	if err != nil {
		return fmt.Errorf("tunnel to the API server: %w", err)
	}
	w.mu.Lock()
	w.listener = listener
	w.mu.Unlock()
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return // cut
			}
			go w.join(near)
		}
	}()

	return nil
}

// Addr is where the tunnel begins, unless it is cut.
func (w *Tunnel) Addr() net.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.listener.Addr()
}

// Close is [Tunnel.Cut]. It returns nil.
func (w *Tunnel) Close() error {
	w.Cut()

	return nil
}

// Cut ends every connection, and refuses new ones.
func (w *Tunnel) Cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.listener != nil {
		w.listener.Close()
		w.listener = nil
	}
	for conn := range w.conns {
		conn.Close()
	}
}

// join carries a connection until either end closes it.
func (w *Tunnel) join(near net.Conn) {
	defer near.Close()
	far, err := w.cluster.namespace.dial(context.Background(), "tcp", w.cluster.address())
	if err != nil {
		return // as refused by the API server
	}
	defer far.Close()
	if !w.note(near, far) {
		return
	}
	defer w.forget(near, far)

	done := make(chan struct{}, 2)
	carry := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // closing reports it to the other end
		done <- struct{}{}
	}
	go carry(near, far)
	go carry(far, near)
	<-done
}

// note is false if the tunnel has been cut meanwhile.
func (w *Tunnel) note(conns ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range conns {
		w.conns[conn] = struct{}{}
	}

	return w.listener != nil
}

func (w *Tunnel) forget(conns ...net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range conns {
		delete(w.conns, conn)
	}
}
