package sluice

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"runtime"
)

// binaries is where tests build to: outside of the tree, and for one checkout always
// the same place, so that nothing piles up. Another checkout has another: its tests
// may run at the same time.
func binaries() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	_, source, _, _ := runtime.Caller(0)
	checkout := fnv.New64a()
	checkout.Write([]byte(source)) // never fails

	return filepath.Join(cache, "sluice", fmt.Sprintf("test-binaries-%x", checkout.Sum64()))
}
