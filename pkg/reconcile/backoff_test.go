package reconcile

import (
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// A failed write is tried again after 1 s, 2 s, 4 s, … up to a minute; other Services do not wait.
func TestBackoff(t *testing.T) {
	clock := newTestClock()
	fakes := maps.NewFakes(100)
	attempts := 0
	fail := true
	fakes.FrontendIDs.Fail = func(string, string) error {
		attempts++
		if fail {
			return errInjected
		}

		return nil
	}
	r := mustNew(t, fakes.Tables, clock)
	for _, w := range mustParseDesired(t, "10.96.0.1:80 -> 10.0.1.7:8080") {
		r.Set(w.name, w.created, w.res)
	}

	var waits []time.Duration
	for range 9 {
		before := attempts
		if err := r.Apply(); err == nil {
			t.Fatal("no error")
		}
		if attempts != before+1 {
			t.Fatalf("%d attempts", attempts-before)
		}
		_ = r.Apply() // not due: does nothing
		if attempts != before+1 {
			t.Fatal("did not wait")
		}
		at, _ := r.Next()
		waits = append(waits, at.Sub(clock.now))
		clock.now = at
	}
	want := []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60}
	for i := range want {
		want[i] *= time.Second
	}
	if !slices.Equal(waits, want) {
		t.Errorf("waits %v, want %v", waits, want)
	}

	fail = false
	mustApply(t, r)
	applyAll(t, r, clock)
	if at, ok := r.Next(); ok {
		t.Errorf("something is due at %v", at)
	}
	if len(fakes.FrontendIDs.Entries) != 1 {
		t.Error("the frontend is not there")
	}
}

// A change is tried at once, also during a backoff.
func TestChangeEndsBackoff(t *testing.T) {
	clock := newTestClock()
	fakes := maps.NewFakes(100)
	fakes.FrontendIDs.Fail = func(string, string) error { return errInjected }
	r := mustNew(t, fakes.Tables, clock)
	set := func(text string) {
		for _, w := range mustParseDesired(t, text) {
			r.Set(w.name, w.created, w.res)
		}
	}
	set("10.96.0.1:80 -> 10.0.1.7:8080")
	_ = r.Apply()
	fakes.FrontendIDs.Fail = nil
	mustApply(t, r)
	if len(fakes.FrontendIDs.Entries) != 0 {
		t.Fatal("did not wait")
	}
	set("10.96.0.1:80 -> 10.0.1.8:8080")
	mustApply(t, r)
	if len(fakes.FrontendIDs.Entries) != 1 {
		t.Error("the change was not tried")
	}
}
