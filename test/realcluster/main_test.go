package realcluster

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	Main()
	lab.Main()
	if os.Getenv(childVariable) != "" {
		becomeKilled()
	}
	os.Exit(m.Run())
}

// skipUnlessAsked skips what `make test-cluster` runs: it takes minutes, and needs an
// image and binaries that take more to build.
func skipUnlessAsked(t *testing.T) {
	t.Helper()
	if os.Getenv("SLUICE_TEST_CLUSTER") == "" {
		t.Skip("make test-cluster runs it")
	}
}

// childVariable makes this executable the run that TestKilled kills.
const childVariable = "SLUICE_REALCLUSTER_KILLED"

func becomeKilled() {
	_, err := New(context.Background(), Config{Source: "../..", Nodes: 1})
	fmt.Println("up:", err)
	select {} // until it is killed
}

// A run that is killed leaves no process, namespace or cgroup with processes, and the
// next run removes its files.
func TestKilled(t *testing.T) {
	skipUnlessAsked(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	lab.Must(t, err)
	lab.Must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	lab.Must(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	if line != "up: <nil>\n" {
		t.Fatalf("the cluster says %q, %v", line, err)
	}
	if len(remains(t, cmd.Process.Pid, "files")) == 0 {
		t.Error("no files are left: they are not where they are looked for")
	}
	lab.EventuallyIn(t, startTimeout, "nothing is left but files", func() error {
		if left := remains(t, cmd.Process.Pid, "processes", "namespaces", "cgroups", "cgroups of v1"); len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}

		return nil
	})
	lab.Must(t, sweep())
	if left := remains(t, cmd.Process.Pid, "processes", "namespaces", "cgroups", "cgroups of v1", "files"); len(left) > 0 {
		t.Errorf("after the next start there are %v", left)
	}
}

// remains lists what is left of a run with this process ID.
func remains(t *testing.T, owner int, kinds ...string) (left []string) {
	t.Helper()
	root, err := lab.CgroupRoot()
	lab.Must(t, err)
	v1, err := cgroupRoot()
	lab.Must(t, err)
	own := fmt.Sprintf("sluice-%d-*", owner)
	for _, kind := range kinds {
		var pattern string
		switch kind {
		case "namespaces":
			pattern = "/run/netns/" + own
		case "cgroups":
			pattern = filepath.Join(root, own)
		case "cgroups of v1":
			pattern = filepath.Join(v1, "*", own)
		case "files":
			pattern = filepath.Join(os.TempDir(), fmt.Sprintf("%s%d-*", folderPrefix, owner))
		case "processes":
			left = append(left, processesOf(t, fmt.Sprintf("%s%d-", folderPrefix, owner))...)

			continue
		}
		found, err := filepath.Glob(pattern)
		lab.Must(t, err)
		left = append(left, found...)
	}

	return left
}

// processesOf lists processes with such an argument, as all servers of a cluster have.
func processesOf(t *testing.T, argument string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	lab.Must(t, err)
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(text), argument) && filepath.Base(filepath.Dir(path)) != fmt.Sprint(unix.Getpid()) {
			found = append(found, path)
		}
	}

	return found
}
