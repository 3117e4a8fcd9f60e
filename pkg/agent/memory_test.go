package agent

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
)

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
