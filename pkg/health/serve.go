package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
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
	// both families.
	Address netip.AddrPort
	Handler http.Handler
	// HardFail makes an address that cannot be listened on an error. If it is not
	// set, the server keeps trying.
	HardFail bool
	// Listen is [net.Listen], unless it is set.
	Listen func(network, address string) (net.Listener, error)
	Log    *slog.Logger

	retry time.Duration // zero: listenRetry
}

// Run serves until ctx ends, then returns nil.
func (s Server) Run(ctx context.Context) error {
	if s.Listen == nil {
		s.Listen = net.Listen
	}
	if s.retry == 0 {
		s.retry = listenRetry
	}
	failure := ""
	for {
		err := s.serve(ctx, func() { failure = "" })
		switch {
		case ctx.Err() != nil:
			return nil
		case s.HardFail:
			return fmt.Errorf("%s at %s: %w", s.Name, s.Address, err)
		case err.Error() != failure:
			failure = err.Error()
			s.Log.Error("server does not answer; trying again", "server", s.Name, "address", s.Address, "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(s.retry):
		}
	}
}

// serve serves until something goes wrong or ctx ends.
func (s Server) serve(ctx context.Context, listening func()) error {
	// To listen on the unspecified address of either family with "tcp" means
	// both families.
	listener, err := s.Listen("tcp", s.Address.String())
	if err != nil {
		return err
	}
	listening()
	s.Log.Info("listening", "server", s.Name, "address", listener.Addr())

	return ServeUntil(ctx, NewHTTPServer(s.Handler, new(Connections)), listener)
}

// shutdownTimeout limits how long a server that ends waits for the answers to earlier requests.
const shutdownTimeout = 2 * time.Second

// ServeUntil serves until an error occurs or ctx ends. When ctx ends, it answers the requests
// that it has, so that the caller can close what handlers use, and returns nil. The contexts of
// requests end with ctx as well.
func ServeUntil(ctx context.Context, server *http.Server, listener net.Listener) error {
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
