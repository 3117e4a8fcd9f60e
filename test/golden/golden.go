// Package golden compares what a test finds with a file of the tree. With -update, the test
// writes the file first.
package golden

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

var update = flag.Bool("update", false, "rewrite the files that tests compare")

// Match fails the test, and goes on, if the file has another text.
func Match(t testing.TB, path, got string) {
	t.Helper()
	if *update {
		lab.Must(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (-update writes it)", err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s (-want +got; -update rewrites it):\n%s", path, diff)
	}
}
