package devices

import (
	"errors"
	"testing"
	"time"
)

// must fails the test if one of the errors is one.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// eventually waits until check returns no error.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	err := check()
	for deadline := time.Now().Add(waitTimeout); err != nil; err = check() {
		if time.Now().After(deadline) {
			t.Fatalf("not after %v: %s: %v", waitTimeout, what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
