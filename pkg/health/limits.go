package health

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Limits on what a client can make the agent hold: pods can reach health checks on any
// node, and the kernel kills other processes first when memory runs out.
const (
	// requestTimeout limits how long a client may take to send a request, its body
	// included.
	requestTimeout = 5 * time.Second
	// answerTimeout limits how long a client may take to read an answer. All metrics of
	// a large node take seconds. A profile extends it by the time that it takes itself.
	answerTimeout = time.Minute
	// idleTimeout is how long a connection stays open for the next request. It is longer
	// than the usual intervals of health checks and of Prometheus, so that a request
	// rarely arrives while its connection is being closed.
	idleTimeout = 90 * time.Second
	// maxHeaderBytes is enough for a bearer token.
	maxHeaderBytes = 16 << 10
	// maxConnections is how many connections [Connections] keeps open.
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

// Connections are the open connections of servers, at most [maxConnections]. When there
// are more, it closes the oldest one of the client that has the most. So new connections
// are answered at once however many a client holds, and a client that keeps opening them
// only loses its own. The zero value has none.
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
	// Clients of a unix socket have no address: they count as one.
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
