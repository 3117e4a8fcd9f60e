package load

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// stall is how long the server of a test stands still.
const stall = 300 * time.Millisecond

// runWithStall does work of two seconds while the server stands still once.
func runWithStall(t *testing.T, p pair, server *Server, w Work) Result {
	t.Helper()
	w.Kind, w.Targets, w.Clients, w.Duration = Exchange, targets("10.0.0.2"), 1, 2*time.Second
	cgroup := lab.MustCgroup(t, "stall")
	ended := make(chan Result, 1)
	go func() {
		result, _ := Run(t.Context(), p.client, cgroup, w)
		ended <- result
	}()
	lab.Eventually(t, "there is a connection", func() bool { return mustReadTCP(t, p.client, established) != "" })
	lab.Must(t, server.Pause())
	time.Sleep(stall / 2)
	// A generator that is stopped while it waits, as by Ctrl-Z, goes on waiting.
	pids, err := cgroup.Processes()
	lab.Must(t, err)
	lab.Must(t, unix.Kill(pids[0], unix.SIGSTOP))
	lab.Must(t, unix.Kill(pids[0], unix.SIGCONT))
	time.Sleep(stall / 2)
	lab.Must(t, server.Resume())
	result := <-ended
	if result.Succeeded == 0 || result.Failed != 0 {
		t.Fatalf("%d succeeded, %d failed: %s", result.Succeeded, result.Failed, result.FirstError)
	}

	return result
}

// The server stands still for 300 ms. With a rate, every exchange that was due
// in that time shows the wait. The client of a closed loop sends nothing meanwhile, and
// shows one slow exchange: that is coordinated omission.
func TestStallIsSeenWithRateOnly(t *testing.T) {
	p := mustPair(t)
	server := mustServe(t, p.server)

	due := runWithStall(t, p, server, Work{Rate: 1000})
	closed := runWithStall(t, p, server, Work{Pause: time.Millisecond})

	// Those due in its first two thirds, some 200, waited for more than a third of it.
	if slow := due.Latencies.Over(stall / 3); slow < 100 {
		t.Errorf("with a rate, %d of %d waited for %v, want 100 or more", slow, due.Latencies.Count(), stall/3)
	}
	if late := due.Lateness.Over(stall / 3); late < 99 {
		t.Errorf("with a rate, %d of %d began %v late, want 99 or more", late, due.Lateness.Count(), stall/3)
	}
	if longest := closed.Latencies.Quantile(1); longest < stall/2 {
		t.Errorf("in a closed loop, the slowest took %v, want the stall to be there", longest)
	}
	// There is no telling how slots of 100 ms lie in it, but one is silent from end to end.
	if closed.Silence < slotLength || closed.Silence > 2*stall {
		t.Errorf("in a closed loop, nothing succeeded for %v, want some of the stall's %v", closed.Silence, stall)
	}
	t.Logf("slower than %v: %d of %d with a rate, %d of %d in a closed loop", stall/3,
		due.Latencies.Over(stall/3), due.Latencies.Count(), closed.Latencies.Over(stall/3), closed.Latencies.Count())
	if slow := closed.Latencies.Over(stall / 3); slow > 20 {
		t.Errorf("in a closed loop, %d waited for %v, want hardly more than one", slow, stall/3)
	}
}

// If the server stands still for longer than the window, all exchanges that were due fail
// soon.
func TestWhatNeverBeginsIsCounted(t *testing.T) {
	p := mustPair(t)
	server := mustServe(t, p.server)
	lab.Must(t, server.Pause())
	result := mustRun(t, p.client, Work{
		Kind: Exchange, Targets: targets("10.0.0.2"), Clients: 2, Rate: 1000, Duration: 200 * time.Millisecond,
	})
	if result.Started != 200 || result.Failed != 200 || result.FirstError == "" {
		t.Errorf("%d of %d failed, want 200 of 200 (%q)", result.Failed, result.Started, result.FirstError)
	}
}
