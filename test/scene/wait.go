package scene

import (
	"errors"
	"testing"
	"time"
)

// Patience is how long a change may take until everybody sees it. It takes
// milliseconds; the machine may be slow, and busy.
const Patience = 40 * time.Second

// Eventually waits until check holds.
func Eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !check(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after %v: %s", Patience, what)
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
