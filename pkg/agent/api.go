package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/health"
)

// DefaultSocket is the default of the socket on which the agent answers the other verbs.
const DefaultSocket = "/run/sluice/agent.sock"

// ErrNotRunning is returned by a [Client] when no agent answers.
var ErrNotRunning = errors.New("no agent is running")

// serve answers the other verbs on a socket that only root can open, until ctx
// ends.
func (a *agent) serve(ctx context.Context) error {
	path := a.cfg.Socket
	// A socket that an earlier agent left would refuse the new one.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("socket of an earlier agent: %w", err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	// The next agent removes it. Our own end must not remove that agent's socket.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(fmt.Errorf("socket: %w", err), listener.Close())
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", a.answer(func(ctx context.Context) (any, error) { return a.status(ctx) }))
	mux.HandleFunc("GET /services", a.answer(func(ctx context.Context) (any, error) { return a.answerServices(ctx) }))
	mux.HandleFunc("GET /desired", a.answer(func(ctx context.Context) (any, error) { return later(ctx, a, a.desired) }))
	if err := health.ServeUntil(ctx, health.NewHTTPServer(mux, new(health.Connections)), listener); err != nil {
		return fmt.Errorf("socket: %w", err)
	}

	return nil
}

// answer returns a handler that sends the result of compute as JSON.
func (a *agent) answer(compute func(context.Context) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		value, err := compute(r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)

			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(value); err != nil {
			a.cfg.Log.Warn("answer not sent", "request", r.URL.Path, "error", err)
		}
	}
}

// inLoop calls compute in the goroutine that has the turn, and returns its result.
func inLoop[T any](ctx context.Context, a *agent, compute func() T) (T, error) {
	done := make(chan T, 1)
	a.queue.enqueue(func(*model) { done <- compute() })
	select {
	case <-ctx.Done():
		var none T

		return none, ctx.Err()
	case value := <-done:
		return value, nil
	}
}

// later calls gather in the goroutine that has the turn, and computes the answer in its own:
// thousands of Services take too long for the loop.
func later[T any](ctx context.Context, a *agent, gather func() func() T) (T, error) {
	compute, err := inLoop(ctx, a, gather)
	if err != nil {
		var none T

		return none, err
	}

	return compute(), nil
}

// Client asks a running agent.
type Client struct {
	http *http.Client
}

// NewClient returns a client of the agent that listens on a socket.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOTSOCK) {
			return nil, fmt.Errorf("%w: %w", ErrNotRunning, err)
		}

		return conn, err
	}

	return &Client{http: &http.Client{
		Transport: &http.Transport{DialContext: dial},
		Timeout:   30 * time.Second,
	}}
}

// Status returns the state of the agent. The error wraps [ErrNotRunning] if none answers,
// as do the errors of the other methods.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c, "/status")
}

// Services returns every Service that the agent knows, sorted by name.
func (c *Client) Services(ctx context.Context) ([]Service, error) {
	return ask[[]Service](ctx, c, "/services")
}

// Desired returns the frontends that should be programmed, sorted by Service
// and address.
func (c *Client) Desired(ctx context.Context) ([]Frontend, error) {
	return ask[[]Frontend](ctx, c, "/desired")
}

func ask[T any](ctx context.Context, c *Client, path string) (T, error) {
	var value T
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return value, fmt.Errorf("request %s: %w", path, err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) && errors.Is(err, ErrNotRunning) {
			return value, failed.Err
		}

		return value, fmt.Errorf("agent: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))

		return value, fmt.Errorf("agent: %s: %s: %s", path, response.Status, bytes.TrimSpace(text))
	}
	if err := json.NewDecoder(response.Body).Decode(&value); err != nil {
		return value, fmt.Errorf("agent: %s: %w", path, err)
	}

	return value, nil
}
