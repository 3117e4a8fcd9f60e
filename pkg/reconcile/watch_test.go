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
type writeLog struct{ lines []string }

func (l *writeLog) add(format string, args ...any) {
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

// take returns what was written since the last call.
func (l *writeLog) take() string {
	lines := l.lines
	l.lines = nil

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
	s.log.add("put slots: slot %d: backend %d%s", i, id, outcome(err))

	return err
}

func outcome(err error) string {
	if err == nil {
		return ""
	}

	return " FAILED"
}
