package reconcile

import (
	"fmt"
	stdmaps "maps"
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

// smallTable is the size of tables by hash in tests that look at all maps after every store.
const smallTable = 67

// mustNew returns a Reconciler of these tables, which is not cut short.
func mustNew(t testing.TB, tables maps.Tables, clock *testClock) *Reconciler {
	t.Helper()
	r, err := New(Config{Tables: tables, Now: clock.read, Slice: 1 << 30, TableSize: smallTable})
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

// graces passes grace periods until nothing waits for one.
func graces(r *Reconciler) {
	for range 1000 {
		if !r.Retired() {
			return
		}
		r.BeginGrace()
		r.EndGrace()
		_ = r.Apply()
	}
	panic("it never comes to rest")
}

// applyAll calls Apply whenever something is due, until nothing is, and passes grace periods.
func applyAll(t testing.TB, r *Reconciler, clock *testClock) {
	t.Helper()
	for range 100000 {
		at, ok := r.Next()
		if !ok && !r.Retired() {
			return
		}
		if ok && at.After(clock.now) {
			clock.now = at
		}
		if r.Retired() {
			r.BeginGrace()
			r.EndGrace()
		}
		_ = r.Apply()
	}
	t.Fatal("it never comes to rest")
}

// writeLog records writes as text.
type writeLog struct {
	lines []string
	place string // of the last line
	slots int    // how many of the last lines are consecutive writes to slots
}

func (l *writeLog) add(format string, args ...any) {
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
	l.place, l.slots = "", 0
}

// manySlots is how many consecutive writes to slots are recorded one by one.
const manySlots = 8

// addSlot records a write to a slot. Many in a row are a table: they are counted.
func (l *writeLog) addSlot(key, value string) {
	before := l.slots
	if before >= manySlots {
		l.lines = l.lines[:len(l.lines)-1]
		l.add("put slots: %d more up to %s", before+1-manySlots+1, key)
	} else {
		l.add("put slots: %s: %s", key, value)
	}
	l.slots = before + 1
}

// addPlace records a store to a place of an array. Consecutive stores to one place are one line.
func (l *writeLog) addPlace(name, key, value string) {
	if l.place == key {
		l.lines = l.lines[:len(l.lines)-1]
	}
	l.add("put %s: %s: %s", name, key, value)
	l.place = key
}

// take returns what was written since the last call.
func (l *writeLog) take() string {
	lines := l.lines
	*l = writeLog{}

	return strings.Join(lines, "\n")
}

// loggedTables returns tables whose writes are taken down.
func loggedTables(t maps.Tables, log *writeLog) maps.Tables {
	t.FrontendIDs = logged[maps.FrontendKey, uint32]{t.FrontendIDs, log, frontendIDText}
	t.ServicePorts = logged[uint32, maps.ServicePort]{t.ServicePorts, log, servicePortText}
	t.Addrs = logged[maps.Addr, maps.AddrUse]{t.Addrs, log, addrText}
	t.Devices = logged[uint32, maps.Device]{t.Devices, log, deviceText}
	t.SourceRanges = logged[maps.SourceRangeKey, uint32]{t.SourceRanges, log, sourceRangeText}
	t.ServiceCIDRs = logged[maps.CIDRKey, uint32]{t.ServiceCIDRs, log, cidrText}
	t.OptedOut = logged[maps.PodUID, uint32]{t.OptedOut, log, optedOutText}
	t.LocalCIDRs = logged[maps.CIDRKey, uint32]{t.LocalCIDRs, log, cidrText}
	logArray(t.Frontends, log, frontendText)
	logArray(t.Pools, log, poolText)
	logArray(t.Backends, log, backendText)
	logArray(t.Slots, log, slotText)

	return t
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

// logArray takes down the stores to an array. Which place they are to is seen by what has
// changed.
func logArray[V comparable](a *maps.Array[V], log *writeLog, text func(uint32, V) (string, string)) {
	before := stdmaps.Collect(a.All())
	a.Wrote = func(name, _ string) {
		after := stdmaps.Collect(a.All())
		for place := range before {
			if _, there := after[place]; !there {
				after[place] = *new(V)
			}
		}
		for place, v := range after {
			if before[place] == v {
				continue
			}
			key, value := text(place, v)
			if name == maps.NameSlots {
				log.addSlot(key, value)
			} else {
				log.addPlace(name, key, value)
			}
		}
		before = after
	}
}

func outcome(err error) string {
	if err == nil {
		return ""
	}

	return " FAILED"
}
