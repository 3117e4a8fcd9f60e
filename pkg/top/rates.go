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
	ports, backends := liveRates(before, after, table.Seconds)
	for id, svc := range byID {
		live := ports.of(id)
		svc.Sent += max(counted[id].Sent+live.net.Sent, live.Sent)
		svc.Received += max(counted[id].Received+live.net.Received, live.Received)
		svc.Retransmits += max(counted[id].Retransmits, live.Retransmits)
	}
	for _, b := range after.backends {
		svc := byID[b.ServicePortId]
		if svc == nil {
			continue
		}
		port, live := after.ports[b.ServicePortId], backends.of(b.Id)
		var rtt uint32
		if live.sockets > 0 {
			rtt = uint32(math.Round(live.rtts / live.sockets))
		}
		svc.Live += b.live
		svc.Backends = append(svc.Backends, Backend{
			Backend: b.AddrPort(), Port: port.String(), Protocol: lb.Protocol(port.Proto).String(), Live: b.live,
			Rates: live.Rates, RTTMicroseconds: rtt,
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

// live is what connections have done that lived at the second of two samples, by the id of a service port or of a backend.
type live map[uint32]*liveSum

type liveSum struct {
	Rates
	// net is what the bytes of all live connections have grown by: less than Rates if some have ended.
	// Where programs count the bytes of those, the sum of both is exact.
	net     Rates
	rtts    float64 // the sum of round-trip times
	sockets float64 // that have one
}

// of returns the sum of an id, which it adds if it is not there.
func (l live) of(id uint32) *liveSum {
	if l[id] == nil {
		l[id] = new(liveSum)
	}

	return l[id]
}

func liveRates(before, after *Sample, seconds float64) (ports, backends live) {
	ports, backends = make(live), make(live)
	for _, c := range after.sockets {
		if c.rtt > 0 {
			backends.of(c.backendID).rtts += float64(c.rtt)
			backends.of(c.backendID).sockets++
		}
	}
	if before != nil {
		addLive(ports, backends, before.sockets, after.sockets, seconds)
		addLive(ports, backends, before.flows, after.flows, seconds)
	}

	return ports, backends
}

// addLive adds one kind of connections.
func addLive[K comparable](ports, backends live, before, after map[K]connection, seconds float64) {
	for key, c := range after {
		had, ok := before[key]
		if !ok || had.backendID != c.backendID {
			had = connection{} // it is new
		}
		rates := Rates{
			Sent: per(c.sent, had.sent, seconds), Received: per(c.received, had.received, seconds),
			Retransmits: per(c.retransmits, had.retransmits, seconds),
		}
		ports.of(c.servicePortID).add(rates, 1)
		backends.of(c.backendID).add(rates, 1)
		ports.of(c.servicePortID).net.add(Rates{Sent: float64(c.sent) / seconds, Received: float64(c.received) / seconds}, 1)
	}
	for _, c := range before {
		ports.of(c.servicePortID).net.add(Rates{Sent: float64(c.sent) / seconds, Received: float64(c.received) / seconds}, -1)
	}
}
