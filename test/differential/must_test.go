package differential

import (
	"errors"
	"testing"
)

// must fails the test if one of the errors is one.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
