package scene

import (
	"errors"
	"testing"
	"time"
)

// Timeout limits how long a change may take until every client sees it. It takes
// milliseconds, but the machine may be slow and busy.
const Timeout = 40 * time.Second

// Eventually waits until check holds.
func Eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Timeout); !check(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after %v: %s", Timeout, what)
		}
	}
}

// Must fails the test if one of the errors is one.
func Must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
