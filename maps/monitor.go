package maps

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// MonitorEvent is a new flow that got a backend, or a refusal.
type MonitorEvent = abiMonitorEvent

// The kinds of a [MonitorEvent].
const (
	MonitorTranslated = uint8(abiMonitorKindMONITOR_TRANSLATED)
	MonitorRefused    = uint8(abiMonitorKindMONITOR_REFUSED)
)

// PlaceSocket is the place of a [MonitorEvent] that happened at a socket. At a device, the place is
// [HookIngress] or [HookEgress].
const PlaceSocket = uint8(abiMonitorPlacePLACE_SOCKET)

// MaxListeners is how many can listen at a time.
const MaxListeners = int(abiListenerLimitLISTENERS)

// ErrLapsed is returned by [Listener.Read] if the process was stopped for so long that it no longer
// listens.
var ErrLapsed = errors.New("no longer listening, because the process was stopped for too long")

const (
	// A listener that is killed costs something until its lease ends.
	lease   = 10 * time.Second
	renewal = time.Second
	// The update of an array of maps waits for running programs, which takes seconds on a busy machine.
	opening = time.Minute

	ringBytes = 1 << 20 // of some 8,700 events
)

// Listener receives every event of all programs, from the moment at which it was made. It takes no
// agent. One goroutine may use it.
type Listener struct {
	pinned *Pinned
	place  int
	until  uint64 // what is in its place
	ring   *ebpf.Map
	reader *ringbuf.Reader
	record ringbuf.Record
}

// Listen returns a listener, which the caller closes. It must be read at least each ten seconds,
// or else it no longer listens. The error wraps [ErrFull] if there are [MaxListeners].
func (p *Pinned) Listen() (*Listener, error) {
	if err := p.FreeListeners(); err != nil {
		return nil, err
	}
	l := &Listener{pinned: p, until: Now() + uint64(opening)}
	for l.place = 0; !p.takePlace(l.place, 0, l.until); {
		if l.place++; l.place == MaxListeners {
			return nil, fmt.Errorf("map %s, %d places: %w", NameListeners, MaxListeners, ErrFull)
		}
	}
	if err := l.open(); err != nil {
		return nil, errors.Join(err, l.Close())
	}

	return l, nil
}

func (l *Listener) open() (err error) {
	l.ring, err = ebpf.NewMap(&ebpf.MapSpec{Name: prefix + "ring", Type: ebpf.RingBuf, MaxEntries: ringBytes})
	if err != nil {
		return fmt.Errorf("ring buffer: %w", err)
	}
	if l.reader, err = ringbuf.NewReader(l.ring); err != nil {
		return fmt.Errorf("ring buffer: %w", err)
	}
	atomic.StoreUint64(l.lost(), 0)
	if err := l.pinned.byName[NameMonitorRings].Put(uint32(l.place), l.ring); err != nil {
		return fmt.Errorf("map %s: put: %w", NameMonitorRings, err)
	}

	return l.renew()
}

// renew extends the lease.
func (l *Listener) renew() error {
	until := Now() + uint64(lease)
	if !l.pinned.takePlace(l.place, l.until, until) {
		return ErrLapsed
	}
	l.until = until

	return nil
}

func (l *Listener) lost() *uint64 { return &l.pinned.listeners.values[MaxListeners+l.place] }

// Lost returns how many events did not fit into the ring buffer, because they were not read in time.
func (l *Listener) Lost() uint64 { return atomic.LoadUint64(l.lost()) }

// Read waits for the next event until a deadline, and returns false if there was none. The error
// wraps [ErrLapsed] if events may have been missed.
func (l *Listener) Read(deadline time.Time) (e MonitorEvent, ok bool, err error) {
	if l.until < Now()+uint64(lease-renewal) {
		if err := l.renew(); err != nil {
			return e, false, err
		}
	}
	if soon := time.Now().Add(renewal); soon.Before(deadline) {
		deadline = soon
	}
	l.reader.SetDeadline(deadline)
	err = l.reader.ReadInto(&l.record)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return e, false, nil
	}
	if err != nil {
		return e, false, fmt.Errorf("ring buffer: %w", err)
	}

	return beginOf[MonitorEvent](l.record.RawSample), true, nil
}

// Close stops listening.
func (l *Listener) Close() error {
	var errs []error
	if l.reader != nil {
		errs = append(errs, l.reader.Close())
	}
	if l.ring != nil {
		errs = append(errs, l.ring.Close())
	}

	return errors.Join(append(errs, l.pinned.freePlace(l.place, l.until))...)
}

// takePlace writes a time to a place if it contains another one, and reports whether it did.
func (p *Pinned) takePlace(place int, had, until uint64) bool {
	return atomic.CompareAndSwapUint64(&p.listeners.values[place], had, until)
}

// freePlace removes the ring buffer of a place that contains this time, and frees the place.
func (p *Pinned) freePlace(place int, had uint64) error {
	cleaning := Now() + uint64(opening)
	if !p.takePlace(place, had, cleaning) {
		return nil // another process has it
	}
	err := p.byName[NameMonitorRings].Delete(uint32(place))
	p.takePlace(place, cleaning, 0)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("map %s: delete: %w", NameMonitorRings, err)
	}

	return nil
}

// FreeListeners frees what listeners have left that were killed: their places, and the memory of
// their ring buffers.
func (p *Pinned) FreeListeners() error {
	var errs []error
	for place := range MaxListeners {
		var ring uint32
		had := atomic.LoadUint64(&p.listeners.values[place])
		left := p.byName[NameMonitorRings].Lookup(uint32(place), &ring) == nil
		if had != 0 && had < Now() || had == 0 && left {
			errs = append(errs, p.freePlace(place, had))
		}
	}

	return errors.Join(errs...)
}

// RecentRefusals returns the last refusals of each reason, the oldest first. There is one each
// second of those that are more frequent, after the first ones.
func (p *Pinned) RecentRefusals() ([]MonitorEvent, error) {
	var all []MonitorEvent
	for reason := range uint32(abiRecentLimitRECENT_REASONS) {
		var of abiRecent
		if err := p.byName[NameRecent].LookupWithFlags(reason, &of, ebpf.LookupLock); err != nil {
			return nil, fmt.Errorf("map %s: lookup: %w", NameRecent, err)
		}
		for _, e := range of.Refusals {
			if e.Time != 0 {
				all = append(all, e)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b MonitorEvent) int { return cmp.Compare(a.Time, b.Time) })

	return all, nil
}
