package status

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
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

// SuspectOf returns why the backend with this id is a suspect, or nil if it is none. Suspects exist
// only while healing is on.
func SuspectOf(m *maps.Tables, id uint32) (*Suspect, error) {
	h, known := m.HealthOf(id)
	if !known || !h.IsSuspect() {
		return nil, nil
	}
	boot := time.Now().Add(-time.Duration(flow.Now())) // when the clock of programs was zero
	at := func(ns uint64) time.Time { return boot.Add(time.Duration(ns)).Round(time.Millisecond).UTC() }

	return &Suspect{Reason: maps.HealthCause(h.Cause).String(), Since: at(h.Suspected), Until: at(h.Until)}, nil
}

// String returns what the backend does, and for how long it is passed over.
func (s Suspect) String() string {
	if pause := time.Until(s.Until).Round(time.Second); pause > 0 {
		return fmt.Sprintf("suspect: %s; passed over for %v", s.Reason, pause)
	}

	return fmt.Sprintf("suspect: %s; the next connection is a probe", s.Reason)
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
