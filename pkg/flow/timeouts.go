package flow

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Timeouts say how long a flow is kept that no packet is seen of. A zero is the
// default:
//
//	field          state of the flow       default  as
//	Opening        TCP, SCTP: opening      120 s    netfilter's SYN_SENT
//	Established    TCP, SCTP: established  24 h     kube-proxy's tcpEstablishedTimeout
//	Closing        TCP, SCTP: closing      1 h      kube-proxy's tcpCloseWaitTimeout
//	Closed         TCP, SCTP: closed       10 s     netfilter's CLOSE
//	Remembered     TCP: closed, see below  60 s     Linux's TIME_WAIT
//	UDPUnanswered  UDP: unanswered         30 s     netfilter's udp_timeout
//	UDPAnswered    UDP: answered           120 s    netfilter's udp_timeout_stream
//
// A masqueraded flow that the backend has closed first is kept for as long as the backend
// remembers it: programs know by it which SYN the backend takes from that port. That is worth
// half of the table; the fuller it is beyond that, the shorter, until such flows are like all
// that are closed. To forget thousands of them at once would have as many clients try ports
// that the backend refuses.
//
// In an emergency, see [Status], some are shorter: Closing and UDPAnswered 30 s,
// UDPUnanswered 10 s, Closed and Remembered 1 s. Connections that work are never hurried.
type Timeouts struct {
	Opening       time.Duration
	Established   time.Duration
	Closing       time.Duration
	Closed        time.Duration
	Remembered    time.Duration
	UDPUnanswered time.Duration
	UDPAnswered   time.Duration
}

// refresh is how much later a packet may have been seen than an entry says:
// programs write it only if that is longer ago.
const refresh = time.Second

func (t Timeouts) orDefault() Timeouts {
	return Timeouts{
		Opening:       cmp.Or(t.Opening, 120*time.Second),
		Established:   cmp.Or(t.Established, 24*time.Hour),
		Closing:       cmp.Or(t.Closing, time.Hour),
		Closed:        cmp.Or(t.Closed, 10*time.Second),
		Remembered:    cmp.Or(t.Remembered, 60*time.Second),
		UDPUnanswered: cmp.Or(t.UDPUnanswered, 30*time.Second),
		UDPAnswered:   cmp.Or(t.UDPAnswered, 120*time.Second),
	}
}

// hurried is for when there is no room: what has ended, or may have, goes before
// the table pushes out what has not.
func (t Timeouts) hurried() Timeouts {
	t.Closing = min(t.Closing, 30*time.Second)
	t.Closed = min(t.Closed, time.Second)
	t.Remembered = min(t.Remembered, time.Second)
	t.UDPUnanswered = min(t.UDPUnanswered, 10*time.Second)
	t.UDPAnswered = min(t.UDPAnswered, 30*time.Second)

	return t
}

// Up to which percent of the table flows are kept for all of Remembered, and from which on
// only as if they were closed.
const (
	rememberedPercent = 50
	forgottenPercent  = fullPercent
)

// at returns the timeouts for a table that was so full at the last look.
func (t Timeouts) at(percent int) Timeouts {
	const steps = forgottenPercent - rememberedPercent
	share := time.Duration(min(max(forgottenPercent-percent, 0), steps))
	t.Remembered = max(t.Remembered*share/steps, min(t.Remembered, t.Closed))

	return t
}

// isRemembered says that the backend of a flow that is closed still knows it, by any of its
// entries.
func isRemembered(f *maps.Flow) bool {
	return f.IsMasqueraded() && f.Ending&maps.FlowRemembered != 0
}

func (t Timeouts) of(g *group) time.Duration {
	state := g.state()
	if state == Closed && slices.ContainsFunc(g.entries, func(e entry) bool { return isRemembered(&e.value) }) {
		return t.Remembered
	}
	switch state {
	case Opening:
		return t.Opening
	case Closing:
		return t.Closing
	case Closed:
		return t.Closed
	case Unanswered:
		return t.UDPUnanswered
	case Answered:
		return t.UDPAnswered
	default:
		return t.Established
	}
}

// soonest is after what time a flow may be over of which one entry says f. All
// of its entries together may say that it is not. But if it is, then one of its
// entries says so here.
func (t Timeouts) soonest(f *maps.Flow, halfOpen bool) time.Duration {
	switch {
	case f.Proto == protoUDP && halfOpen:
		return t.UDPUnanswered
	case f.Proto == protoUDP:
		return t.UDPAnswered
	case isRemembered(f):
		return t.Remembered
	case f.State == maps.FlowReset:
		return t.Closed
	case f.State == maps.FlowFin:
		return min(t.Closing, t.Closed)
	case halfOpen:
		return t.Opening
	default:
		return t.Established
	}
}
