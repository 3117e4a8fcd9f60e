package agent

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"
)

// GOGC, in percent of the live heap. Nearly all that a start reads is garbage at once, and
// collecting it competes with the verifier for processors. In a large cluster memory counts
// more: garbage is limited to mostWaste bytes, or to a quarter of the live heap if that is more.
const (
	startGC   = 200
	usualGC   = 100
	leastGC   = 25
	mostWaste = 100 << 20
)

// collectSeldom sets GOGC for the time in which objects are read, unless the environment
// sets it.
func collectSeldom() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(startGC)
	}
}

// collectBySize sets GOGC by the size of the heap, to most percent at most, unless the
// environment sets it.
func collectBySize(most int) {
	if os.Getenv("GOGC") != "" {
		return
	}
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	debug.SetGCPercent(gcPercent(stats.HeapAlloc, most))
}

func gcPercent(kept uint64, most int) int {
	return min(most, int(max(leastGC, mostWaste*100/max(kept, 1))))
}

// giveBack returns memory to the kernel that a start has used and nothing needs any
// more: what was freed, for the first lists are much larger than what is kept of
// them; and the pages of the executable, of which a start touches most, and an agent
// at rest a quarter. Those come back, from the page cache, as they are used.
func giveBack(log *slog.Logger) {
	debug.FreeOSMemory()
	if err := dropExecutable(); err != nil {
		log.Debug("the executable stays in memory", "error", err)
	}
}

// dropExecutable unmaps the pages of this process' own executable that cannot have
// been changed.
func dropExecutable() error {
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	mappings, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer mappings.Close()
	for lines := bufio.NewScanner(mappings); lines.Scan(); {
		if !strings.HasSuffix(lines.Text(), " "+path) {
			continue
		}
		// As in: 00401000-013f5000 r-xp 00001000 08:01 1234 /usr/bin/sluice
		var begin, end uintptr
		var access string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &begin, &end, &access); err != nil {
			return err
		}
		if access != "r-xp" && access != "r--p" {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, begin, end-begin, unix.MADV_DONTNEED); errno != 0 {
			return errno
		}
	}

	return nil
}
