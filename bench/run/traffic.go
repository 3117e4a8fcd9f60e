package main

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/bench/stand"
	"github.com/sluice-lb/sluice/test/lab"
)

// values are what one measurement yields, by metric.
type values map[string]float64

// measured is what came of one measurement of traffic.
type measured struct {
	values
	// stolen is the part of the processors' time that the hypervisor gave to
	// other guests, 0 to 1.
	stolen float64
	// failed is the error of single exchanges that failed, nil if none did.
	failed error
}

// traffic is a case that sends something.
type traffic struct {
	name    string
	paths   []string
	measure func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error)
	port    portOf
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
	// The client's further addresses are known to the nodes, and not to the pods' own routes.
	farFromOutside = []string{report.OutsideFar, report.NodePortFar}
	remote         = []string{report.DirectRemote, report.ServiceRemote}
	fromOutside    = []string{report.OutsideNear, report.NodePortNear, report.OutsideFar, report.Forwarded, report.NodePortFar}
	// iperf3 does not answer datagrams from the address that they were sent to, as
	// [report.Forwarded] needs it.
	ofDatagrams = []string{report.DirectRemote, report.ServiceRemote, report.OutsideNear, report.NodePortNear, report.OutsideFar, report.NodePortFar}
)

// cases are all there are, in their order. A path's control goes before it.
var cases = []traffic{
	{report.Connect, slices.Concat(fromPod, fromOutside), connect, tcpPort},
	{report.Arrivals, fromPod, arrivals, tcpPort},
	{report.SustainedClient, farFromOutside, sustained(load.ClientCloses), tcpPort},
	{report.SustainedServer, farFromOutside, sustained(load.ServerCloses), tcpPort},
	{report.SustainedReset, farFromOutside, sustained(load.ClientResets), tcpPort},
	{report.FirstTCP, fromPod, firstTCP, tcpPort},
	{report.FirstUDP, fromPod, firstUDP, udpPort},
	{report.Exchange, slices.Concat([]string{report.Direct, report.ServiceFirst}, fromOutside), exchange, tcpPort},
	{report.Bulk, slices.Concat(remote, fromOutside), bulk, bulkPort},
	{report.Datagrams, ofDatagrams, datagrams, bulkPort},
	{report.UDPConnected, fromPod, udp(load.UDPConnected), udpPort},
	{report.UDPUnconnected, fromPod, udp(load.UDPUnconnected), udpPort},
	{report.UDPNew, fromPod, udp(load.UDPNew), udpPort},
}

// targets are what a path's client dials. last is the ClusterIP of the last Service.
func (t traffic) targets(s *stand.Side, plan objects.Plan, path string, last netip.Addr) []netip.AddrPort {
	at := func(port uint16, addresses ...netip.Addr) []netip.AddrPort {
		var all []netip.AddrPort
		for _, a := range addresses {
			all = append(all, netip.AddrPortFrom(a, port))
		}
		return all
	}
	switch path {
	case report.ServiceFirst:
		return at(t.port.service, plan.ClusterIP(0))
	case report.ServiceLast:
		return at(t.port.service, last)
	case report.Direct:
		var endpoints []netip.Addr
		for e := range plan.Endpoints {
			endpoints = append(endpoints, plan.EndpointAddress(0, e, 0))
		}
		return at(t.port.backend, endpoints...)
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
	switch path {
	case report.OutsideNear, report.OutsideFar, report.Forwarded, report.NodePortNear, report.NodePortFar:
		return client{ns: s.Client.Namespace}
	default:
		return client{ns: s.Pod().Namespace, cgroup: s.Cgroup}
	}
}

// isControl reports whether a path is there without a proxy.
func isControl(path string) bool {
	for _, p := range report.Paths {
		if p.Name == path {
			return p.Control == "" || path == report.Forwarded
		}
	}

	return false
}

// connect is closed: each client dials again as soon as it has been answered.
func connect(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.load(ctx, from, load.Work{Kind: load.Connect, Clients: b.clients, Targets: to})
}

// arrivals is open: a connection is due when it is due. So many clients wait for
// one to be due that none is late because another one takes long.
func arrivals(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.latency(ctx, from, load.Work{Kind: load.Connect, Clients: 4 * b.clients, Rate: b.rate, Targets: to})
}

// stalled is how long no connect() takes unless something stalls: TCP's first retransmission
// comes after a second.
const stalled = 100 * time.Millisecond

// sustained is connect for so long that ports have to be used again and again, and from so
// many addresses that each of these ports has had another client before. What fails, and
// what stalls, is its figures: a median hides both.
func sustained(closing load.Closing) func(context.Context, *bencher, client, []netip.AddrPort) (measured, error) {
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

// pause is between two of the cases that do one thing at a time.
const pause = time.Millisecond

func firstTCP(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.latency(ctx, from, load.Work{Kind: load.Connect, Clients: 1, Pause: pause, Targets: to})
}

func firstUDP(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.latency(ctx, from, load.Work{Kind: load.UDPNew, Clients: 1, Pause: pause, Targets: to})
}

func exchange(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	return b.load(ctx, from, load.Work{Kind: load.Exchange, Clients: b.clients, Targets: to})
}

func udp(kind load.Kind) func(context.Context, *bencher, client, []netip.AddrPort) (measured, error) {
	return func(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
		return b.load(ctx, from, load.Work{Kind: kind, Clients: b.clients, Targets: to})
	}
}

// tries is how often work is begun of which nothing fell into its window, because
// the machine had something else to do.
const tries = 10

// bearable is which part of a measurement may fail, and be reported, without spoiling
// the rest.
const bearable = 0.01

// load does some work, and fails if much of it did.
func (b *bencher) load(ctx context.Context, from client, work load.Work) (measured, error) {
	work.WarmUp, work.Duration = b.warmUp, b.duration
	var r load.Result
	for range tries {
		var err error
		if r, err = load.Run(ctx, from.ns, from.cgroup, work); err != nil {
			return measured{}, err
		}
		if r.Started > 0 {
			break
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
	if busy := r.Machine.Busy(); busy > 0 { // a short window may lie between two ticks
		m.values[report.CPU] = micros(busy) / float64(r.Succeeded)
		m.values[report.SoftIRQ] = 100 * r.Machine.SoftIRQ.Seconds() / busy.Seconds()
	}

	return m, nil
}

func stolen(m load.CPU) float64 {
	return m.Steal.Seconds() / max(m.Busy()+m.Idle+m.Steal, time.Millisecond).Seconds()
}

// latency is load without the metrics that mean nothing where clients wait.
func (b *bencher) latency(ctx context.Context, from client, work load.Work) (measured, error) {
	m, err := b.load(ctx, from, work)
	if err != nil {
		return m, err
	}
	m.values = values{report.P50: m.values[report.P50], report.P99: m.values[report.P99]}

	return m, nil
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
		report.CPUPerGbit: r.Machine.Busy().Seconds() / gbit,
	}, stolen: stolen(r.Machine)}, nil
}

// datagrams is iperf3's, with as many datagrams of 64 bytes as it can send.
func datagrams(ctx context.Context, b *bencher, from client, to []netip.AddrPort) (measured, error) {
	r, err := load.Bulk(ctx, from.ns, from.cgroup, to[0], "--udp", "--bitrate", "0", "--length", "64", "--time", b.wholeSeconds())
	if err != nil {
		return measured{}, err
	}

	return measured{values: values{report.Packets: r.PacketsPerSecond}, stolen: stolen(r.Machine)}, nil
}

// wholeSeconds is a measurement's duration for iperf3, which knows no shorter one.
func (b *bencher) wholeSeconds() string {
	return strconv.Itoa(int(math.Ceil(b.duration.Seconds())))
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
