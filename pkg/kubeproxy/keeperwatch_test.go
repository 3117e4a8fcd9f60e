package kubeproxy

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// A watch goes on while nothing changes, until it is stopped.
func TestWatchOfTheKeeperStays(t *testing.T) {
	lab.NeedsRoot(t)
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	if err := watchKeeper(ctx, slog.New(slog.DiscardHandler), 50*time.Millisecond); err != nil {
		t.Error(err)
	}
	if ctx.Err() == nil {
		t.Error("the watch has ended early")
	}
}
