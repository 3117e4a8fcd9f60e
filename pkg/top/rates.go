package top

import (
	"cmp"
	stdmaps "maps"
	"math"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Between returns what happened between two samples; before may be nil. With all it also has the Services
// without any connection or refusal. It is sorted by name.
func Between(before, after *Sample, all bool) Table {
	table := Table{At: after.at, Refused: make(map[string]float64), Services: []Service{}}
	if before != nil {
		table.Seconds = after.at.Sub(before.at).Seconds()
		for reason, n := range after.reasons {
			addRefused(table.Refused, reason, per(n, before.reasons[reason], table.Seconds))
		}
	}

	services := make(map[string]*Service)
	byID := make(map[uint32]*Service) // by the id of a service port
	for id, port := range after.ports {
		name := port.Service()
		if services[name] == nil {
			services[name] = &Service{Service: name, Refused: make(map[string]float64), Backends: []Backend{}}
		}
		byID[id] = services[name]
	}
	counted := make(map[uint32]Rates) // what counts have grown by, by the id of a service port
	handshakes := make(map[*Service]histogram)
	if before != nil {
		for key, n := range after.counts {
			svc := byID[key.ServicePortId]
			if svc == nil || before.ports[key.ServicePortId] != after.ports[key.ServicePortId] {
				continue // the id is another Service's by now: its counts began anew
			}
			rate := per(n, before.counts[key], table.Seconds)
			sum := counted[key.ServicePortId]
			switch {
			case key.What == maps.StatBytesSent:
				sum.Sent = rate
			case key.What == maps.StatBytesReceived:
				sum.Received = rate
			case key.What == maps.StatSYNRetransmits, key.What == maps.StatRetransmits:
				sum.Retransmits += rate
			case key.What == maps.StatUnanswered:
				svc.Unanswered += rate
			case key.What >= maps.StatHandshake && rate > 0:
				if handshakes[svc] == nil {
					handshakes[svc] = make(histogram)
				}
				handshakes[svc][key.What-maps.StatHandshake] += rate
			case maps.Reason(key.What).Translated():
				svc.New += rate
			default:
				addRefused(svc.Refused, maps.Reason(key.What), rate)
			}
			counted[key.ServicePortId] = sum
		}
	}
	for svc, h := range handshakes {
		svc.Handshake = h.durations()
	}
	live := liveRates(before, after, table.Seconds)
	for id, svc := range byID {
		total := Rates{Sent: counted[id].Sent + live.net[id].Sent, Received: counted[id].Received + live.net[id].Received}
		svc.Sent += max(total.Sent, live.ports[id].Sent)
		svc.Received += max(total.Received, live.ports[id].Received)
		svc.Retransmits += max(counted[id].Retransmits, live.ports[id].Retransmits)
	}
	for _, b := range after.backends {
		svc := byID[b.ServicePortId]
		if svc == nil {
			continue
		}
		port := after.ports[b.ServicePortId]
		svc.Live += b.live
		svc.Backends = append(svc.Backends, Backend{
			Backend: b.AddrPort(), Port: port.String(), Protocol: lb.Protocol(port.Proto).String(), Live: b.live,
			Rates: live.backends[b.Id], RTTMicroseconds: live.rtt(b.Id),
		})
	}
	for _, svc := range services {
		if !all && svc.isQuiet() {
			table.Quiet++

			continue
		}
		slices.SortFunc(svc.Backends, func(a, b Backend) int { return cmp.Or(a.Backend.Compare(b.Backend), cmp.Compare(a.Port, b.Port)) })
		table.Services = append(table.Services, *svc)
	}
	slices.SortFunc(table.Services, func(a, b Service) int { return cmp.Compare(a.Service, b.Service) })

	return table
}

// histogram has the rate of handshakes by bucket: see enum histogram in maps/types.h.
type histogram map[uint32]float64

// durations returns the percentiles of handshakes, of which there are some.
func (h histogram) durations() *Durations {
	buckets := slices.Sorted(stdmaps.Keys(h))
	total := 0.0
	for _, rate := range h {
		total += rate
	}
	percentile := func(share float64) float64 {
		sum, at := 0.0, buckets[0]
		for _, bucket := range buckets {
			if sum < share*total {
				at = bucket
			}
			sum += h[bucket]
		}
		// The geometric mean of the bounds of the bucket.
		return math.Exp2(float64(maps.HistogramLeast) + (float64(at)-0.5)/float64(int(1)<<maps.HistogramSchema))
	}

	return &Durations{percentile(0.5), percentile(0.99)}
}

// addRefused adds the rate of a reason, if that is a refusal.
func addRefused(to map[string]float64, reason maps.Reason, rate float64) {
	if rate > 0 && reason.Refuses() {
		to[reason.Label()] += rate
	}
}

// per returns a rate. A count that has fallen is one of a later Service or connection.
func per[N uint64 | uint32](after, before N, seconds float64) float64 {
	if after < before || seconds <= 0 {
		return 0
	}

	return float64(after-before) / seconds
}

// live is what connections have done that lived at the second of two samples.
type live struct {
	ports    map[uint32]Rates // by the id of a service port
	backends map[uint32]Rates // by the id of a backend
	// net is what the bytes of all live connections have grown by: less than ports if some have ended.
	// Where programs count the bytes of those, the sum of both is exact.
	net   map[uint32]Rates
	rtts  map[uint32]float64 // the sum of round-trip times by the id of a backend
	socks map[uint32]float64 // how many
}

func liveRates(before, after *Sample, seconds float64) live {
	l := live{
		make(map[uint32]Rates), make(map[uint32]Rates), make(map[uint32]Rates),
		make(map[uint32]float64), make(map[uint32]float64),
	}
	for _, c := range after.sockets {
		if c.rtt > 0 {
			l.rtts[c.backendID] += float64(c.rtt)
			l.socks[c.backendID]++
		}
	}
	if before == nil {
		return l
	}
	addLive(&l, before.sockets, after.sockets, seconds)
	addLive(&l, before.flows, after.flows, seconds)

	return l
}

// addLive adds one kind of connections.
func addLive[K comparable](l *live, before, after map[K]connection, seconds float64) {
	for key, c := range after {
		had, ok := before[key]
		if !ok || had.backendID != c.backendID {
			had = connection{} // it is new
		}
		rates := Rates{
			Sent: per(c.sent, had.sent, seconds), Received: per(c.received, had.received, seconds),
			Retransmits: per(c.retransmits, had.retransmits, seconds),
		}
		add(l.ports, c.servicePortID, rates, 1)
		add(l.backends, c.backendID, rates, 1)
		add(l.net, c.servicePortID, Rates{Sent: float64(c.sent) / seconds, Received: float64(c.received) / seconds}, 1)
	}
	for _, c := range before {
		add(l.net, c.servicePortID, Rates{Sent: float64(c.sent) / seconds, Received: float64(c.received) / seconds}, -1)
	}
}

func add(to map[uint32]Rates, id uint32, rates Rates, sign float64) {
	sum := to[id]
	sum.Sent += sign * rates.Sent
	sum.Received += sign * rates.Received
	sum.Retransmits += sign * rates.Retransmits
	to[id] = sum
}

// rtt returns the mean round-trip time of the sockets of a backend in microseconds.
func (l live) rtt(backendID uint32) uint32 {
	if l.socks[backendID] == 0 {
		return 0
	}

	return uint32(math.Round(l.rtts[backendID] / l.socks[backendID]))
}
