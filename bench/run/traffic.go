package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/bench/stand"
	"github.com/sluice-lb/sluice/test/lab"
)

// traffic is a case that sends something.
type traffic struct {
	name    string
	paths   []string
	measure measure
	port    portOf
}

// measure makes one measurement of traffic.
type measure func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error)

// measured is the result of one measurement of traffic.
type measured struct {
	values
	// stolen is the part of the processors' time that the hypervisor gave to
	// other guests, 0 to 1.
	stolen float64
	// failed is the error of single exchanges that failed, nil if none did.
	failed error
}

// client is where a case dials from.
type client struct {
	ns     *lab.Namespace
	cgroup *lab.Cgroup
}

// portOf is the set of ports that a case dials.
type portOf struct{ service, backend, near, far uint16 }

var (
	tcpPort  = portOf{objects.Port, objects.BackendPort, objects.NearPort, objects.FarPort}
	udpPort  = portOf{service: objects.DNSPort, backend: objects.BackendPort}
	bulkPort = portOf{objects.BulkPort, objects.BulkPort, objects.NearBulkPort, objects.FarBulkPort}
)

var (
	fromPod = []string{report.Direct, report.ServiceFirst, report.ServiceLast}
	// The nodes have routes to the client's further addresses, and the pods have none.
	farFromOutside = []string{report.OutsideFar, report.NodePortFar}
	remote         = []string{report.DirectRemote, report.ServiceRemote}
	fromOutside    = []string{report.OutsideNear, report.NodePortNear, report.OutsideFar, report.Forwarded, report.NodePortFar}
	// iperf3 does not answer datagrams from the address that they were sent to, as
	// [report.Forwarded] needs it.
	ofDatagrams = []string{report.DirectRemote, report.ServiceRemote, report.OutsideNear, report.NodePortNear, report.OutsideFar, report.NodePortFar}
)

// cases are all there are, in their order. A path's control goes before it.
var cases = []traffic{
	{report.Connect, slices.Concat(fromPod, fromOutside), saturated(load.Connect), tcpPort},
	{report.Arrivals, fromPod, arrivals, tcpPort},
	{report.SustainedClient, farFromOutside, sustained(load.ClientCloses), tcpPort},
	{report.SustainedServer, farFromOutside, sustained(load.ServerCloses), tcpPort},
	{report.SustainedReset, farFromOutside, sustained(load.ClientResets), tcpPort},
	{report.FirstTCP, fromPod, alone(load.Connect), tcpPort},
	{report.FirstUDP, fromPod, alone(load.UDPNew), udpPort},
	{report.Exchange, slices.Concat([]string{report.Direct, report.ServiceFirst}, fromOutside), saturated(load.Exchange), tcpPort},
	{report.Bulk, slices.Concat(remote, fromOutside), bulk, bulkPort},
	{report.Datagrams, ofDatagrams, datagrams, bulkPort},
	{report.UDPConnected, fromPod, saturated(load.UDPConnected), udpPort},
	{report.UDPUnconnected, fromPod, saturated(load.UDPUnconnected), udpPort},
	{report.UDPNew, fromPod, saturated(load.UDPNew), udpPort},
}

// traffic measures all cases, with all proxies running and nothing changing.
func (b *bencher) traffic(ctx context.Context, plan objects.Plan) {
	wanted := slices.DeleteFunc(slices.Clone(cases), func(t traffic) bool { return !b.cases.MatchString(t.name) })
	if len(wanted) == 0 || ctx.Err() != nil {
		return
	}
	last := make(map[*side]netip.Addr) // of sides that run
	for _, s := range b.sides {
		address, err := b.prepare(ctx, s, plan)
		if err != nil {
			b.fail(fmt.Errorf("%s with %d Services: %w", s.kind, plan.Services, err))

			continue
		}
		last[s] = address
	}
	for _, t := range wanted {
		for round := range b.rounds {
			for _, s := range report.InTurn(b.sides, round) {
				if address, runs := last[s]; runs {
					b.round(ctx, t, s, plan, address, round)
				}
			}
		}
		if ctx.Err() != nil {
			break
		}
		for _, line := range b.report.Summary(plan.Services, t.name) {
			b.logf("%s", strings.TrimRight(line, " "))
		}
	}
	for _, s := range b.sides {
		if _, runs := last[s]; runs && s.kind == report.Sluice && b.cases.MatchString(report.Profile) {
			b.profile(ctx, s, plan)
		}
	}
	for _, s := range b.sides {
		if err := s.stop(); err != nil {
			b.fail(fmt.Errorf("end of %s: %w", s.kind, err))
		}
	}
}

// prepare starts a side's proxy, and returns the address of the last Service.
func (b *bencher) prepare(ctx context.Context, s *side, plan objects.Plan) (netip.Addr, error) {
	if s.kind == report.Ref {
		return netip.Addr{}, nil
	}
	b.logf("%s starts", s.kind)
	// A resync would disturb the measurements of other sides.
	if err := b.start(ctx, s, time.Hour); err != nil {
		return netip.Addr{}, errors.Join(err, s.stop())
	}
	if err := s.ForgetSoon(); err != nil {
		return netip.Addr{}, err
	}

	return s.last(plan)
}

// A measurement during which the hypervisor took more than tolerable from us is made
// again, attempts times in all; that from which it took least counts. An attempt may
// take grace longer than it should.
const (
	tolerable = 0.10
	attempts  = 2
	grace     = 20 * time.Second
)

// round measures a case once at one side, on all of its paths.
func (b *bencher) round(ctx context.Context, t traffic, s *side, plan objects.Plan, last netip.Addr, round int) {
	defer b.wake(s)()
	for _, path := range t.paths {
		if s.kind == report.Ref && !isControl(path) {
			continue
		}
		var err error
		best := measured{stolen: 1}
		for attempt := 0; attempt < attempts && err == nil && best.stolen > tolerable; attempt++ {
			var m measured
			if m, err = b.attempt(ctx, t, clientOf(s.Side, path), t.targets(s.Side, plan, path, last)); m.stolen <= best.stolen {
				best = m
			}
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			b.stolen = append(b.stolen, best.stolen)
		} else {
			best = measured{}
		}
		at := report.Sample{Services: plan.Services, Case: t.name, Path: path, Side: s.kind, Round: round}
		b.record(ctx, at, best.values, err)
		if best.failed != nil {
			b.fail(fmt.Errorf("%s %s %s with %d Services: %w", s.kind, t.name, path, plan.Services, best.failed))
		}
	}
}

func (b *bencher) attempt(ctx context.Context, t traffic, from client, to []netip.AddrPort) (measured, error) {
	most := b.warmUp + max(b.duration, b.sustained) + grace
	ctx, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("not done after %v", most))
	defer cancel()

	return t.measure(ctx, b, from, to)
}

// targets returns what a path's client dials. last is the ClusterIP of the last Service.
func (t traffic) targets(s *stand.Side, plan objects.Plan, path string, last netip.Addr) []netip.AddrPort {
	at := func(port uint16, address netip.Addr) []netip.AddrPort {
		return []netip.AddrPort{netip.AddrPortFrom(address, port)}
	}
	switch path {
	case report.ServiceFirst:
		return at(t.port.service, plan.ClusterIP(0))
	case report.ServiceLast:
		return at(t.port.service, last)
	case report.Direct:
		var endpoints []netip.AddrPort
		for e := range plan.Endpoints {
			endpoints = append(endpoints, netip.AddrPortFrom(plan.EndpointAddress(0, e, 0), t.port.backend))
		}

		return endpoints
	case report.ServiceRemote:
		return at(t.port.service, objects.BulkIP)
	case report.DirectRemote, report.OutsideFar:
		return at(t.port.backend, s.Far().IPv4)
	case report.OutsideNear:
		return at(t.port.backend, s.Near().IPv4)
	case report.Forwarded:
		return at(t.port.backend, plan.EndpointAddress(0, 1, 0))
	case report.NodePortNear:
		return at(t.port.near, s.Node().IPv4)
	case report.NodePortFar:
		return at(t.port.far, s.Node().IPv4)
	}
	panic("no path is called " + path)
}

// clientOf returns where a path is dialled from.
func clientOf(s *stand.Side, path string) client {
	if slices.Contains(fromOutside, path) {
		return client{ns: s.Client.Namespace}
	}

	return client{ns: s.Pod().Namespace, cgroup: s.Cgroup}
}

// isControl reports whether a path is there without a proxy.
func isControl(path string) bool {
	return slices.ContainsFunc(report.Paths, func(p report.Path) bool {
		return p.Name == path && (p.Control == "" || path == report.Forwarded)
	})
}

// saturated makes exchanges with all clients, each as soon as the previous one is answered.
func saturated(kind load.Kind) measure {
	return func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
		return b.load(ctx, from, load.Work{Kind: kind, Clients: b.clients, Targets: to})
	}
}

// arrivals makes connections at a fixed rate. There are so many clients that none of the
// connections is late because another one takes long.
func arrivals(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.latency(ctx, from, load.Work{Kind: load.Connect, Clients: 4 * b.clients, Rate: b.rate, Targets: to})
}

// alone makes one exchange at a time, with a pause between two.
func alone(kind load.Kind) measure {
	return func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
		return b.latency(ctx, from, load.Work{Kind: kind, Clients: 1, Pause: time.Millisecond, Targets: to})
	}
}

// stalled is the least duration of a connect() that counts as slow: TCP's first
// retransmission comes after a second.
const stalled = 100 * time.Millisecond

// sustained makes connections for so long that ports have to be used again and again, and from so
// many addresses that each of these ports has had another client before. A median hides failures
// and stalls, so they have metrics of their own.
func sustained(closing load.Closing) measure {
	return func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
		work := load.Work{
			Kind: load.Connect, Closing: closing, Clients: b.clients, Targets: to,
			WarmUp: b.warmUp, Duration: b.sustained,
		}
		for source := stand.Sources.Addr(); stand.Sources.Contains(source); source = source.Next() {
			work.Sources = append(work.Sources, source)
		}
		r, err := load.Run(ctx, from.ns, from.cgroup, work)
		if err != nil {
			return measured{}, err
		}
		m := measured{values: values{
			report.Rate:    r.PerSecond(),
			report.P50:     micros(r.Latencies.Quantile(0.5)),
			report.P99:     micros(r.Latencies.Quantile(0.99)),
			report.Longest: micros(r.Latencies.Quantile(1)) / 1000,
			report.Slow:    float64(r.Latencies.Over(stalled)),
			report.Failed:  float64(r.Failed),
			report.Silence: float64(r.Silence.Milliseconds()),
		}, stolen: stolen(r.Machine)}
		if r.Failed > 0 {
			m.failed = fmt.Errorf("%d of %d failed: %s", r.Failed, r.Started, r.FirstError)
		}

		return m, nil
	}
}

// tries is how often work is begun again if none of it fell into its window, because
// the machine was busy.
const tries = 10

// bearable is which part of a measurement may fail, and be reported, without spoiling
// the rest.
const bearable = 0.01

// load does some work, and fails if much of it did.
func (b *bencher) load(ctx context.Context, from client, work load.Work) (measured, error) {
	work.WarmUp, work.Duration = b.warmUp, b.duration
	var r load.Result
	for try := 0; try < tries && r.Started == 0; try++ {
		var err error
		if r, err = load.Run(ctx, from.ns, from.cgroup, work); err != nil {
			return measured{}, err
		}
	}
	failed := fmt.Errorf("%d of %d failed in %v: %s", r.Failed, r.Started, r.Elapsed, r.FirstError)
	if float64(r.Failed) > bearable*float64(r.Started) || r.Succeeded == 0 {
		return measured{}, failed
	}
	m := measured{values: values{
		report.Rate: r.PerSecond(),
		report.P50:  micros(r.Latencies.Quantile(0.5)),
		report.P99:  micros(r.Latencies.Quantile(0.99)),
	}, stolen: stolen(r.Machine)}
	if r.Failed > 0 {
		m.failed = failed
	}
	if busy := r.Machine.Busy; busy > 0 { // a short window may lie between two ticks
		m.values[report.CPU] = micros(busy) / float64(r.Succeeded)
		m.values[report.SoftIRQ] = 100 * r.Machine.SoftIRQ.Seconds() / busy.Seconds()
	}

	return m, nil
}

// latency is load without the metrics that mean nothing where clients wait.
func (b *bencher) latency(ctx context.Context, from client, work load.Work) (measured, error) {
	m, err := b.load(ctx, from, work)
	if err == nil {
		m.values = values{report.P50: m.values[report.P50], report.P99: m.values[report.P99]}
	}

	return m, err
}

// bulk is iperf3's, with one TCP connection.
func bulk(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	r, err := load.Bulk(ctx, from.ns, from.cgroup, to[0], "--time", b.wholeSeconds())
	if err != nil {
		return measured{}, err
	}
	gbit := r.BitsPerSecond * r.Elapsed.Seconds() / 1e9

	return measured{values: values{
		report.Throughput: r.BitsPerSecond / 1e9,
		report.CPUPerGbit: r.Machine.Busy.Seconds() / gbit,
	}, stolen: stolen(r.Machine)}, nil
}

// datagrams is iperf3's, with as many datagrams of 64 bytes as it can send.
func datagrams(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	r, err := load.Bulk(ctx, from.ns, from.cgroup, to[0], "--udp", "--bitrate", "0", "--length", "64", "--time", b.wholeSeconds())

	return measured{values: values{report.Packets: r.PacketsPerSecond}, stolen: stolen(r.Machine)}, err
}

// wholeSeconds is a measurement's duration for iperf3, which has no shorter one.
func (b *bencher) wholeSeconds() string { return strconv.Itoa(int(math.Ceil(b.duration.Seconds()))) }

func stolen(m load.CPU) float64 {
	return m.Steal.Seconds() / max(m.Busy+m.Idle+m.Steal, time.Millisecond).Seconds()
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
