package agent

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/test/lab"
)

// retire programs a Service and takes it out of the maps again.
func (p *loopScene) retire(t *testing.T, n int) {
	t.Helper()
	svc := *web()
	svc.Name.Name = fmt.Sprintf("web-%d", n)
	sinkOf(p.agent).SetService(svc, nil)
	p.mustFinish(t)
	sinkOf(p.agent).DeleteService(svc.Name)
	p.mustFinish(t)
}

// mustFinish waits until the loop has applied all changes.
func (p *loopScene) mustFinish(t testing.TB) {
	t.Helper()
	if _, err := queue.Ask(t.Context(), p.queue, func() struct{} { return struct{}{} }); err != nil {
		t.Fatal(err)
	}
}

func (p *loopScene) inGrace(t *testing.T) bool {
	t.Helper()
	running, err := queue.Ask(t.Context(), p.queue, p.writer.InGrace)
	lab.Must(t, err)

	return running
}

// mustRetireAll waits until nothing waits for a grace period, and none runs.
func (a *agent) mustRetireAll(t *testing.T) {
	t.Helper()
	lab.Eventually(t, "nothing waits for a grace period", func() bool {
		waiting, err := queue.Ask(t.Context(), a.queue, func() bool { return a.writer.InGrace() || a.writer.Retired() })

		return err == nil && !waiting
	})
}

// A grace period lasts until all programs have ended, and nothing else waits for it.
func TestGracePeriod(t *testing.T) {
	p := mustRunLoop(t)
	release := make(chan struct{})
	wait := func() error { <-release; return nil }
	p.wait.Store(&wait)
	p.retire(t, 1)
	lab.Eventually(t, "in a grace period", func() bool { return p.inGrace(t) })

	sinkOf(p.agent).SetService(*web(), nil)
	lab.Eventually(t, "programmed meanwhile", func() bool {
		programmed, err := queue.Ask(t.Context(), p.queue, func() bool {
			status, ok := p.writer.Status(lb.ServiceName{Namespace: "ns", Name: "web"})

			return ok && status.Programmed
		})

		return err == nil && programmed
	})
	if !p.inGrace(t) {
		t.Error("the grace period is over, and programs still run")
	}
	close(release)
	lab.Eventually(t, "out of the grace period", func() bool { return !p.inGrace(t) })
}

// If it cannot be known whether programs have ended, they have not.
func TestGracePeriodIsTriedAgain(t *testing.T) {
	p := mustRunLoop(t)
	var waits atomic.Int32
	wait := func() error {
		if waits.Add(1) < 3 {
			return errors.New("no memory")
		}

		return nil
	}
	p.wait.Store(&wait)
	p.retire(t, 1)
	lab.Eventually(t, "waited for three times", func() bool { return waits.Load() >= 3 })
	p.mustRetireAll(t)
}

// What is retired piece by piece goes together.
func TestGracePeriodsAreRare(t *testing.T) {
	p := mustRunLoop(t)
	var waits atomic.Int32
	wait := func() error { waits.Add(1); return nil }
	p.wait.Store(&wait)
	begin := time.Now()
	for n := range 50 {
		p.retire(t, n)
		time.Sleep(10 * time.Millisecond)
	}
	most := int32(time.Since(begin)/graceInterval) + 1
	if n := waits.Load(); n < 1 || n > most {
		t.Errorf("%d grace periods in %v, want 1 to %d", n, time.Since(begin), most)
	}
	p.mustRetireAll(t)
}
