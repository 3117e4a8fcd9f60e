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

// ofNodes are the binaries of a cluster with nodes: those of its control plane, and
// what nodes run, which [Cluster.Binary] finds.
var ofNodes = []string{
	"etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler",
	"kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "coredns",
}

// findBinaries returns the folder of these binaries, by default those that build.sh
// builds by default, and builds what is missing.
func findBinaries(ctx context.Context, names ...string) (string, error) {
	if folder := os.Getenv("SLUICE_TEST_BINARIES"); folder != "" {
		return folder, nil
	}
	script, err := findScript()
	if err != nil {
		return "", fmt.Errorf("search for build.sh: %w", err)
	}

	cmd := exec.CommandContext(ctx, script, names...)
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
