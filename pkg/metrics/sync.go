package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Families is a set of IP families: those that a change concerns.
type Families uint8

// The sets of families.
const (
	None Families = 0
	IPv4 Families = 1 << 0
	IPv6 Families = 1 << 1
	Both          = IPv4 | IPv6
)

// FamilyOf returns the set of one family.
func FamilyOf(f lb.Family) Families {
	switch f {
	case lb.IPv4:
		return IPv4
	case lb.IPv6:
		return IPv6
	}

	return None
}

// FamiliesOf returns the families of a Service's ClusterIPs, none for nil.
func FamiliesOf(svc *lb.Service) Families {
	if svc == nil {
		return None
	}
	families := None
	for _, f := range svc.Families {
		families |= FamilyOf(f)
	}
	for _, addr := range svc.ClusterIPs {
		families |= FamilyOf(lb.FamilyOf(addr))
	}

	return families
}

// names yields the values of the label ip_family.
func (f Families) names(yield func(string) bool) {
	if f&IPv4 != 0 && !yield(lb.IPv4.String()) {
		return
	}
	if f&IPv6 != 0 {
		yield(lb.IPv6.String())
	}
}

// Sync measures how changes of the cluster come into force, under kube-proxy's names, and
// counts repairs of maps. A change is queued when it is received, read by the goroutine
// that has the turn, and in force at the end of a round. Any goroutine may use it.
type Sync struct {
	now   func() time.Time
	start time.Time

	collectors []prometheus.Collector // all that follow

	rounds, full, partial   *prometheus.HistogramVec
	programmed, queued      *prometheus.GaugeVec
	slices, services        prometheus.Counter
	slicesLeft, serviceLeft prometheus.Gauge
	healthz, livez          *prometheus.CounterVec
	latency                 *prometheus.HistogramVec
	noLocal                 *prometheus.GaugeVec
	cleanUps                *prometheus.HistogramVec
	cleaned                 *prometheus.CounterVec
	gone                    *prometheus.CounterVec
	mended                  *prometheus.CounterVec
	sockets                 prometheus.Counter

	mu       sync.Mutex
	read     changes  // in this round
	received Families // of changes that this round has read, or earlier ones that failed
	due      Families // of those that made a difference
	retry    Families // of changes whose round has failed
	// triggered has the times of changes that slices carry and that are not in force
	// yet, by Service and family.
	triggered map[triggerKey][]time.Time
	local     map[lb.ServiceName]noLocal // only those that lack something
	lacking   noLocal                    // their sum
}

type changes struct{ slices, services int }

type triggerKey struct {
	service lb.ServiceName
	family  lb.Family
}

// NewSync returns a Sync that begins now, on the clock now.
func NewSync(now func() time.Time) *Sync {
	s := &Sync{
		now:       now,
		start:     now(),
		triggered: make(map[triggerKey][]time.Time),
		local:     make(map[lb.ServiceName]noLocal),
	}
	s.make()
	s.stamp(s.queued, Both) // as kube-proxy does: it waits for the first lists

	return s
}

// stamp sets a gauge of each family to the clock.
func (s *Sync) stamp(gauge *prometheus.GaugeVec, families Families) {
	seconds := float64(s.now().UnixNano()) / 1e9
	for family := range families.names {
		gauge.WithLabelValues(family).Set(seconds)
	}
}

// Queued reports that a Node or ServiceCIDRs were received.
func (s *Sync) Queued(families Families) { s.stamp(s.queued, families) }

// ServiceQueued reports that a Service was received.
func (s *Sync) ServiceQueued(families Families) {
	s.services.Inc()
	s.serviceLeft.Inc()
	s.Queued(families)
}

// SliceQueued reports that an EndpointSlice was received.
func (s *Sync) SliceQueued(families Families) {
	s.slices.Inc()
	s.slicesLeft.Inc()
	s.Queued(families)
}

// Read reports that this round reads a change that was [Sync.Queued], and whether it makes
// a difference.
func (s *Sync) Read(families Families, changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(families, changed)
}

func (s *Sync) add(families Families, changed bool) {
	s.received |= families
	if changed {
		s.due |= families
	}
}

// ServiceRead reports that this round reads a Service, and whether it makes a
// difference.
func (s *Sync) ServiceRead(families Families, changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read.services++
	s.add(families, changed)
}

// maxTriggers limits how many changes of one Service and family are kept until their latency
// is known, beginning with the oldest: a Service that cannot be programmed may wait for days.
const maxTriggers = 100

// SliceRead reports that this round reads an EndpointSlice, whether it makes a difference,
// and when its change has happened. The time is zero if the slice does not carry it.
func (s *Sync) SliceRead(slice *lb.EndpointSlice, changed bool, triggered time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read.slices++
	s.add(FamilyOf(slice.Family), changed)
	// The latency of a change that happened before the start is not that of the agent.
	if changed && triggered.After(s.start) {
		key := triggerKey{slice.Service, slice.Family}
		if len(s.triggered[key]) < maxTriggers {
			s.triggered[key] = append(s.triggered[key], triggered)
		}
	}
}

// SliceGone reports that this round reads that an EndpointSlice is gone; nil if it was not
// known. As in kube-proxy, the pending times of its Service and family are dropped, because
// it is not known which of them were those of this slice.
func (s *Sync) SliceGone(slice *lb.EndpointSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read.slices++
	if slice != nil {
		delete(s.triggered, triggerKey{slice.Service, slice.Family})
		s.add(FamilyOf(slice.Family), true)
	}
}

// Probed reports the answer to a probe of /healthz or /livez.
func (s *Sync) Probed(path string, code int) {
	total := s.healthz
	if path == "/livez" {
		total = s.livez
	}
	total.WithLabelValues(strconv.Itoa(code)).Inc()
}

// Cleaned reports a search for UDP flows of backends or frontends that are gone: when it
// began, and how many flows it has ended of each family.
func (s *Sync) Cleaned(begin time.Time, ended flow.Ended) {
	for name := range Both.names {
		s.cleanUps.WithLabelValues(name).Observe(s.now().Sub(begin).Seconds())
	}
	if ended.IPv4 > 0 {
		s.cleaned.WithLabelValues(lb.IPv4.String()).Add(float64(ended.IPv4))
	}
	if ended.IPv6 > 0 {
		s.cleaned.WithLabelValues(lb.IPv6.String()).Add(float64(ended.IPv6))
	}
}

// Gone reports that a list lacked many objects of a kind.
func (s *Sync) Gone(kind string, objects int) { s.gone.WithLabelValues(kind).Add(float64(objects)) }

// Mended reports that an entry of a map was not as written, and was repaired.
func (s *Sync) Mended(table string) { s.mended.WithLabelValues(table).Inc() }

// SocketsEnded reports that n UDP sockets were ended because their backend was gone.
func (s *Sync) SocketsEnded(n int) { s.sockets.Add(float64(n)) }
