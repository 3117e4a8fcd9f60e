package lab

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test that dies runs in a process of its own, which gets the way by its environment.
const deathVariable = "SLUICE_LAB_DEATH"

// traces lists what a process has left behind.
func traces(t testing.TB, pid int) []string {
	t.Helper()
	var found []string
	for _, dir := range []string{netnsDir, mustCgroupRoot(t), bpffs} {
		left, err := filepath.Glob(filepath.Join(dir, fmt.Sprintf("sluice-%d-*", pid)))
		Must(t, err)
		found = append(found, left...)
	}

	return found
}

func TestNothingIsLeftBehind(t *testing.T) {
	NeedsRoot(t)
	for _, death := range []string{"success", "failure", "panic", "panic elsewhere", "exit", "kill"} {
		t.Run("after "+death, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestCleanupAfterDeath$", "-test.v")
			cmd.Env = append(os.Environ(), deathVariable+"="+death)
			cmd.Stdout, cmd.Stderr = &out, &out
			Must(t, cmd.Start())
			pid := cmd.Process.Pid
			if err := cmd.Wait(); (err == nil) != (death == "success") {
				t.Fatalf("test ended with %v:\n%s", err, &out)
			}
			if !strings.Contains(out.String(), "ready to die") {
				t.Fatalf("test did not get far:\n%s", &out)
			}
			// The guardian comes after the death.
			for deadline := time.Now().Add(5 * time.Second); len(traces(t, pid)) > 0; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("left behind: %v", traces(t, pid))
				}
			}
		})
	}
}

// TestCleanupAfterDeath is run by TestNothingIsLeftBehind.
func TestCleanupAfterDeath(t *testing.T) {
	death := os.Getenv(deathVariable)
	if death == "" {
		t.Skip("for TestNothingIsLeftBehind")
	}
	cluster := MustNew(t, Config{Nodes: 1, PodsPerNode: 1})
	pod := cluster.Nodes[0].Pods[0]
	cgroup := MustCgroup(t, "death")
	MustServe(t, pod.Namespace, pod.Name, pod.At(80)...)
	caller := MustCaller(t, pod.Namespace, cgroup)
	if _, err := caller.Request("tcp", pod.At(80)[0]); err != nil {
		t.Fatal(err)
	}
	Must(t, os.Mkdir(MustBPFRoot(t), 0o700))
	if len(traces(t, os.Getpid())) != 5 {
		t.Fatalf("found %v, want three namespaces, a cgroup and a folder of pins", traces(t, os.Getpid()))
	}
	fmt.Println("ready to die")

	switch death {
	case "failure":
		t.Fatal(death)
	case "panic":
		panic(death)
	case "panic elsewhere":
		go panic(death)
		select {}
	case "exit":
		os.Exit(3)
	case "kill":
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}

func TestSweep(t *testing.T) {
	living := MustNamespace(t, "living")
	dead := exec.Command("true")
	Must(t, dead.Run())
	name := fmt.Sprintf("sluice-%d-abcdef-dead", dead.Process.Pid)
	Must(t, newNamedNetns(name), os.Mkdir(filepath.Join(bpffs, name), 0o700))
	cgroup, err := makeCgroup(filepath.Join(mustCgroupRoot(t), name))
	Must(t, err)
	defer cgroup.Close()
	sleep := exec.Command("sleep", "60")
	Must(t, Start(nil, cgroup, sleep))

	Must(t, Sweep())
	if left := traces(t, dead.Process.Pid); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := sleep.Wait(); err == nil {
		t.Error("sleep ended by itself, want it killed")
	}
	if _, err := os.Stat(living.Path()); err != nil {
		t.Errorf("what belongs to a living process is gone: %v", err)
	}
}

func TestOwnerOf(t *testing.T) {
	for _, test := range []struct {
		name string
		pid  int
		ok   bool
	}{
		{newName("x"), os.Getpid(), true},
		{"sluice-12-abcdef-pod-1-0", 12, true},
		{"sluice-12-abcdef", 12, true},
		{"sluice-12", 0, false},
		{"sluice-agent", 0, false},
		{"sluice-99999999999999999999-abcdef-x", 0, false},
		{"my-sluice-12-abcdef-x", 0, false},
	} {
		pid, ok := ownerOf(test.name)
		if ok != test.ok || ok && pid != test.pid {
			t.Errorf("owner of %s is %d, %t, want %d, %t", test.name, pid, ok, test.pid, test.ok)
		}
	}
}
