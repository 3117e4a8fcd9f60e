package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/lab"
)

// path is how clients reach the Service.
type path struct {
	name, title string
	network     string
	outside     bool
	episodes    []string // that are measured; nil: all
}

// timeout is that of connect in an application that has one, and that of a resolver.
const timeout = 3 * time.Second

var paths = []path{
	{name: "pod-tcp", title: "pods → ClusterIP, TCP, which give up after 3 s", network: "tcp"},
	{name: "nodeport-tcp", title: "clients outside → NodePort, TCP, which give up after 3 s", network: "tcp", outside: true},
	{name: "pod-udp", title: "pods → ClusterIP, UDP, each from a new connected socket, which asks again each second and gives up after 3 s", network: "udp"},
	{name: "nodeport-udp", title: "clients outside → NodePort, UDP, as from pods", network: "udp", outside: true, episodes: []string{"vanish", "refuse"}},
}

// has reports whether an episode is measured on the path.
func (p path) has(e episode) bool { return p.episodes == nil || slices.Contains(p.episodes, e.name) }

// phases are how long a measurement takes: as all is well, in the episode, and after it.
type phases struct{ healthy, episode, after time.Duration }

// Result is one measurement: an episode at one side, on one path.
type Result struct {
	Round   int
	Path    string
	Episode string
	Side    string

	// The phases have the connections that began in them.
	Healthy Phase
	During  Phase
	After   Phase

	// Into are the new connections that went to those that are hit, but for probes: single ones
	// after many had gone to others. Until is when the last of them did, from the begin.
	Into   int
	Until  Seconds
	Probes int
	// PassedOver is how often one of those that are hit got none of many new connections, and
	// Wrong how often one of the others did.
	PassedOver int
	Wrong      int
	// Back is when, from the end of the episode, the last of those that were hit got new
	// connections as the others do; nil if it did not before the end of the measurement.
	Back *Seconds
}

// Seconds is a time.
type Seconds float64

// Phase is what clients saw.
type Phase struct {
	Dials int
	// Failed got no connection, or, for UDP, no answer. Lost got a connection, whose backend then
	// did not answer.
	Failed  int
	Lost    int
	Reasons map[string]int

	// Quantiles of the time of all, in milliseconds. Those that failed took longer than any other: a
	// quantile that is one of them is infinite.
	P50     Millis
	P99     Millis
	P999    Millis
	Longest Millis

	times []time.Duration // in order; those that failed are forever
}

// Millis is a time in milliseconds, +Inf if there was no end.
type Millis float64

const forever = time.Duration(math.MaxInt64)

// grace is how much longer than its phases and the timeout of the last connection a measurement may take.
const grace = 30 * time.Second

// measure makes connections to a Service without a pause before, in and after an episode.
func (s *side) measure(ctx context.Context, service int, p path, e episode, rate int, in phases) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, in.healthy+in.episode+in.after+timeout+grace)
	defer cancel()
	tap, err := startTap(s.Uplink, s.node().Name, backendPort)
	if err != nil {
		return Result{}, err
	}
	var dials []load.Dial
	done := make(chan error, 1)
	go func() {
		var err error
		dials, err = s.dial(ctx, service, p, load.Dials{Rate: rate, Duration: in.healthy + in.episode + in.after})
		done <- err
	}()
	time.Sleep(in.healthy)
	before := load.Clock()
	end, err := e.begin(s)
	began := load.Clock()
	if err == nil {
		time.Sleep(in.episode)
	}
	if end != nil {
		err = errors.Join(err, end())
	}
	ended := load.Clock()
	err = errors.Join(err, <-done)
	arrivals, failed := tap.stop()
	if err = errors.Join(err, failed); err != nil {
		return Result{}, fmt.Errorf("%s of %s at %s: %w", e.name, p.name, s.kind, err)
	}
	if len(dials) == 0 {
		return Result{}, fmt.Errorf("%s of %s at %s: no connection was tried", e.name, p.name, s.kind)
	}
	between := func(from, to time.Duration) Phase {
		return phaseOf(slices.DeleteFunc(slices.Clone(dials), func(d load.Dial) bool { return d.Began < from || d.Began >= to }))
	}
	r := Result{
		Path: p.name, Episode: e.name, Side: s.kind,
		Healthy: between(0, before), During: between(before, ended), After: between(ended, forever),
	}
	r.judge(arrivals, addressesOf(s.backends()), addressesOf(e.hit(s)), began, ended)

	return r, nil
}

// phaseOf counts the connections of a phase.
func phaseOf(dials []load.Dial) Phase {
	p := Phase{Reasons: make(map[string]int)}
	for _, d := range dials {
		took := d.Took
		if d.Failed != "" {
			p.Reasons[d.Failed]++
			if took = forever; d.Connected {
				p.Lost++
			} else {
				p.Failed++
			}
		}
		p.times = append(p.times, took)
	}
	p.sort()

	return p
}

// add adds the connections of another round.
func (p *Phase) add(other Phase) {
	reasons := make(map[string]int)
	for _, some := range []map[string]int{p.Reasons, other.Reasons} {
		for reason, n := range some {
			reasons[reason] += n
		}
	}
	*p = Phase{Failed: p.Failed + other.Failed, Lost: p.Lost + other.Lost, Reasons: reasons, times: slices.Concat(p.times, other.times)}
	p.sort()
}

// sort fills in what follows from the times.
func (p *Phase) sort() {
	slices.Sort(p.times)
	p.Dials = len(p.times)
	quantile := func(q float64) Millis {
		if p.Dials == 0 {
			return 0
		}
		took := p.times[min(int(q*float64(p.Dials)), p.Dials-1)]
		if took == forever {
			return Millis(math.Inf(1))
		}

		return Millis(float64(took) / float64(time.Millisecond))
	}
	p.P50, p.P99, p.P999, p.Longest = quantile(0.5), quantile(0.99), quantile(0.999), quantile(1)
}

// many is how many new connections in a row go to others before a backend counts as passed over: with
// random choice among ten, that does not happen by chance. Unlike a time, it does not depend on
// whether the machine has a pause.
const many = 25 * backendNodes * backendsPerNode

// judge fills in what the arrivals show: of a measurement with all backends, of which some are
// hit by an episode.
func (r *Result) judge(arrivals []arrival, all, hit []netip.Addr, began, ended time.Duration) {
	last, back := make(map[netip.Addr]int), make(map[netip.Addr]time.Duration)
	passedOver := func(backend netip.Addr) {
		if slices.Contains(hit, backend) {
			r.PassedOver++
		} else {
			r.Wrong++
		}
	}
	for i, a := range arrivals {
		single := i-last[a.Backend]-1 > many
		last[a.Backend] = i
		if a.At < began {
			continue
		}
		if single {
			passedOver(a.Backend)
		}
		switch wasHit := slices.Contains(hit, a.Backend); {
		case wasHit && a.At < ended && single:
			r.Probes++
		case wasHit && a.At < ended:
			r.Into, r.Until = r.Into+1, Seconds((a.At - began).Seconds())
		case wasHit && !single && back[a.Backend] == 0:
			back[a.Backend] = a.At - ended
		}
	}
	for _, backend := range all {
		if len(arrivals)-last[backend]-1 > many { // to the end
			passedOver(backend)
		}
	}
	if len(back) == len(hit) {
		r.Back = new(Seconds(slices.Max(slices.Collect(maps.Values(back))).Seconds()))
	}
}

func addressesOf(pods []*lab.Pod) []netip.Addr {
	var addresses []netip.Addr
	for _, pod := range pods {
		addresses = append(addresses, pod.IPv4)
	}

	return addresses
}
