package metrics

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// backendMetric is a metric of each backend, and its value.
type backendMetric struct {
	*metric
	value func(live int, h maps.BackendHandshakes) float64
}

func newBackendMetric(name string, kind dto.MetricType, help string, value func(live int, h maps.BackendHandshakes) float64) backendMetric {
	return backendMetric{newMetric(name, kind, help, "namespace", "service", "port", "backend"), value}
}

var backendMetrics = []backendMetric{
	newBackendMetric("backend_active_connections", gaugeKind, "Connections that clients which this node translates have with a backend.",
		func(live int, _ maps.BackendHandshakes) float64 { return float64(live) }),
	newBackendMetric("backend_handshakes_total", counterKind, "TCP handshakes of sockets that a backend has answered.",
		func(_ int, h maps.BackendHandshakes) float64 { return float64(h.Answered) }),
	newBackendMetric("backend_handshake_seconds_total", counterKind, "The time that these took, from connect() to the answer.",
		func(_ int, h maps.BackendHandshakes) float64 { return float64(h.Time) / float64(time.Second) }),
	newBackendMetric("backend_handshake_failures_total", counterKind, "TCP handshakes of sockets that a backend refused, or that timed out or were given up.",
		func(_ int, h maps.BackendHandshakes) float64 { return float64(h.Failed) }),
	newBackendMetric("backend_syn_retransmits_total", counterKind, "SYNs that were sent to a backend again.",
		func(_ int, h maps.BackendHandshakes) float64 { return float64(h.SynRetransmits) }),
}

// Backends has the metrics of backends, of as many as the limit allows: first come, first served,
// and as long as the backend exists. The counts are those of the maps, and go on when the agent is
// started again.
type Backends struct {
	tables maps.Tables
	limit  int
	moved  func() uint64

	mu    sync.Mutex
	seen  uint64                   // what moved was when shown was decided
	shown map[backendLabels]uint32 // the ids; nil before the first decision
}

type backendLabels struct {
	lb.ServiceName
	port, backend string
}

// NewBackends returns the metrics of at most limit backends. Moved returns a number that changes
// whenever the tables change.
func NewBackends(tables maps.Tables, limit int, moved func() uint64) *Backends {
	return &Backends{tables: tables, limit: limit, moved: moved}
}

// Describe implements [prometheus.Collector].
func (b *Backends) Describe(to chan<- *prometheus.Desc) {
	for _, m := range backendMetrics {
		to <- m.desc
	}
}

// Collect implements [prometheus.Collector].
func (b *Backends) Collect(to chan<- prometheus.Metric) {
	if b.limit == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if moved := b.moved(); b.shown == nil || moved != b.seen {
		if err := b.choose(); err != nil {
			to <- prometheus.NewInvalidMetric(backendMetrics[0].desc, err)

			return
		}
		b.seen = moved
	}
	for l, id := range b.shown {
		live, handshakes := max(0, b.tables.Loads.Load(id).Live()), b.tables.Loads.Handshakes(id)
		for _, m := range backendMetrics {
			m.send(to, m.value(live, handshakes), l.Namespace, l.Name, l.port, l.backend)
		}
	}
}

// choose decides which backends are shown: those that were and still exist, and others from low
// places on, which tend to be older.
func (b *Backends) choose() error {
	ports := make(map[uint32]backendLabels)
	for e, err := range b.tables.ServicePorts.All() {
		if err != nil {
			return err
		}
		if name, ok := serviceNameOf(&e.Value); ok {
			_, _, port := e.Value.Parts()
			ports[e.Key] = backendLabels{ServiceName: name, port: strings.ToValidUTF8(port, "")}
		}
	}
	exist := make(map[backendLabels]uint32)
	var inOrder []backendLabels
	for _, backend := range b.tables.Backends.All() {
		if l, ok := ports[backend.ServicePortId]; ok && backend.Id != 0 {
			l.backend = backend.AddrPort().String()
			exist[l] = backend.Id
			inOrder = append(inOrder, l)
		}
	}
	shown := make(map[backendLabels]uint32)
	for l := range b.shown {
		if id, ok := exist[l]; ok {
			shown[l] = id
		}
	}
	for _, l := range inOrder {
		if len(shown) >= b.limit {
			break
		}
		shown[l] = exist[l]
	}
	b.shown = shown

	return nil
}
