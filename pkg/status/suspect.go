package status

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Suspect is why a backend gets no new connections from this node for a while, as long as at most
// half of the backends of a frontend are suspects: see docs/healing.md.
type Suspect struct {
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
	// Until is when it gets the next connection, as a probe.
	Until time.Time `json:"until"`
}

// bootTime returns when the clock of programs was zero.
func bootTime() (time.Time, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return time.Time{}, fmt.Errorf("clock: %w", err)
	}

	return time.Now().Add(-time.Duration(now.Nano())), nil
}

func suspectOf(h maps.BackendHealth, boot time.Time) *Suspect {
	at := func(ns uint64) time.Time { return boot.Add(time.Duration(ns)).Round(time.Millisecond).UTC() }

	return &Suspect{Reason: maps.HealthCause(h.Cause).String(), Since: at(h.Suspected), Until: at(h.Until)}
}

// healingOf returns how the flags of a pool limit healing.
func healingOf(flags uint16) string {
	switch {
	case flags&maps.PoolNoEject != 0:
		return lb.HealOff.String()
	case flags&maps.PoolNoResteer != 0:
		return lb.HealEject.String()
	}

	return ""
}
