package agent

import (
	"runtime"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// programmed reports whether there are frontends beside that of the probe.
func (p *loopScene) programmed(t *testing.T) bool {
	t.Helper()
	frontends := 0
	lab.Must(t, p.queue.InTurn(func() error {
		for _, err := range p.tables.FrontendIDs.All() {
			lab.Must(t, err)
			frontends++
		}

		return nil
	}))

	return frontends > len(p.probe)
}

// A change is in the maps when the call that flushes it returns, because the goroutine that
// brings it does the work, and not before. The loop may run a round at any moment, when a timer is
// due; then the test tries again.
func TestFlushWorks(t *testing.T) {
	p := mustRunLoop(t)
	p.mustFinish(t) // the loop has begun
	to, caller := sink{p.queue, p.metrics}, goroutine()
	for range 100 {
		worker := make(chan string, 1)
		to.SetService(*web(), nil)
		early := p.programmed(t)
		p.queue.Batch(func(*model) { worker <- goroutine() })
		to.Flush()
		after := p.programmed(t)
		if <-worker == caller && !early {
			if !after {
				t.Error("it is not programmed after the flush")
			}

			return
		}
		to.DeleteService(web().Name)
		to.Flush()
		p.mustFinish(t)
	}
	t.Error("in none of 100 tries the flush did the work")
}

// goroutine names the goroutine that calls it.
func goroutine() string {
	buf := make([]byte, 64)
	name, _, _ := strings.Cut(string(buf[:runtime.Stack(buf, false)]), " [")

	return name
}

// A flush does not wait for another goroutine that is at work: the loop comes again.
func TestFlushDoesNotWait(t *testing.T) {
	p := mustRunLoop(t)
	p.mustFinish(t)
	working, release := make(chan struct{}), make(chan struct{})
	p.queue.Enqueue(func(*model) { close(working); <-release })
	<-working
	to := sink{p.queue, p.metrics}
	to.SetService(*web(), nil)
	to.Flush()
	if len(p.queue.Ready()) == 0 {
		t.Error("the loop does not know that there is more to do")
	}
	close(release)
	lab.Eventually(t, "programmed", func() bool { return p.programmed(t) })
}

// What is received before all is known waits for the loop, which programs it with all else.
func TestFlushBeforeAllIsKnown(t *testing.T) {
	p := mustRunLoopOn(t, maps.NewFakes(100), 0, func(a *agent) { a.synced = false })
	to := sink{p.queue, p.metrics}
	to.SetService(*web(), nil)
	to.Flush()
	p.mustFinish(t)
	if p.programmed(t) {
		t.Error("it is programmed")
	}
}
