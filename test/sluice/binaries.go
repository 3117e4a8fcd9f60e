package sluice

import (
	"os"
	"path/filepath"
)

// binaries is where tests build to: outside of the tree, and always the same
// place, so that nothing piles up.
func binaries() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}

	return filepath.Join(cache, "sluice", "test-binaries")
}
