package kube

import (
	"context"
	"errors"
	"net"
	"net/http/httptrace"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

// maxSilence is how long a connection to the API server may bring nothing before it is given up. HTTP/2 gives up
// earlier, when a ping is not answered. Without HTTP/2 there are no pings, but a watch has a bookmark every minute.
const maxSilence = 90 * time.Second

// A connection to the API server has failed, and the next one goes the other way, if it ends within minLife or has
// brought nothing for maxQuiet, which is longer than a ping waits. The way that does not lead through Services is tried
// for apartTimeout only: nothing answers there if the API server's address is a Service's alone.
const (
	minLife      = 15 * time.Second
	maxQuiet     = 40 * time.Second
	apartTimeout = 5 * time.Second
)

// Dialer makes the connections of a client to the API server. So a [Watcher] learns where the API
// server is, and when it was last heard from. A connection is translated like those of other processes; after one that
// failed, the next is set apart from Services, and so on by turns: what an earlier agent has programmed for the address
// may lead elsewhere, or to endpoints that have gone, and only an agent that reaches the API server mends it.
type Dialer struct {
	// setApart makes programs leave a connection alone that is about to begin, or ends that once it has begun.
	setApart func(socket syscall.RawConn, apart bool) error
	// dialed is called before a connection begins. [NewWatcher] sets it.
	dialed func(netip.AddrPort)
	// silence, minLife and maxQuiet are the constants, but for tests.
	silence, minLife, maxQuiet time.Duration

	apart atomic.Bool // the next connection is

	mu   sync.Mutex
	open map[bool]int // connections, by whether they are apart
}

// NewDialer returns a Dialer for one Watcher. SetApart is called with sockets that are about to connect, and that
// programs have to leave alone, and again with false once they are connected.
func NewDialer(setApart func(socket syscall.RawConn, apart bool) error) *Dialer {
	return &Dialer{
		setApart: setApart, dialed: func(netip.AddrPort) {},
		silence: maxSilence, minLife: minLife, maxQuiet: maxQuiet,
		open: make(map[bool]int),
	}
}

// DialContext is for the Dial of a rest.Config.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	apart := d.apart.Load()
	dialer := net.Dialer{
		Timeout: 30 * time.Second, KeepAlive: 30 * time.Second, // client-go's values
		Control: func(_, address string, socket syscall.RawConn) error {
			if at, err := netip.ParseAddrPort(address); err == nil { // as that of a TCP connection is
				d.dialed(netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port()))
			}
			if apart {
				return d.setApart(socket, true)
			}

			return nil
		},
	}
	if apart {
		dialer.Timeout = apartTimeout
	}
	c, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		if !errors.Is(ctx.Err(), context.Canceled) {
			d.apart.CompareAndSwap(apart, !apart)
		}

		return nil, err
	}
	if apart {
		if err := d.join(c); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	d.count(apart, 1)

	return &conn{Conn: c, dialer: d, apart: apart, begun: time.Now()}, nil
}

// join ends what set a connection apart, so that nothing about its packets differs from those of others.
func (d *Dialer) join(c net.Conn) error {
	socket, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}

	return d.setApart(socket, false)
}

// count adds n to the open connections that are apart, or are not, and returns how many there are.
func (d *Dialer) count(apart bool, n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[apart] += n

	return d.open[apart]
}

// conn is a connection that knows when it was last heard from.
type conn struct {
	net.Conn
	dialer *Dialer
	apart  bool // from Services
	begun  time.Time
	after  atomic.Int64 // what of the time since begun had passed when something was read last
	closed sync.Once
}

// Close implements [net.Conn]. HTTP/2 closes at once what it does not need: connections that began together with the one
// which it uses. Their short life shows nothing.
func (c *conn) Close() error {
	c.closed.Do(func() {
		d := c.dialer
		others := d.count(c.apart, -1)
		if time.Since(c.begun) < d.minLife && others == 0 || time.Since(c.heard()) > d.maxQuiet {
			d.apart.CompareAndSwap(c.apart, !c.apart)
		}
	})

	return c.Conn.Close()
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.dialer.silence)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.after.Store(int64(time.Since(c.begun)))
	}

	return n, err
}

// heard returns when something was read last, or when the connection began.
func (c *conn) heard() time.Time { return c.begun.Add(time.Duration(c.after.Load())) }

// LocalAddr implements [net.Conn]. Of the methods of a connection it is the one that reaches this type through
// those of TLS and of client-go.
func (c *conn) LocalAddr() net.Addr { return localAddr{c.Conn.LocalAddr(), c} }

// localAddr is the address of this end of a connection.
type localAddr struct {
	net.Addr
	conn *conn
}

// hearing is when the watch of a resource was last heard from: by an event, a bookmark, or an answered ping of its
// connection. Any goroutine may use it.
type hearing struct {
	mu   sync.Mutex
	last time.Time // while no watch is open; zero: there is nothing to hear
	open *conn     // that of the watch
}

// at returns when that was, or false if there is nothing to hear.
func (h *hearing) at() (time.Time, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.open != nil {
		return h.open.heard(), true
	}

	return h.last, !h.last.IsZero()
}

// stop notes that no watch is open, and what then counts as the last time, zero if there is nothing to hear.
func (h *hearing) stop(last time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last, h.open = last, nil
}

// traced returns a context for the request of a watch, and what makes of its answer a watch that is heard.
func (h *hearing) traced(ctx context.Context) (context.Context, func(watch.Interface) watch.Interface) {
	var used atomic.Pointer[conn]
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if local, ok := got.Conn.LocalAddr().(localAddr); ok {
			used.Store(local.conn)
		}
	}})

	return traced, func(events watch.Interface) watch.Interface {
		c := used.Load()
		if c == nil {
			return events // of a client without a Dialer
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.open = c

		return &heardWatch{Interface: events, ended: sync.OnceFunc(func() { h.stop(c.heard()) })}
	}
}

// heardWatch calls ended when it is stopped.
type heardWatch struct {
	watch.Interface
	ended func()
}

// Stop implements [watch.Interface].
func (w *heardWatch) Stop() {
	w.ended()
	w.Interface.Stop()
}
