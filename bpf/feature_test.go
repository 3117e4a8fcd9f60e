package bpf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestFileContains(t *testing.T) {
	const part = 256 << 10
	for name, at := range map[string]int{"nowhere": -1, "at the beginning": 0, "across two parts": part - 2, "at the end": 2*part + 100} {
		t.Run("it is "+name, func(t *testing.T) {
			text := strings.Repeat("x", 2*part+104)
			if at >= 0 {
				text = text[:at] + "text" + text[at+4:]
			}
			path := filepath.Join(t.TempDir(), "file")
			lab.Must(t, os.WriteFile(path, []byte(text), 0o600))
			got, err := fileContains(path, "text")
			lab.Must(t, err)
			if got != (at >= 0) {
				t.Errorf("found: %t", got)
			}
		})
	}
}
