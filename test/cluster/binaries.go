package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// mustFindBinaries returns the folder of etcd, kube-apiserver, kubectl and
// kube-proxy, and builds them if they are missing.
func mustFindBinaries(t testing.TB) string {
	t.Helper()

	if folder := os.Getenv("SLUICE_TEST_BINARIES"); folder != "" {
		return folder
	}
	script, err := findScript()
	if err != nil {
		t.Fatalf("search for build.sh: %v", err)
	}

	cmd := exec.Command(script)
	cmd.Stderr = os.Stderr // where it says what it builds, as soon as it begins
	stdout, err := cmd.Output()
	if err != nil {
		t.Fatalf("build of the cluster's binaries: %v", err)
	}
	lines := strings.Split(strings.TrimSpace(string(stdout)), "\n")

	return lines[len(lines)-1]
}

// findScript looks for build.sh in the source tree around the working
// directory, which for a test is the folder of its package.
func findScript() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for directory := start; ; directory = filepath.Dir(directory) {
		script := filepath.Join(directory, "test", "cluster", "build.sh")
		_, err := os.Stat(script)
		if err == nil {
			return script, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		if directory == filepath.Dir(directory) {
			return "", fmt.Errorf("%s is not inside the source tree", start)
		}
	}
}
