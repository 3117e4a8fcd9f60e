package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// listenRetry is how long after a failure an address is tried again. It is that of
// kube-proxy.
const listenRetry = 5 * time.Second

// Server serves a handler on an address.
type Server struct {
	// Name is used in logs and errors.
	Name string
	// Address is what to listen on. An unspecified one means all addresses of
	// both families; the zero value serves nothing.
	Address netip.AddrPort
	Handler http.Handler
	// HardFail makes an address that cannot be listened on an error. If it is not
	// set, the server keeps trying.
	HardFail bool
	// Listening is called with nil when the server listens, and with the error whenever it cannot, or has ended with one.
	// It may be nil.
	Listening func(error)
	// Listen is [net.Listen], unless it is set.
	Listen func(network, address string) (net.Listener, error)
	Log    *slog.Logger

	retry time.Duration // zero: listenRetry
}

// Run serves until ctx ends, then returns nil.
func (s Server) Run(ctx context.Context) error {
	if !s.Address.IsValid() {
		return nil
	}
	if s.Listen == nil {
		s.Listen = net.Listen
	}
	if s.Listening == nil {
		s.Listening = func(error) {}
	}
	if s.retry == 0 {
		s.retry = listenRetry
	}
	failure := ""
	for {
		// To listen on the unspecified address of either family with "tcp" means both families.
		listener, err := s.Listen("tcp", s.Address.String())
		if err == nil {
			failure = ""
			s.Listening(nil)
			s.Log.Info("listening", "server", s.Name, "address", listener.Addr())
			err = ServeUntil(ctx, NewHTTPServer(s.Handler, new(Connections)), listener)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case s.HardFail:
			return fmt.Errorf("%s at %s: %w", s.Name, s.Address, err)
		case err.Error() != failure:
			failure = err.Error()
			s.Log.Error("server does not answer; trying again", "server", s.Name, "address", s.Address, "error", err)
		}
		s.Listening(err) // also if it is the same: another program may have the address now
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(s.retry):
		}
	}
}

// shutdownTimeout limits how long a server that ends waits for the answers to earlier requests.
const shutdownTimeout = 2 * time.Second

// ServeUntil serves until an error occurs or ctx ends. When ctx ends, it answers the requests
// that it has, and returns nil. The contexts of requests end with ctx as well. When it returns no handler runs, so that the
// caller can close what handlers use: an answer that takes longer than shutdownTimeout is cut off, but its handler is waited for.
func ServeUntil(ctx context.Context, server *http.Server, listener net.Listener) error {
	var running sync.RWMutex // read by each handler that runs
	handler := server.Handler
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !running.TryRLock() {
			http.Error(w, "the server has ended", http.StatusServiceUnavailable)

			return
		}
		defer running.RUnlock()
		handler.ServeHTTP(w, r)
	})
	defer running.Lock() // and never unlocked: what begins now is not handled
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		_ = server.Shutdown(limit) // Close cuts off requests that take longer
		server.Close()
	})
	err := server.Serve(listener)
	if stop() {
		return errors.Join(err, server.Close())
	}
	<-ended

	return nil
}

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
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		// Clients of a unix socket have no address: they count as one.
		client, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
		c.open = append(c.open, connection{conn, client.Addr()})
		if len(c.open) <= maxConnections {
			return
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
		_ = c.open[victim].Close() // its server notices
		c.open = slices.Delete(c.open, victim, victim+1)
	case http.StateClosed, http.StateHijacked:
		c.open = slices.DeleteFunc(c.open, func(o connection) bool { return o.Conn == conn })
	}
}
