package maps

import (
	"fmt"
	"time"
)

// BackendHealth is how a backend treats new connections of clients that this node translates.
type BackendHealth = abiBackendHealth

// HealthOf returns the health of the backend with this id; false if nothing is known of it.
func (t *Tables) HealthOf(id uint32) (BackendHealth, bool) {
	h := t.Health.Get(Index(id))

	return h, id != 0 && h.Id == id
}

// MayBeSuspects reports whether any backend is a suspect that may get a probe, or was within the last
// minutes: programs note it at place 0, which no backend has.
func (t *Tables) MayBeSuspects() bool { return t.Health.Get(0).Until != 0 }

// lookForSuspects is how long programs look for suspects after one was noted.
const lookForSuspects = time.Duration(abiHealthTimeHEALTH_LOOKED_FOR) * time.Millisecond

// NoteSuspects makes programs go on to look for suspects, of which none may get a probe for long: so the datagrams of
// sockets that stay open do not go back to one.
func (t *Tables) NoteSuspects() error {
	return t.Health.Put(0, BackendHealth{Until: Now() + uint64(lookForSuspects)})
}

// IsSuspect reports whether the backend is passed over, or probed.
func (h abiBackendHealth) IsSuspect() bool { return h.Suspected != 0 }

// HealthCause is why a backend is a suspect.
type HealthCause uint8

// The causes.
const (
	HealthUnanswered  = HealthCause(abiHealthCauseHEALTH_UNANSWERED)
	HealthRetransmit  = HealthCause(abiHealthCauseHEALTH_RETRANSMIT)
	HealthRefused     = HealthCause(abiHealthCauseHEALTH_REFUSED)
	HealthUnreachable = HealthCause(abiHealthCauseHEALTH_UNREACHABLE)
)

// String returns what the backend does.
func (c HealthCause) String() string {
	switch c {
	case HealthUnanswered:
		return "does not answer"
	case HealthRetransmit:
		return "does not answer first segments, which are sent again"
	case HealthRefused:
		return "refuses connections"
	case HealthUnreachable:
		return "is unreachable"
	}

	return fmt.Sprintf("cause %d", uint8(c))
}
