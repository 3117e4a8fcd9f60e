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

const (
	// atOnce is how long an error may take that Sluice makes. The kernel's own
	// come after three seconds (no such neighbour) or never.
	atOnce = time.Second

	// silence is how long a test waits before it takes a packet as dropped. A server that
	// answers later is not taken as one that dropped: see [driver.drive].
	silence = 300 * time.Millisecond
)

// way is one of the ways in which a program can send a flow on a path.
type way struct {
	lab.Exchange
	path path
	name string

	// masquerades is which address of the node a target sees instead of the
	// client's, if it does.
	masquerades func(target netip.AddrPort) (netip.Addr, bool)
}

// ways are the ways in which a program could send this flow.
func (s *scenario) ways(f flow, p path, want expected) []way {
	plain := lab.Exchange{Network: strings.ToLower(string(f.Protocol)), Address: f.dest().String()}
	bound, mapped := plain, plain
	bound.From = netip.AddrPortFrom(f.SourceIP, 0).String()
	if !p.socket {
		// What differs between programs, a device does not see.
		if slices.Equal(want.outcomes, []string{drop}) {
			bound.Timeout = silence
		}

		return []way{{Exchange: bound, path: p, name: "packets"}}
	}
	mapped.Network += "6"
	mapped.Address = netip.AddrPortFrom(netip.AddrFrom16(f.DestIP.As16()), f.DestPort).String()

	var ways []way
	canBind, needNotBind := s.binding(f, p, want)
	if canBind {
		ways = append(ways, way{Exchange: bound, path: p, name: "bound"})
	}
	if needNotBind {
		ways = append(ways, way{Exchange: plain, path: p, name: "unbound"})
	}
	if needNotBind && f.DestIP.Is4() {
		ways = append(ways, way{Exchange: mapped, path: p, name: "v4-mapped"})
	}
	if plain.Network != "udp" {
		return ways
	}
	connected := len(ways)
	for _, w := range ways {
		w.Unconnected = true
		w.name += " sendto"
		ways = append(ways, w)
	}
	// What a connected socket of the node sends to the node itself passes no device that could refuse it.
	own := f.DestIP.IsLoopback() || slices.Contains(s.Node.LocalIPs, f.DestIP)
	if refused := slices.Equal(want.outcomes, []string{reject}) || slices.Equal(want.outcomes, []string{drop}); p.from == onNode && own && refused {
		return ways[connected:]
	}

	return ways
}

// binding reports whether a socket can be bound to a flow's source, and whether one
// that is bound to nothing has that source, too.
func (s *scenario) binding(f flow, p path, want expected) (can, needNot bool) {
	if f.SourceIP.IsLoopback() {
		// A socket of 127.0.0.1 reaches only the node itself: the kernel
		// returns EINVAL. An unbound client of 127.0.0.1, however, has this address.
		can = !slices.ContainsFunc(want.outcomes, leavesNode)

		return can, f.DestIP.IsLoopback() || !can
	}

	return true, p.from == inPod || f.SourceIP == s.Node.PrimaryIP
}

func leavesNode(outcome string) bool {
	target, err := netip.ParseAddrPort(outcome)

	return err == nil && !target.Addr().IsLoopback()
}

// outcome returns the outcome of an exchange: the server that answered, [reject] or [drop], or
// else what is wrong in a word.
func (w way) outcome(reply lab.Reply, err error) string {
	if err != nil {
		return w.refusal(err, reply.Latency)
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

// refusal reads an error. A hook refuses a socket with an error of its own; a
// device that drops sends nothing.
func (w way) refusal(err error, after time.Duration) string {
	outcome := err.Error()
	atSocket := w.path.socket && (w.Unconnected || !strings.HasPrefix(w.Network, "udp")) // a connect() of UDP is not refused
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		outcome = reject
	case atSocket && errors.Is(err, unix.EHOSTUNREACH):
		outcome = drop
	case !atSocket && isSilence(err):
		return drop
	}
	if after > atOnce {
		outcome += fmt.Sprintf(" after %s", after)
	}

	return outcome
}

// inconsistency returns what would surprise an application: it must have the address that
// it bound to, and the peer that it dialed.
func (w way) inconsistency(reply lab.Reply, answer lab.Answer) string {
	target := unmapped(netip.MustParseAddrPort(w.Address))
	switch {
	case reply.Peer.IsValid() && unmapped(reply.Peer) != target:
		return "getpeername says " + reply.Peer.String()
	case reply.From.IsValid() && unmapped(reply.From) != target:
		return "recvfrom says " + reply.From.String()
	case w.From == "":
		return ""
	}
	client := netip.AddrPortFrom(netip.MustParseAddrPort(w.From).Addr(), unmapped(reply.Local).Port())
	if instead, masqueraded := w.masquerades(answer.Local); masqueraded {
		return strangeMasquerade(answer.Client, instead)
	}
	if answer.Client != client {
		return fmt.Sprintf("it saw %s, want %s", answer.Client, client)
	}

	return ""
}

// strangeMasquerade returns what is wrong with what a masqueraded client looks like.
// Its port is neither privileged, nor a node port, nor one that the kernel hands out.
func strangeMasquerade(seen netip.AddrPort, want netip.Addr) string {
	const privileged, nodePorts, handedOut = 1023, 30000, 60999
	port := seen.Port()
	if seen.Addr() != want || port <= privileged || port >= nodePorts && port <= handedOut {
		return fmt.Sprintf("it saw %s, want %s and a port that is no Service's", seen, want)
	}

	return ""
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
