package health

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// What a client can hold of the agent is bounded: pods can reach health checks on
// any node, and the kernel spares the agent when memory runs out.
const (
	// requestTimeout is how long a client may take to send a request, its body
	// included.
	requestTimeout = 5 * time.Second
	// answerTimeout is how long it takes to send an answer, at most, to a client
	// that reads slowly. All metrics of a large node take seconds. A profile adds
	// the time that it takes by itself.
	answerTimeout = time.Minute
	// idleTimeout is how long a connection stays for the next request. It is longer
	// than the usual intervals of health checks and of Prometheus, so that clients
	// rarely ask on a connection in the moment in which it is closed.
	idleTimeout = 90 * time.Second
	// maxHeaderBytes has room for a token.
	maxHeaderBytes = 16 << 10
	// maxConnections is how many connections [Connections] keep open.
	maxConnections = 512
)

// NewHTTPServer returns a server that closes the connections of slow and silent
// clients, and counts all of its connections among open, which several servers may
// share.
func NewHTTPServer(handler http.Handler, open *Connections) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: requestTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnState:         open.follow,
	}
}

// Connections are those that servers have open, at most [maxConnections]. When there
// are more, the client that has the most loses its oldest one. So new connections are
// answered at once however many a client holds, and a client that opens them without
// end closes its own. The zero value has none.
type Connections struct {
	mu   sync.Mutex
	open []connection // oldest first
}

// connection is one with the address of its client.
type connection struct {
	net.Conn
	client netip.Addr
}

// follow is the ConnState of [http.Server].
func (c *Connections) follow(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		if tooMany := c.add(conn); tooMany != nil {
			_ = tooMany.Close() // its server notices, and forgets it
		}
	case http.StateClosed, http.StateHijacked:
		c.remove(conn)
	}
}

// add returns the connection that has to be closed for another one, or nil.
func (c *Connections) add(conn net.Conn) net.Conn {
	// A unix socket has clients without address: they count as one.
	client, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = append(c.open, connection{conn, client.Addr()})
	if len(c.open) <= maxConnections {
		return nil
	}
	counts := make(map[netip.Addr]int)
	for _, o := range c.open {
		counts[o.client]++
	}
	victim := 0
	for i, o := range c.open {
		if counts[o.client] > counts[c.open[victim].client] {
			victim = i
		}
	}
	tooMany := c.open[victim].Conn
	c.open = slices.Delete(c.open, victim, victim+1)

	return tooMany
}

func (c *Connections) remove(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = slices.DeleteFunc(c.open, func(o connection) bool { return o.Conn == conn })
}
