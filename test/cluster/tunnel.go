package cluster

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Listener is a network namespace in which one can listen.
type Listener interface {
	Listen(network, address string) (net.Listener, error)
}

// Tunnel leads from a node to the API server: a client of the API server's
// address on the node's loopback device is connected to the real one. A tunnel can be
// cut, and opened again, and connections can be frozen.
type Tunnel struct {
	cluster *Cluster
	node    Listener

	mu       sync.Mutex
	listener net.Listener // nil while cut
	conns    map[net.Conn]struct{}
	frozen   *atomic.Bool // of the connections that begin now
}

// Tunnel opens a tunnel to the API server. The caller closes it.
func (c *Cluster) Tunnel(node Listener) (*Tunnel, error) {
	w := &Tunnel{cluster: c, node: node, conns: make(map[net.Conn]struct{}), frozen: new(atomic.Bool)}
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

// Freeze makes every connection that there is now swallow what either end sends, and never end, as a proxy does whose
// peer has vanished. New connections work.
func (w *Tunnel) Freeze() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen.Store(true)
	w.frozen = new(atomic.Bool)
}

// Silence freezes every connection that there is, or will be.
func (w *Tunnel) Silence() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen.Store(true)
}

// valve is a connection that swallows what is written to it once it is frozen.
type valve struct {
	net.Conn
	frozen *atomic.Bool
}

func (v valve) Write(p []byte) (int, error) {
	if v.frozen.Load() {
		return len(p), nil
	}

	return v.Conn.Write(p)
}

// join carries a connection until either end closes it, or, if it is frozen, until the client does.
func (w *Tunnel) join(near net.Conn) {
	defer near.Close()
	far, err := w.cluster.namespace.dial(context.Background(), "tcp", w.cluster.address())
	if err != nil {
		return // as refused by the API server
	}
	defer far.Close()
	frozen, ok := w.note(near, far)
	if !ok {
		return
	}
	defer w.forget(near, far)

	nearEnds, farEnds := make(chan struct{}), make(chan struct{})
	carry := func(to, from net.Conn, ends chan struct{}) {
		_, _ = io.Copy(valve{to, frozen}, from) // closing reports it to the other end
		close(ends)
	}
	go carry(near, far, farEnds)
	go carry(far, near, nearEnds)
	select {
	case <-nearEnds:
	case <-farEnds:
		if frozen.Load() {
			<-nearEnds
		}
	}
}

// note returns what is set when these connections are frozen. ok is false if the tunnel has been cut meanwhile.
func (w *Tunnel) note(conns ...net.Conn) (frozen *atomic.Bool, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range conns {
		w.conns[conn] = struct{}{}
	}

	return w.frozen, w.listener != nil
}

func (w *Tunnel) forget(conns ...net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range conns {
		delete(w.conns, conn)
	}
}
