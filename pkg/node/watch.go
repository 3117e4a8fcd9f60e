package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/vishvananda/netns"
)

const (
	// quietTime is the least time between two lists of the node. On a node with very
	// many routes it is this multiple of the time that a list takes.
	quietTime     = 50 * time.Millisecond
	quietMultiple = 10
	// relistTime is the time after which the node is listed without a notification.
	relistTime = time.Minute
	// A subscription that breaks repeatedly is renewed with exponential backoff.
	firstRetry = quietTime
	lastRetry  = 10 * time.Second
	// receiveBuffer holds the notifications that a hundred new pods cause at once.
	receiveBuffer = 4 << 20
)

// Config is the configuration of [Watch].
type Config struct {
	// Update receives the whole state: at once, and again after each change. It may
	// keep the slices. Watch calls it on its own goroutine; changes that come while
	// it runs are reported together afterwards.
	Update func(State)
	// Netns is the network namespace to watch, which may be closed when Watch
	// has returned. Nil means that of the calling thread.
	Netns *os.File
	// Log gets a warning when a subscription breaks and is renewed. Nil means
	// no log.
	Log *slog.Logger

	// 0 means the constant of that name.
	receiveBuffer         int // bytes
	relistTime, quietTime time.Duration
}

// Validate returns an error if the configuration lacks a field.
func (c Config) Validate() error {
	if c.Update == nil {
		return errors.New("node: Config.Update is nil")
	}

	return nil
}

// Watch reports the addresses and devices of this node, and every change, until ctx
// ends; then it returns nil. It reports the first change after a quiet time at once,
// and those of a burst together, at most 50 ms late. It reports an IPv6 address when
// duplicate address detection has succeeded.
//
// Watch returns an error only if it cannot begin. Later it renews a subscription
// that breaks, and lists everything again, so that no change is lost for good.
func Watch(ctx context.Context, config Config) error {
	if err := config.Validate(); err != nil {
		return err
	}
	config.receiveBuffer = cmp.Or(config.receiveBuffer, receiveBuffer)
	config.relistTime = cmp.Or(config.relistTime, relistTime)
	config.quietTime = cmp.Or(config.quietTime, quietTime)
	w := watcher{config: config, log: config.Log}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	if config.Netns != nil {
		w.ns = netns.NsHandle(config.Netns.Fd())
	} else {
		// Later sockets must not depend on the thread.
		ns, err := netns.Get()
		if err != nil {
			return fmt.Errorf("network namespace of this thread: %w", err)
		}
		defer ns.Close()
		w.ns = ns
	}

	return w.run(ctx)
}

// watcher is the state of a Watch.
type watcher struct {
	config Config
	log    *slog.Logger
	ns     netns.NsHandle

	reported *State        // nil before the first report
	next     time.Time     // of the earliest list after a notification
	retry    time.Duration // before the next subscription
}

// run follows a subscription, and a new one whenever it breaks.
func (w *watcher) run(ctx context.Context) error {
	for {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if w.reported == nil {
			return err
		}
		w.log.Warn("Watch of the node is renewed", "overrun", overrun(err), "err", err)
		if !sleep(ctx, w.retry) {
			return nil
		}
		w.retry = min(2*w.retry, lastRetry)
	}
}

// follow subscribes before it lists, so that no change is lost in between. It
// returns when the subscription breaks or ctx ends.
func (w *watcher) follow(ctx context.Context) error {
	s, err := subscribe(w.ns, w.config.receiveBuffer)
	if err != nil {
		return err
	}
	defer s.close()

	return w.listOnChange(ctx, s)
}

// listOnChange lists the node at once, after each change, and after relistTime.
func (w *watcher) listOnChange(ctx context.Context, s *subscription) error {
	if err := w.report(s); err != nil {
		return err
	}
	relist := time.NewTicker(w.config.relistTime)
	defer relist.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-s.broken:
			return err
		case <-relist.C:
		case <-s.changed:
			if !sleep(ctx, time.Until(w.next)) {
				return nil
			}
		}
		if err := w.report(s); err != nil {
			return err
		}
	}
}

// report lists the node, and reports its state if it has changed.
func (w *watcher) report(s *subscription) error {
	select {
	case <-s.changed: // the list below includes the change
	default:
	}
	begin := time.Now()
	state, err := list(s.handle, s.forwarding)
	if err != nil {
		return err
	}
	took := time.Since(begin)
	w.next, w.retry = begin.Add(took+max(w.config.quietTime, quietMultiple*took)), firstRetry
	if w.reported == nil || !w.reported.equal(state) {
		w.reported = &state
		w.config.Update(state.clone())
	}

	return nil
}

// sleep waits for the pause, and returns false if ctx ends before.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}
