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
	// quietTime is how long after one look at the node the next may come. On a
	// node with a great many routes it is a multiple of what a look takes.
	quietTime     = 50 * time.Millisecond
	quietMultiple = 10
	// relistTime is after how long we look although nothing seems to have changed.
	relistTime = time.Minute
	// A subscription that breaks again and again is renewed ever more slowly.
	firstRetry = quietTime
	lastRetry  = 10 * time.Second
	// receiveBuffer has room for what a hundred new pods cause at once.
	receiveBuffer = 4 << 20
)

// Config says what to watch and whom to tell.
type Config struct {
	// Update gets all there is: at once, and again whenever something of it has
	// changed. It may keep the slices. It is called by Watch itself, never twice
	// at a time; while it runs, changes gather.
	Update func(State)
	// Netns is the network namespace to watch, which may be closed when Watch
	// has returned. Nil means that of the calling thread.
	Netns *os.File
	// Log gets a warning when a subscription breaks and is renewed. Nil means
	// no log.
	Log *slog.Logger

	// 0 means the constants.
	receiveBuffer         int // bytes
	relistTime, quietTime time.Duration
}

// Validate says what is wrong with the configuration.
func (c Config) Validate() error {
	if c.Update == nil {
		return errors.New("node: Config.Update is nil")
	}

	return nil
}

// Watch tells the addresses and devices of this node, and every change, until ctx
// ends; then it returns nil. The first change after a quiet time is told at once, those of
// a burst together, at most 50 ms late. IPv6 addresses count from the end of
// duplicate address detection.
//
// Watch returns an error only if it cannot begin. Later it recovers: each time it
// tells what the kernel lists, so that nothing is lost for good.
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

// watcher is a Watch under way.
type watcher struct {
	config Config
	log    *slog.Logger
	ns     netns.NsHandle

	told  *State // nil before the first time
	next  time.Time
	retry time.Duration
}

// run follows one subscription after the other.
func (w *watcher) run(ctx context.Context) error {
	for {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if w.told == nil {
			return err
		}
		w.log.Warn("Watch of the node is renewed", "overrun", overrun(err), "err", err)
		if !sleep(ctx, w.retry) {
			return nil
		}
		w.retry = min(2*w.retry, lastRetry)
	}
}

// follow subscribes first and looks then, so that no change is lost between. It
// returns when the subscription breaks or ctx ends.
func (w *watcher) follow(ctx context.Context) error {
	s, err := subscribe(w.ns, w.config.receiveBuffer)
	if err != nil {
		return err
	}
	defer s.close()

	return w.heed(ctx, s)
}

// heed looks at once, after each change, and now and then.
func (w *watcher) heed(ctx context.Context, s *subscription) error {
	if err := w.look(s); err != nil {
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
		if err := w.look(s); err != nil {
			return err
		}
	}
}

// look lists what there is and tells it if it is not as before.
func (w *watcher) look(s *subscription) error {
	select {
	case <-s.changed: // the list that follows has it
	default:
	}
	begin := time.Now()
	state, err := list(s.handle, s.forwarding)
	if err != nil {
		return err
	}
	took := time.Since(begin)
	w.next, w.retry = begin.Add(took+max(w.config.quietTime, quietMultiple*took)), firstRetry
	if w.told == nil || !w.told.equal(state) {
		w.told = &state
		w.config.Update(state.clone())
	}

	return nil
}

// sleep is false if ctx ends before the time is over.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}
