package e2e

import (
	"errors"
	"testing"
	"time"
)

// eventually waits until check holds.
func eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); !check(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after %v: %s", waitTimeout, what)
		}
	}
}

// must fails the test if one of the errors is one.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
