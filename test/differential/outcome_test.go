package differential

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// outcome is the result of a dial: a server answered, or it failed.
type outcome struct {
	failure failure

	server string
	at     netip.AddrPort // where the server was asked
	seen   string         // the client as it saw it: theClient, or an address
}

// theClient is any of the client's own addresses.
const theClient = "the client"

// failure is how a dial fails.
type failure string

const (
	refused     failure = "refused"
	silence     failure = "silence"
	unreachable failure = "no route to host"

	// The kernel returns EPERM where netfilter drops what a socket of the node
	// sends; if it was rejected, there is more to be read from the socket.
	permRefused failure = "operation not permitted, and refused"
	permDropped failure = "operation not permitted"
)

func (o outcome) String() string {
	if o.failure != "" {
		return string(o.failure)
	}

	return fmt.Sprintf("%s at %s sees %s", o.server, o.at, o.seen)
}

// outcomes count how often each came.
type outcomes map[outcome]int

func (o outcomes) String() string {
	var all []string
	for one, count := range o {
		all = append(all, fmt.Sprintf("%s (%d)", one, count))
	}
	slices.Sort(all)

	return strings.Join(all, "; ")
}

// set are the outcomes without their counts.
func (o outcomes) set() []outcome {
	return slices.SortedFunc(maps.Keys(o), func(a, b outcome) int { return strings.Compare(a.String(), b.String()) })
}

// dial dials an address once, from the client's nth address, and waits so long
// for the answer.
func (s *side) dial(c *client, protocol string, to netip.AddrPort, n int, timeout time.Duration) (outcome, error) {
	caller := s.callers[c.name]
	reply, err := caller.Exchange(lab.Exchange{
		Network: protocol, Address: to.String(), From: c.from(familyOf(to.Addr()), n), Timeout: timeout,
	})
	switch errno := lab.Errno(err); errno {
	case 0:
		return c.outcomeOf(reply)
	case unix.ECONNREFUSED:
		return outcome{failure: refused}, nil
	case unix.ETIMEDOUT:
		return outcome{failure: silence}, nil
	case unix.EHOSTUNREACH:
		return outcome{failure: unreachable}, nil
	case unix.EPERM:
		return s.dialAgain(caller, protocol, to)
	default:
		return outcome{}, fmt.Errorf("%s dials %s/%s: %w", c.name, protocol, to, err)
	}
}

func (c *client) outcomeOf(reply lab.Reply) (outcome, error) {
	answer, err := lab.ParseAnswer(reply.Text)
	if err != nil {
		return outcome{}, err
	}
	o := outcome{server: answer.Name, at: answer.Local, seen: answer.Client.Addr().String()}
	if c.isOwn(answer.Client.Addr()) {
		o.seen = theClient
	}
	if o.server == elsewhere {
		o.at = netip.AddrPort{} // one of the gateway's
	}

	return o, nil
}

// dialAgain finds out the cause of EPERM, from a connected UDP socket: an ICMP
// error for what netfilter rejected is there at once.
func (s *side) dialAgain(caller *lab.Caller, protocol string, to netip.AddrPort) (outcome, error) {
	socket, err := caller.Socket(protocol + map[family]string{ipv4: "4", ipv6: "6"}[familyOf(to.Addr())])
	if err != nil {
		return outcome{}, err
	}
	defer socket.Close()
	if err := socket.Connect(to.String()); err != nil {
		return outcome{}, err
	}
	if err := socket.Send("who\n"); lab.Errno(err) != unix.EPERM {
		return outcome{}, fmt.Errorf("send to %s: %w, and EPERM before", to, err)
	}
	pending, err := socket.Option(unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return outcome{}, err
	}
	if pending == int(unix.ECONNREFUSED) {
		return outcome{failure: permRefused}, nil
	}

	return outcome{failure: permDropped}, nil
}
