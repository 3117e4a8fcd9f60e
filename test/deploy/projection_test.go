package deploy

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustProject writes files as a kubelet does: behind links, so that all of them
// change at once.
func mustProject(t testing.TB, files map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	lab.Must(t, os.Chmod(folder, 0o755))
	mustSwap(t, folder, "..first", files)
	for name := range files {
		lab.Must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(folder, name)))
	}

	return folder
}

// mustSwap has a projection show another version of its files.
func mustSwap(t testing.TB, folder, version string, files map[string]string) {
	t.Helper()
	lab.Must(t, os.Mkdir(filepath.Join(folder, version), 0o755))
	for name, text := range files {
		lab.Must(t, os.WriteFile(filepath.Join(folder, version, name), []byte(text), 0o644))
	}
	link := filepath.Join(folder, "..data_tmp")
	lab.Must(t, os.Symlink(version, link), os.Rename(link, filepath.Join(folder, "..data")))
}
