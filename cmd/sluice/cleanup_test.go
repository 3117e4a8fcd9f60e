package main

import (
	"net"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Cleanups of one bpf root exclude each other, whatever they remove.
func TestOneCleanupAtATime(t *testing.T) {
	where := places{bpfRoot: lab.MustBPFRoot(t)}
	// Anything in the network namespace can take an abstract name.
	taken, err := net.Listen("unix", "@sluice-cleanup:"+where.bpfRoot)
	lab.Must(t, err)
	defer taken.Close()
	lab.Must(t, os.Mkdir(where.bpfRoot, 0o700))
	first, err := lockCleanup(where.bpfRoot)
	lab.Must(t, err)
	for _, args := range [][]string{{}, {"--kube-proxy"}} {
		cmd := newCleanup(&where)
		cmd.SetArgs(args)
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "another cleanup is running") {
			t.Errorf("cleanup %v beside another: %v", args, err)
		}
	}
	if _, err := runVerb(where.bpfRoot, "agent", "--cleanup"); err == nil || !strings.Contains(err.Error(), "another cleanup is running") {
		t.Errorf("agent --cleanup beside a cleanup: %v", err)
	}
	lab.Must(t, first.Release())
	again, err := lockCleanup(where.bpfRoot)
	if err != nil {
		t.Fatalf("after the other has ended: %v", err)
	}
	lab.Must(t, again.Release())
	if left, err := os.ReadDir(where.bpfRoot); err != nil || len(left) > 0 {
		t.Errorf("the lock has left %v, %v", left, err)
	}
}
