package flow

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Timeouts are how long a flow without packets is kept. A zero is the default:
//
//	field          state of the flow       default  as
//	Opening        TCP, SCTP: opening      120 s    netfilter's SYN_SENT
//	Established    TCP, SCTP: established  24 h     kube-proxy's tcpEstablishedTimeout
//	Closing        TCP, SCTP: closing      1 h      kube-proxy's tcpCloseWaitTimeout
//	Closed         TCP, SCTP: closed       10 s     netfilter's CLOSE
//	TimeWait       TCP: closed, see below  60 s     Linux's TIME_WAIT
//	UDPUnanswered  UDP: unanswered         30 s     netfilter's udp_timeout
//	UDPAnswered    UDP: answered           120 s    netfilter's udp_timeout_stream
//
// A masqueraded flow that the backend has closed first is kept while the backend has it in
// TIME_WAIT: programs need it to know which SYN the backend accepts from that port. Such flows may
// use half of the table; beyond that the timeout shrinks as the table fills, down to that of all
// closed flows. If thousands of them expired at once, as many clients would try ports that the
// backend refuses.
//
// In an emergency, see [Status], some timeouts are shorter: Closing and UDPAnswered 30 s,
// UDPUnanswered 10 s, Closed and TimeWait 1 s. Those of established connections never are.
type Timeouts struct {
	Opening       time.Duration
	Established   time.Duration
	Closing       time.Duration
	Closed        time.Duration
	TimeWait      time.Duration
	UDPUnanswered time.Duration
	UDPAnswered   time.Duration
}

// refresh is how much earlier than the last packet LastSeen may be: programs only update it when
// it is older than that.
const refresh = time.Second

func (t Timeouts) orDefault() Timeouts {
	return Timeouts{
		Opening:       cmp.Or(t.Opening, 120*time.Second),
		Established:   cmp.Or(t.Established, 24*time.Hour),
		Closing:       cmp.Or(t.Closing, time.Hour),
		Closed:        cmp.Or(t.Closed, 10*time.Second),
		TimeWait:      cmp.Or(t.TimeWait, 60*time.Second),
		UDPUnanswered: cmp.Or(t.UDPUnanswered, 30*time.Second),
		UDPAnswered:   cmp.Or(t.UDPAnswered, 120*time.Second),
	}
}

// inEmergency returns the timeouts for a full table: flows that have ended, or may have, go before
// the kernel evicts others.
func (t Timeouts) inEmergency() Timeouts {
	t.Closing = min(t.Closing, 30*time.Second)
	t.Closed = min(t.Closed, time.Second)
	t.TimeWait = min(t.TimeWait, time.Second)
	t.UDPUnanswered = min(t.UDPUnanswered, 10*time.Second)
	t.UDPAnswered = min(t.UDPAnswered, 30*time.Second)

	return t
}

// Up to timeWaitPercent of the table flows are kept for all of TimeWait, from closedPercent on only as
// long as other closed ones.
const (
	timeWaitPercent = 50
	closedPercent   = fullPercent
)

// at returns the timeouts for a table that was so full at the last scan.
func (t Timeouts) at(percent int) Timeouts {
	const steps = closedPercent - timeWaitPercent
	share := time.Duration(min(max(closedPercent-percent, 0), steps))
	t.TimeWait = max(t.TimeWait*share/steps, min(t.TimeWait, t.Closed))

	return t
}

// isTimeWait reports whether the backend has a closed flow in TIME_WAIT, by one of its entries.
func isTimeWait(f *maps.Flow) bool {
	return f.IsMasqueraded() && f.Ending&maps.FlowTimeWait != 0
}

func (t Timeouts) of(g *group) time.Duration {
	state := g.state()
	if state == Closed && slices.ContainsFunc(g.entries, func(e entry) bool { return isTimeWait(&e.value) }) {
		return t.TimeWait
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

// soonest returns the shortest timeout that a flow with an entry f may have. All of its entries
// together may have a longer one; but if a flow is idle, it is so by soonest for one of its entries.
func (t Timeouts) soonest(f *maps.Flow, halfOpen bool) time.Duration {
	switch {
	case f.Proto == protoUDP && halfOpen:
		return t.UDPUnanswered
	case f.Proto == protoUDP:
		return t.UDPAnswered
	case isTimeWait(f):
		return t.TimeWait
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
