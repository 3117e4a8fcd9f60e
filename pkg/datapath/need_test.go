package datapath

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// An error of a limit names the limit and what to do; others stay as they are.
func TestLimitsAreNamed(t *testing.T) {
	for _, test := range []struct {
		err  error
		want []string
	}{
		{unix.ENOMEM, []string{"leaves ", " MiB for maps and programs: ", "or set a smaller --flow-table-memory"}},
		{unix.EMFILE, []string{"this process may have ", " files open: raise the limit"}},
	} {
		err := explainLimit(fmt.Errorf("map flows: %w", test.err))
		if !errors.Is(err, test.err) {
			t.Errorf("%v does not wrap %v", err, test.err)
		}
		for _, text := range append(test.want, "map flows: ") {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%v has no %q", err, text)
			}
		}
	}
	if err := explainLimit(unix.EINVAL); err != unix.EINVAL {
		t.Errorf("another error has become %v", err)
	}
}
