package flows

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// atOnce is how long an error may take that a hook returns. The kernel's own
// come after three seconds (no such neighbour) or never.
const atOnce = time.Second

// way is one of the ways in which a program can send a flow.
type way struct {
	lab.Exchange
	name string
}

// ways are the ways in which a program could send this flow.
func (s *scenario) ways(f flow, want expected) []way {
	protocol := strings.ToLower(string(f.Protocol))
	plain := lab.Exchange{Network: protocol, Address: f.dest().String()}
	bound, mapped := plain, plain
	bound.From = netip.AddrPortFrom(f.SourceIP, 0).String()
	mapped.Network += "6"
	mapped.Address = netip.AddrPortFrom(netip.AddrFrom16(f.DestIP.As16()), f.DestPort).String()

	var ways []way
	canBind, needNotBind := s.binding(f, want)
	if canBind {
		ways = append(ways, way{bound, "bound"})
	}
	if needNotBind {
		ways = append(ways, way{plain, "unbound"})
	}
	if needNotBind && f.DestIP.Is4() {
		ways = append(ways, way{mapped, "v4-mapped"})
	}
	if protocol == "udp" {
		for _, w := range ways {
			w.Unconnected = true
			w.name += " sendto"
			ways = append(ways, w)
		}
	}

	return ways
}

// binding says whether a socket can be bound to a flow's source, and whether one
// that is bound to nothing has that source, too.
func (s *scenario) binding(f flow, want expected) (can, needNot bool) {
	if f.SourceIP.IsLoopback() {
		// A socket of 127.0.0.1 reaches nobody but the node itself: the kernel
		// says EINVAL. Who dials 127.0.0.1 unbound, however, is one.
		can = !slices.ContainsFunc(want.outcomes, leavesNode)

		return can, f.DestIP.IsLoopback() || !can
	}
	from, _ := s.sourceOf(f)

	return true, from == fromPod || f.SourceIP == s.Node.PrimaryIP
}

func leavesNode(outcome string) bool {
	target, err := netip.ParseAddrPort(outcome)

	return err == nil && !target.Addr().IsLoopback()
}

// dial sends a flow once, and returns what it came to: who answered, [reject] or
// [drop], or else what is wrong in a word.
func dial(caller *lab.Caller, w way) string {
	reply, err := caller.Exchange(w.Exchange)
	if err != nil {
		return refusal(err, reply.Latency)
	}
	answer, err := lab.ParseAnswer(reply.Text)
	if err != nil {
		return err.Error()
	}
	if wrong := w.inconsistency(reply, answer); wrong != "" {
		return fmt.Sprintf("%s, but %s", answer.Local, wrong)
	}

	return answer.Local.String()
}

func refusal(err error, after time.Duration) string {
	outcome := err.Error()
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		outcome = reject
	case errors.Is(err, unix.EHOSTUNREACH):
		outcome = drop
	}
	if after > atOnce {
		outcome += fmt.Sprintf(" after %s", after)
	}

	return outcome
}

// inconsistency says what an application would wonder at: it has the address that
// it asked for, and talks to whom it dialled.
func (w way) inconsistency(reply lab.Reply, answer lab.Answer) string {
	dialled := unmapped(netip.MustParseAddrPort(w.Address))
	switch {
	case reply.Peer.IsValid() && unmapped(reply.Peer) != dialled:
		return "getpeername says " + reply.Peer.String()
	case reply.From.IsValid() && unmapped(reply.From) != dialled:
		return "recvfrom says " + reply.From.String()
	case w.From == "":
		return ""
	}
	if from := netip.MustParseAddrPort(w.From).Addr(); answer.Client.Addr() != from {
		return "it saw " + answer.Client.String()
	}

	return ""
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
