package agent

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
)

// A small cluster's agent takes its time for garbage, a large one's must not double.
func TestGCPercent(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		kept       uint64
		most, want int
	}{
		{0, startGC, 200}, {20 * mib, startGC, 200}, {80 * mib, startGC, 125}, {400 * mib, startGC, 25}, {4000 * mib, startGC, 25},
		{0, usualGC, 100}, {80 * mib, usualGC, 100}, {200 * mib, usualGC, 50}, {4000 * mib, usualGC, 25},
	} {
		if percent := gcPercent(test.kept, test.most); percent != test.want {
			t.Errorf("%d MiB, at most %d %%: %d %%, want %d", test.kept/mib, test.most, percent, test.want)
		}
	}
}

// What a process does not need for now of its executable is not in its memory
// afterwards, and it goes on as before.
func TestDropExecutable(t *testing.T) {
	before := mustReadFilePages(t)
	if err := dropExecutable(); err != nil {
		t.Fatal(err)
	}
	after := mustReadFilePages(t)
	if after >= before {
		t.Errorf("%d KiB of files in memory before, %d after", before, after)
	}
}

// mustReadFilePages returns how much memory of files this process has, in KiB.
func mustReadFilePages(t *testing.T) int {
	t.Helper()
	status, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	defer status.Close()
	for lines := bufio.NewScanner(status); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "RssFile:"); ok {
			var kib int
			if _, err := fmt.Sscan(value, &kib); err != nil {
				t.Fatal(err)
			}

			return kib
		}
	}
	t.Fatal("no RssFile in /proc/self/status")

	return 0
}
