package load

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// parentVariable makes this executable the parent of one process of each kind.
const parentVariable = "SLUICE_LOAD_TEST_PARENT"

// beParent starts them and waits for its own death.
func beParent() {
	_, serving := Serve(nil, port)
	_, servingBulk := ServeBulk(nil, 5201)
	_, probing := StartProbe(nil, nil)
	if err := errors.Join(serving, servingBulk, probing); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_, err := Run(context.Background(), nil, nil, Work{
		Kind: Exchange, Targets: targets("127.0.0.1"), Clients: 1, Pause: time.Millisecond, Duration: time.Hour,
	})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func TestProcessesDieWithTheirParent(t *testing.T) {
	ns, cgroup := lab.MustNamespace(t, "parent"), lab.MustCgroup(t, "parent")
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentVariable+"=1")
	parent.Stderr = os.Stderr
	lab.Must(t, lab.Start(ns, cgroup, parent))
	t.Cleanup(func() {
		_ = parent.Process.Kill()
		_ = parent.Wait()
	})
	mustHaveProcesses(t, cgroup, 5)
	lab.Must(t, parent.Process.Kill())
	_ = parent.Wait() // it was killed
	mustHaveProcesses(t, cgroup, 0)
}

func TestServeReportsErrors(t *testing.T) {
	p := mustPair(t)
	server := mustServe(t, p.server)
	if second, err := Serve(p.server, port); err == nil {
		t.Error("no error from a port that is taken", second.Close())
	} else {
		t.Log(err)
	}
	lab.Must(t, server.Close())
	lab.Must(t, server.Close())
	mustServe(t, p.server)
}
