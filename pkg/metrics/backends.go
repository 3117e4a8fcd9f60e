package metrics

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Backends has the metrics of backends, of as many as the limit allows: first come, first served,
// and as long as the backend exists. The counts are those of the maps, and go on when the agent is
// started again.
type Backends struct {
	tables Tables
	limit  int
	moved  func() uint64

	mu    sync.Mutex
	seen  uint64                   // what moved was when shown was decided
	shown map[backendLabels]uint32 // the ids; nil before the first decision
}

type backendLabels struct {
	serviceName
	port, backend string
}

// NewBackends returns the metrics of at most limit backends. Moved returns a number that changes
// whenever the tables change.
func NewBackends(tables Tables, limit int, moved func() uint64) *Backends {
	return &Backends{tables: tables, limit: limit, moved: moved}
}

// Describe implements [prometheus.Collector].
func (b *Backends) Describe(to chan<- *prometheus.Desc) {
	for _, m := range backendMetrics() {
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
			to <- prometheus.NewInvalidMetric(backendActive.desc, err)

			return
		}
		b.seen = moved
	}
	for l, id := range b.shown {
		h := b.tables.Loads.Handshakes(id)
		for m, value := range map[*metric]float64{
			backendActive:      float64(max(0, b.tables.Loads.Load(id).Live())),
			backendHandshakes:  float64(h.Answered),
			backendSeconds:     float64(h.Time) / float64(time.Second),
			backendUnanswered:  float64(h.Failed),
			backendRetransmits: float64(h.SynRetransmits),
		} {
			m.send(to, value, l.namespace, l.name, l.port, l.backend)
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
			ports[e.Key] = backendLabels{serviceName: name, port: strings.ToValidUTF8(port, "")}
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
