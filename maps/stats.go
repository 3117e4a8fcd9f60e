package maps

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
)

// The counts of [Stats] other than those by reason.
const (
	StatBytesSent      = uint32(256)
	StatBytesReceived  = uint32(257)
	StatHandshakeTime  = uint32(258) // in nanoseconds
	StatUnanswered     = uint32(259) // handshakes that have failed
	StatSYNRetransmits = uint32(260)
	StatRetransmits    = uint32(261)
	StatHiddenRefusals = uint32(262) // connections that were tried elsewhere after a refusal
	// StatSYNs is the first of a few counts: handshakes by how many SYNs were sent again, 1, 2, 3
	// to 4, and so on.
	StatSYNs = uint32(384)
	// StatHandshake is the first of many counts: handshakes that were answered, by their duration.
	StatHandshake = uint32(512)
)

// The buckets of durations are those of a native histogram of Prometheus with this schema. The first
// one ends at this power of two, in seconds.
const (
	HistogramSchema = int(abiHistogramHISTOGRAM_SCHEMA)
	HistogramLeast  = -int(abiHistogramHISTOGRAM_LEAST)
)

// StatKey identifies a count of a service port id: the new flows with an outcome (What is a
// [Reason]), or what one of the Stat constants stands for.
type StatKey struct {
	ServicePortId uint32
	What          uint32
}

// PortCounts are the counts of a service port on one CPU.
type PortCounts = abiPortCounts

// Handshakes are the TCP handshakes of a service port, and what its clients sent again.
type Handshakes = abiHandshakes

// RefusalKey identifies the count of refused new flows of a service port, by reason.
type RefusalKey = abiRefusalKey

// AllServicePorts has the refusals of service ports for which there is no room in refusals.
const AllServicePorts = uint32(0)

// Stats are the maps port_counts, handshakes and refusals: the counts of each service port in
// service_ports.
type Stats struct {
	counts     *chunked
	handshakes *chunked // too large to be mapped: of most service ports a node has none
	measures   bool     // handshakes have places for every service port
	refusals   *Map[RefusalKey, uint64]
	ports      *Map[uint32, ServicePort]

	zeroFrom uint32 // the places from here on have never been used: see Begin

	mu    sync.Mutex
	ended map[StatKey]uint64 // not yet taken by Ended; nil before its first call
}

// countAll makes the entries of [AllServicePorts], for each reason, with the counts of another version of the state: programs
// find no room for them when they need them, nor does [Pinned.CopyState] when it has copied all others.
func (p *Pinned) countAll() error {
	refusals := p.Stats.refusals
	at := slices.IndexFunc(p.outdated, func(o *outdated) bool { return o.name == NameRefusals })
	for reason := range uint32(reasonCount) {
		if r := Reason(reason); r == ReasonNext || r == ReasonTranslated {
			continue
		}
		key := RefusalKey{ServicePortId: AllServicePorts, Reason: reason}
		_, there, err := refusals.Lookup(key)
		if err == nil && !there {
			var former []byte
			if at >= 0 {
				former, err = p.outdated[at].from.LookupBytes(key)
			}
			var n uint64
			if len(former) >= 8 {
				n = binary.NativeEndian.Uint64(former)
			}
			err = errors.Join(err, refusals.Put(key, n))
		}
		if err != nil && !errors.Is(err, ErrFull) {
			return err
		}
	}

	return nil
}

// Capacity returns how many refusals, by service port and reason, can be counted.
func (s *Stats) Capacity() int { return s.refusals.Capacity() }

// All yields every count that is not zero, summed over all CPUs, in no order. It stops after the
// first error.
func (s *Stats) All() iter.Seq2[Entry[StatKey, uint64], error] {
	return func(yield func(Entry[StatKey, uint64], error) bool) {
		for port, err := range s.ports.All() {
			if err != nil {
				yield(Entry[StatKey, uint64]{}, err)

				return
			}
			counts, handshakes, err := s.port(port.Key)
			if err != nil {
				yield(Entry[StatKey, uint64]{}, err)

				return
			}
			for what, n := range whats(counts, handshakes) {
				if !yield(Entry[StatKey, uint64]{StatKey{port.Key, what}, n}, nil) {
					return
				}
			}
		}
		for refused, err := range s.refusals.All() {
			key := StatKey{refused.Key.ServicePortId, refused.Key.Reason}
			if err == nil && refused.Value == 0 {
				continue
			}
			if !yield(Entry[StatKey, uint64]{key, refused.Value}, err) || err != nil {
				return
			}
		}
	}
}

// whats yields the counts of a service port that are not zero.
func whats(c PortCounts, h Handshakes) iter.Seq2[uint32, uint64] {
	return func(yield func(uint32, uint64) bool) {
		for what, n := range map[uint32]uint64{
			uint32(ReasonTranslated): c.Connections, StatBytesSent: c.BytesSent, StatBytesReceived: c.BytesReceived,
			StatHandshakeTime: h.Time, StatUnanswered: h.Failed, StatSYNRetransmits: h.SynRetransmits, StatRetransmits: h.Retransmits,
			StatHiddenRefusals: c.HiddenRefusals,
		} {
			if n != 0 && !yield(what, n) {
				return
			}
		}
		for bucket, n := range h.SynBuckets {
			if n != 0 && !yield(StatSYNs+uint32(bucket), n) {
				return
			}
		}
		for bucket, n := range h.Buckets {
			if n != 0 && !yield(StatHandshake+uint32(bucket), n) {
				return
			}
		}
	}
}

// loadCounts reads a place that consists of 64-bit counts, and may not exist. Programs write
// meanwhile: each count is read at once.
func loadCounts[V any](words []uint32, v *V) {
	if words == nil {
		return
	}
	from := unsafe.Slice((*uint64)(unsafe.Pointer(&words[0])), len(words)/2)
	to := unsafe.Slice((*uint64)(unsafe.Pointer(v)), len(words)/2)
	for i := range to {
		to[i] = atomic.LoadUint64(&from[i])
	}
}

// port returns the counts of a service port, summed over all CPUs, and those of its handshakes:
// without a connection it has none.
func (s *Stats) port(id uint32) (sum PortCounts, h Handshakes, err error) {
	m, at := s.counts.place(id)
	if m == nil {
		return sum, h, nil
	}
	var perCPU []PortCounts
	if err := m.Lookup(at, &perCPU); err != nil {
		return sum, h, fmt.Errorf("map %s: lookup: %w", NamePortCounts, err)
	}
	for _, c := range perCPU {
		sum.Connections += c.Connections
		sum.BytesSent += c.BytesSent
		sum.BytesReceived += c.BytesReceived
		sum.HiddenRefusals += c.HiddenRefusals
	}

	if m, at = s.handshakes.place(id); m != nil && sum.Connections > 0 {
		if err := m.Lookup(at, &h); err != nil {
			return sum, h, fmt.Errorf("map %s: lookup: %w", NameHandshakes, err)
		}
	}

	return sum, h, nil
}

// Reserve implements [Counts].
func (s *Stats) Reserve(n int) error {
	if s.measures {
		if err := s.handshakes.reserve(n); err != nil {
			return err
		}
	}

	return s.counts.reserve(n)
}

// Begin implements [Counts]. One goroutine calls it.
func (s *Stats) Begin(id uint32) error {
	if err := s.Reserve(int(Index(id)) + 1); err != nil {
		return err
	}
	if Index(id) >= s.zeroFrom { // in a chunk that this process has made
		s.zeroFrom = Index(id) + 1

		return nil
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("map %s: CPUs: %w", NamePortCounts, err)
	}
	m, at := s.counts.place(id)
	if err := m.Put(at, make([]PortCounts, cpus)); err != nil {
		return fmt.Errorf("map %s: put: %w", NamePortCounts, err)
	}
	if m, at = s.handshakes.place(id); m != nil {
		if err := m.Put(at, Handshakes{}); err != nil {
			return fmt.Errorf("map %s: put: %w", NameHandshakes, err)
		}
	}

	return nil
}

// End implements [Counts]. It keeps the last counts for [Stats.Ended].
func (s *Stats) End(id uint32) error {
	last := make(map[StatKey]uint64)
	counts, handshakes, err := s.port(id)
	errs := []error{err}
	for what, n := range whats(counts, handshakes) {
		last[StatKey{id, what}] = n
	}
	for reason := range uint32(reasonCount) {
		key := RefusalKey{ServicePortId: id, Reason: reason}
		n, ok, err := s.refusals.Lookup(key)
		if ok {
			last[StatKey{id, reason}] = n
			err = s.refusals.Delete(key)
		}
		errs = append(errs, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		maps.Copy(s.ended, last)
	}

	return errors.Join(errs...)
}

// Ended returns the final counts of the service ports whose ids were freed since the last call;
// the first call returns nothing.
func (s *Stats) Ended() map[StatKey]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := s.ended
	s.ended = make(map[StatKey]uint64)

	return ended
}

// Prune deletes the refusals of ids that no service port has, which an agent that was killed
// before it called [Stats.End] has left. No other goroutine may call End or Begin meanwhile.
func (s *Stats) Prune() error {
	var gone []RefusalKey // deleted after the iteration, which deletes would disturb
	for e, err := range s.refusals.All() {
		if err != nil {
			return err
		}
		_, ok, err := s.ports.Lookup(e.Key.ServicePortId)
		if err != nil {
			return err
		}
		if !ok && e.Key.ServicePortId != AllServicePorts {
			gone = append(gone, e.Key)
		}
	}
	for _, key := range gone {
		if err := s.refusals.Delete(key); err != nil {
			return err
		}
	}

	return nil
}
