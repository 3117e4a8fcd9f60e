package flow

import (
	"cmp"
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
//	UDPUnanswered  UDP: unanswered         30 s     netfilter's udp_timeout
//	UDPAnswered    UDP: answered           120 s    netfilter's udp_timeout_stream
//
// In an emergency, see [Status], some are shorter: Closing and UDPAnswered 30 s,
// UDPUnanswered 10 s, Closed 1 s. Connections that work are never hurried.
type Timeouts struct {
	Opening       time.Duration
	Established   time.Duration
	Closing       time.Duration
	Closed        time.Duration
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
		UDPUnanswered: cmp.Or(t.UDPUnanswered, 30*time.Second),
		UDPAnswered:   cmp.Or(t.UDPAnswered, 120*time.Second),
	}
}

// hurried is for when there is no room: what has ended, or may have, goes before
// the table pushes out what has not.
func (t Timeouts) hurried() Timeouts {
	t.Closing = min(t.Closing, 30*time.Second)
	t.Closed = min(t.Closed, time.Second)
	t.UDPUnanswered = min(t.UDPUnanswered, 10*time.Second)
	t.UDPAnswered = min(t.UDPAnswered, 30*time.Second)

	return t
}

func (t Timeouts) of(s State) time.Duration {
	switch s {
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
