package bpf

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Times of maps are compared by elapsed() only, since another CPU may have written a later one.
func TestElapsed(t *testing.T) {
	sources, err := filepath.Glob("*.c")
	lab.Must(t, err)
	headers, err := filepath.Glob("lib/*.h")
	lab.Must(t, err)
	difference := regexp.MustCompile(`\bnow - \*?\w+`)
	for _, path := range append(sources, headers...) {
		if path == "lib/clock.h" {
			continue
		}
		text, err := os.ReadFile(path)
		lab.Must(t, err)
		if found := difference.Find(text); found != nil {
			t.Errorf("%s: %s: want elapsed()", path, found)
		}
	}
}
