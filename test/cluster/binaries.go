package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// findBinaries returns the folder of etcd, kube-apiserver, kubectl and
// kube-proxy, and builds them if they are missing.
func findBinaries(ctx context.Context) (string, error) {
	if folder := os.Getenv("SLUICE_TEST_BINARIES"); folder != "" {
		return folder, nil
	}
	script, err := findScript()
	if err != nil {
		return "", fmt.Errorf("search for build.sh: %w", err)
	}

	cmd := exec.CommandContext(ctx, script)
	cmd.Stderr = os.Stderr // it reports there what it builds
	stdout, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build of the cluster's binaries: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(stdout)), "\n")

	return lines[len(lines)-1], nil
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
