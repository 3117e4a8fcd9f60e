package differential

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// lasting is a pair of connections, one on each side, of the same client by the
// same frontend to the same backend. What a change does to one, it must do to the
// other.
type lasting struct {
	client   *client
	frontend frontend
	service  string // of the frontend, at that time
	to       netip.AddrPort
	sockets  [2]*lab.Socket
	fates    [2]fate // after the change
}

// fate is the state of a connection after a change.
type fate struct {
	kept  bool
	ended bool // the socket was destroyed
	other outcome
}

func (f fate) String() string {
	switch {
	case f.kept:
		return "kept"
	case f.ended:
		return "ended"
	case f.other.failure != "":
		return string(f.other.failure)
	default:
		return "moved to " + f.other.at.String()
	}
}

// How many pairs there are at most: some over random changes, and many over those
// after which every difference must have been seen.
const (
	somePairs = 24
	manyPairs = 120
)

// connect opens pairs of connections by frontends that backends answer by, as many
// for UDP as for TCP. They are chosen at random, not by the seed: which backends were
// reached is random, too.
func (c *comparison) connect(all []frontend, limit int) ([]*lasting, error) {
	var may []*lasting
	for _, f := range all {
		for _, from := range clients {
			got, ok := c.reached[dialKey{from, f.key()}]
			if ok && !f.like.IsValid() && c.reference(from, f) == from && len(backendsIn(got[0])) > 0 && len(backendsIn(got[1])) > 0 {
				may = append(may, &lasting{client: from, frontend: f, service: f.service})
			}
		}
	}
	rand.Shuffle(len(may), func(i, k int) { may[i], may[k] = may[k], may[i] })
	slices.SortStableFunc(may, func(a, b *lasting) int { return cmp.Compare(b.frontend.protocol, a.frontend.protocol) })
	if len(may) > limit {
		may = slices.Concat(may[:limit/2], may[len(may)-limit/2:])
	}
	var pairs []*lasting
	for _, l := range may {
		ok, err := c.pair(l)
		if err != nil {
			return nil, err
		}
		if ok {
			pairs = append(pairs, l)
		}
	}

	return pairs, nil
}

// backendsIn are the servers without the one at the gateway.
func backendsIn(all outcomes) []outcome {
	return slices.DeleteFunc(all.set(), func(o outcome) bool { return o.failure != "" || o.server == elsewhere })
}

// pair opens one connection on kube-proxy's side, and others on Sluice's until one
// goes to the same backend. It returns false for a pair that
// cannot be opened: an old flow may be in the way.
func (c *comparison) pair(l *lasting) (bool, error) {
	const tries = 30
	var unwanted error
	for n := range tries {
		for i, s := range c.sides {
			if l.sockets[i] != nil {
				continue
			}
			socket, to, err := s.open(l.client, l.frontend, l.frontend.number()+n)
			switch {
			case err != nil:
			case i == 0:
				l.sockets[0], l.to = socket, to
			case to == l.to:
				l.sockets[1] = socket
				return true, unwanted
			default:
				unwanted = errors.Join(unwanted, socket.Close())
			}
		}
	}
	if l.sockets[0] != nil {
		unwanted = errors.Join(unwanted, l.sockets[0].Close())
	}

	return false, unwanted
}

// open connects, and returns the backend.
func (s *side) open(c *client, f frontend, n int) (*lab.Socket, netip.AddrPort, error) {
	of := familyOf(f.address.Addr())
	socket, err := s.callers[c.name].Socket(f.protocol + []string{"4", "6"}[of])
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	if from := c.from(of, n); from != "" {
		err = socket.Bind(from)
	}
	if err == nil {
		err = socket.SetTimeout(timeouts[len(timeouts)-1])
	}
	if err == nil {
		err = socket.Connect(f.address.String())
	}
	var to netip.AddrPort
	if err == nil {
		to, err = ask(socket)
	}
	if err != nil {
		return nil, to, errors.Join(fmt.Errorf("%s of %s connects to %s: %w", c.name, s.name, f, err), socket.Close())
	}

	return socket, to, nil
}

// ask asks the server at the other end for its address.
func ask(socket *lab.Socket) (netip.AddrPort, error) {
	if err := socket.Send("who\n"); err != nil {
		return netip.AddrPort{}, err
	}
	text, _, err := socket.Recv()
	if err != nil {
		return netip.AddrPort{}, err
	}
	if text == "" {
		return netip.AddrPort{}, unix.ECONNRESET
	}
	answer, err := lab.ParseAnswer(text)

	return answer.Local, err
}

// learn sets the fates of both connections.
func (l *lasting) learn() {
	for i, socket := range l.sockets {
		if err := socket.SetTimeout(timeouts[1]); err != nil {
			l.fates[i] = fate{other: outcome{failure: failure(err.Error())}}
			continue
		}
		to, err := ask(socket)
		l.fates[i] = fateOf(l.to, to, err)
	}
}

func fateOf(was, is netip.AddrPort, err error) fate {
	switch errno := lab.Errno(err); errno {
	case 0:
		return fate{kept: is == was, other: outcome{at: is}}
	case unix.ECONNABORTED, unix.EDESTADDRREQ: // it depends on the kernel which
		return fate{ended: true}
	case unix.ECONNREFUSED:
		return fate{other: outcome{failure: refused}}
	case unix.ETIMEDOUT:
		return fate{other: outcome{failure: silence}}
	case unix.EHOSTUNREACH:
		return fate{other: outcome{failure: unreachable}}
	case unix.EPERM:
		return fate{other: outcome{failure: permDropped}}
	default:
		return fate{other: outcome{failure: failure(err.Error())}}
	}
}

// compareFates compares what a change did to the connections of each pair, and closes
// them.
func (c *comparison) compareFates(pairs []*lasting) error {
	var comparing errgroup.Group
	for _, l := range pairs {
		comparing.Go(func() error {
			var used, text string
			for attempt := range c.attempts {
				time.Sleep(time.Duration(attempt) * 300 * time.Millisecond)
				l.learn()
				if used, text = c.fatesDiffer(l); text == "" {
					break
				}
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if text != "" {
				f := l.frontend
				f.service = l.service
				c.wrongs = append(c.wrongs, wrong{l.client, f, text})
			}
			if used != "" {
				c.seen[used]++
			}
			return errors.Join(l.sockets[0].Close(), l.sockets[1].Close())
		})
	}

	return comparing.Wait()
}

// Names of differences in what changes do to connections.
const (
	endsStale     = "a UDP flow of a backend or frontend that is gone is ended"
	endsSocket    = "a UDP socket of the node whose datagrams to a backend that is gone pass no device is ended"
	keepsUnserved = "a ready endpoint that does not serve keeps its UDP flows"
)

// fatesDiffer returns which listed difference explains the fates of a pair, or what is
// wrong with them.
func (c *comparison) fatesDiffer(l *lasting) (used, wrong string) {
	reference, candidate := l.fates[0], l.fates[1]
	if reference.kept && candidate.kept {
		return "", ""
	}
	// A proxy may apply every change by itself, or several at once. Mostly Sluice
	// applies every one.
	usable, now := true, c.objects.usable(l.service, l.to) && c.isThere(c.objects, l)
	for _, o := range c.way {
		usable = usable && o.usable(l.service, l.to) && c.isThere(o, l)
	}
	reason := ""
	switch {
	case l.frontend.protocol == "tcp":
	case candidate.ended && l.client.place == onNode && l.to.Addr() == hostAddresses(1)[familyOf(l.to.Addr())] && !usable:
		reason = endsSocket
	case reference.kept && !usable:
		reason = endsStale
	case candidate.kept && now && !usable:
		return "", "" // here kube-proxy did
	case candidate.kept && now:
		reason = keepsUnserved
	case !reference.kept && !candidate.kept && !candidate.ended:
		return "", "" // comparing dials checks where they go now
	}
	if slices.ContainsFunc(c.listed, func(d difference) bool { return d.name == reason }) {
		return reason, ""
	}

	return "", fmt.Sprintf("\n\ta connection to %s is %s with kube-proxy, and %s with Sluice; it may be used: %t",
		l.to, reference, candidate, usable)
}

// isThere reports whether the frontend of a pair is one of its Service.
func (c *comparison) isThere(o objects, l *lasting) bool {
	svc := o.services[l.service]
	if svc == nil {
		return false
	}
	if _, other := svc.Labels[proxyNameLabel]; other {
		return false
	}
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		if ingress.IP == l.frontend.address.Addr().String() && *ingress.IPMode == corev1.LoadBalancerIPModeProxy {
			return false
		}
	}

	return slices.ContainsFunc(c.settings.frontendsOf(svc), func(f frontend) bool {
		return f.key() == l.frontend.key() && f.kind == l.frontend.kind
	})
}

// usable reports whether an endpoint of a Service is ready, or serves.
func (o objects) usable(service string, at netip.AddrPort) bool {
	svc := o.services[service]
	if svc == nil {
		return false
	}
	is := func(p *bool, unset bool) bool { return p == nil && unset || p != nil && *p }
	for _, slice := range o.slicesOf(service) {
		if _, headless := slice.Labels[corev1.IsHeadlessService]; headless {
			continue
		}
		port := slices.ContainsFunc(slice.Ports, func(p discoveryv1.EndpointPort) bool {
			return *p.Port == int32(at.Port()) && *p.Protocol == corev1.ProtocolUDP &&
				slices.ContainsFunc(svc.Spec.Ports, func(of corev1.ServicePort) bool { return of.Name == *p.Name && of.Protocol == *p.Protocol })
		})
		for _, e := range slice.Endpoints {
			if port && e.Addresses[0] == at.Addr().String() && (is(e.Conditions.Ready, true) || is(e.Conditions.Serving, true)) {
				return true
			}
		}
	}

	return false
}
