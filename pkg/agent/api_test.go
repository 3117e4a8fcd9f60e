package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// serving starts the part of an agent that answers, on fake maps.
func serving(t *testing.T) (*agent, *Client) {
	t.Helper()
	cfg := Config{
		NodeName: "node-1",
		Socket:   filepath.Join(t.TempDir(), "below", "agent.sock"),
		Log:      slog.New(slog.DiscardHandler),
	}
	release, err := lockSocket(cfg.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { release() })
	tables := maps.NewFakes(100).Tables
	writer, err := reconcile.New(reconcile.Config{Tables: tables})
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{cfg: cfg, tables: tables, writer: writer, model: newModel(cfg), queue: newEventQueue(), synced: true, complete: true}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.serve(ctx) }()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-a.queue.ready:
				a.processQueue()
			}
		}
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	return a, NewClient(cfg.Socket)
}

func mustAsk[T any](t *testing.T, ask func(context.Context) (T, error)) T {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	for {
		value, err := ask(ctx)
		if err == nil {
			return value
		}
		if !errors.Is(err, ErrNotRunning) || ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestClientSeesTheModel(t *testing.T) {
	a, client := serving(t)
	sinkOf(a.queue).SetService(*web(), []lb.Problem{{Object: "Service ns/web", Field: "f", Message: "m"}})
	services := mustAsk(t, client.Services)
	if len(services) != 1 || services[0].Name != "ns/web" {
		t.Fatalf("services are %+v, want ns/web", services)
	}
	// Two ports, three kinds of addresses, and the catch-alls.
	desired := mustAsk(t, client.Desired)
	if len(desired) < 10 {
		t.Errorf("%d frontends are desired, want at least 10", len(desired))
	}

	sinkOf(a.queue).DeleteService(web().Name)
	if services := mustAsk(t, client.Services); len(services) != 0 {
		t.Errorf("services are %+v, want none", services)
	}
}

func TestClientWithoutAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("without a socket: %v, want %v", err, ErrNotRunning)
	}
	// What a killed agent leaves.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("with a dead socket: %v, want %v", err, ErrNotRunning)
	}
}
