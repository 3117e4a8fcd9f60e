package agent

import (
	"context"
	"time"
)

// graceInterval is the least time from the start of one grace period to that of the next, so
// that endpoints which go one by one are retired together. The system call that waits for
// programs blocks a thread for as long as it takes, and costs as much as several changes.
const graceInterval = time.Second

// grace is the state of grace periods. What was taken out of the maps is used again only
// after all programs have ended that may still use it.
type grace struct {
	// wait returns when all programs have ended that run now: [maps.Pinned.WaitForPrograms].
	// Nil: no program uses the maps.
	wait    func() error
	running bool
	begun   time.Time // the last one
}

// beginGrace starts a grace period if something was retired. If the last one started too
// recently, it returns how long to wait, else zero.
func (a *agent) beginGrace(ctx context.Context) time.Duration {
	if a.grace.running || !a.writer.Retired() {
		return 0
	}
	if rest := time.Until(a.grace.begun.Add(graceInterval)); rest > 0 {
		return rest
	}
	a.grace.running, a.grace.begun = true, time.Now()
	a.writer.BeginGrace()
	go a.waitForPrograms(ctx)

	return 0
}

// waitForPrograms ends the grace period when all programs have ended. The loop does not wait
// for it.
func (a *agent) waitForPrograms(ctx context.Context) {
	for failed := false; a.grace.wait != nil; {
		err := a.grace.wait()
		if err == nil {
			break
		}
		if !failed {
			a.cfg.Log.Error("what was taken out of the maps cannot be used again; trying again", "error", err)
		}
		failed = true
		select {
		case <-ctx.Done():
			return
		case <-time.After(graceInterval):
		}
	}
	a.queue.enqueue(func(*model) {
		a.grace.running = false
		a.writer.EndGrace()
	})
}
