package reconcile

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// testClock is a clock that a test moves.
type testClock struct{ now time.Time }

func newTestClock() *testClock {
	return &testClock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
}

func (c *testClock) read() time.Time { return c.now }

func (c *testClock) pass(d time.Duration) { c.now = c.now.Add(d) }

// mustNew returns a Reconciler of these tables.
func mustNew(t testing.TB, tables maps.Tables, clock *testClock) *Reconciler {
	t.Helper()
	r, err := New(Config{Tables: tables, Now: clock.read})
	if err != nil {
		t.Fatal(err)
	}

	return r
}

// mustApply applies until nothing is due any more.
func mustApply(t testing.TB, r *Reconciler) {
	t.Helper()
	if err := r.Apply(); err != nil {
		t.Fatal(err)
	}
}

// settle applies whenever something is due, until nothing ever is.
func settle(t testing.TB, r *Reconciler, clock *testClock) {
	t.Helper()
	for range 1000 {
		at, ok := r.Next()
		if !ok {
			return
		}
		if at.After(clock.now) {
			clock.now = at
		}
		_ = r.Apply()
	}
	t.Fatal("it never comes to rest")
}

// writeLog takes down writes as people read them.
type writeLog struct {
	lines []string
	slots int // of the last lines, how many are writes to slots in a row
}

func (l *writeLog) add(format string, args ...any) {
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
	l.slots = 0
}

// manySlots is how many writes to slots in a row are taken down one by one.
const manySlots = 8

// addSlot takes down a write to a slot. Many in a row are a table: they are
// counted.
func (l *writeLog) addSlot(slot, id uint32, err error) {
	before := l.slots
	if before >= manySlots {
		l.lines = l.lines[:len(l.lines)-1]
		l.add("put slots: %d more up to slot %d%s", before+1-manySlots+1, slot, outcome(err))
	} else {
		l.add("put slots: slot %d: backend %d%s", slot, id, outcome(err))
	}
	l.slots = before + 1
}

// take returns what was written since the last call.
func (l *writeLog) take() string {
	lines := l.lines
	*l = writeLog{}

	return strings.Join(lines, "\n")
}

// loggedTables returns tables whose writes are taken down.
func loggedTables(t maps.Tables, log *writeLog) maps.Tables {
	return maps.Tables{
		Frontends:    logged[maps.FrontendKey, maps.Frontend]{t.Frontends, log, frontendText},
		Slots:        loggedSlots{t.Slots, log},
		Backends:     logged[uint32, maps.Backend]{t.Backends, log, backendText},
		ServicePorts: logged[uint32, maps.ServicePort]{t.ServicePorts, log, servicePortText},
		Addrs:        logged[maps.Addr, maps.AddrUse]{t.Addrs, log, addrText},
		Devices:      logged[uint32, maps.Device]{t.Devices, log, deviceText},
		SourceRanges: logged[maps.SourceRangeKey, uint32]{t.SourceRanges, log, sourceRangeText},
		ServiceCIDRs: logged[maps.CIDRKey, uint32]{t.ServiceCIDRs, log, cidrText},
		LocalCIDRs:   logged[maps.CIDRKey, uint32]{t.LocalCIDRs, log, cidrText},
		Loads:        t.Loads,
	}
}

type logged[K comparable, V any] struct {
	maps.Table[K, V]
	log  *writeLog
	text func(K, V) (string, string)
}

func (t logged[K, V]) Put(k K, v V) error {
	err := t.Table.Put(k, v)
	key, value := t.text(k, v)
	t.log.add("put %s: %s: %s%s", t.Name(), key, value, outcome(err))

	return err
}

func (t logged[K, V]) Delete(k K) error {
	err := t.Table.Delete(k)
	var v V
	key, _ := t.text(k, v)
	t.log.add("delete %s: %s%s", t.Name(), key, outcome(err))

	return err
}

type loggedSlots struct {
	maps.Slots
	log *writeLog
}

func (s loggedSlots) Set(i, id uint32) error {
	err := s.Slots.Set(i, id)
	s.log.addSlot(i, id, err)

	return err
}

func outcome(err error) string {
	if err == nil {
		return ""
	}

	return " FAILED"
}
