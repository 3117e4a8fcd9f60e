package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/decision"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// loopScene is an agent on fake maps whose loop runs, and a clock that a test turns.
type loopScene struct {
	*agent
	fakes  *maps.Fakes
	passed atomic.Int64 // time.Duration
	broken atomic.Bool  // every write fails
	// wait is what waiting for programs does; nil: nothing.
	wait atomic.Pointer[func() error]
}

func mustRunLoop(t *testing.T) *loopScene {
	t.Helper()

	return mustRunLoopOn(t, maps.NewFakes(100), 0, nil)
}

// mustRunLoopOn returns one on these maps, with this [reconcile.Config.Slice], after prepare.
func mustRunLoopOn(t testing.TB, fakes *maps.Fakes, slice int, prepare func(*agent)) *loopScene {
	t.Helper()
	p := &loopScene{fakes: fakes}
	p.fakes.Observe(func(string, string) error {
		if p.broken.Load() {
			return errors.New("broken")
		}

		return nil
	}, nil)
	begin := time.Now()
	now := func() time.Time { return begin.Add(time.Duration(p.passed.Load())) }
	writer, err := reconcile.New(reconcile.Config{Tables: p.fakes.Tables, Slice: slice})
	lab.Must(t, err)
	cfg := Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}
	proxy := health.NewProxy(health.ProxyConfig{Families: []lb.Family{lb.IPv4}, Now: now})
	p.agent = newAgent(cfg, parts{
		queue: queue.New[*model](proxy.Queued), metrics: metrics.NewSync(time.Now), source: idleSource{}, writer: writer,
		tables: p.fakes.Tables, proxy: proxy, checks: health.NewServices(health.ServicesConfig{Healthy: proxy.Healthy}),
		waitForPrograms: func() error {
			if wait := p.wait.Load(); wait != nil {
				return (*wait)()
			}

			return nil
		},
	})
	p.synced, p.complete, p.heavy = true, true, &decision.Heavy{}
	p.probe = status.ProbeFrontends(80)
	p.writer.Set(status.ProbeService, time.Time{}, lb.Resolution{Frontends: p.probe})
	p.apply()
	if prepare != nil {
		prepare(p.agent)
	}
	lab.MustRun(t, p.loop)
	p.mustPass(t, true)

	return p
}

// mustPass waits until the loop has applied all changes, and for it to be healthy or not
// once two minutes have passed.
func (p *loopScene) mustPass(t testing.TB, healthy bool) {
	t.Helper()
	if _, err := queue.Ask(t.Context(), p.queue, func() struct{} { return struct{}{} }); err != nil {
		t.Fatal(err)
	}
	p.passed.Add(int64(2 * time.Minute))
	lab.Eventually(t, fmt.Sprintf("healthy is %t", healthy), func() bool { return p.proxy.Healthy() == healthy })
}

// A Service that cannot be programmed is no reason to take the node out of
// service: others work.
func TestOneFailingServiceIsHealthy(t *testing.T) {
	p := mustRunLoop(t)
	mustChange(t, p, func(*model) { p.fakes.FrontendIDs.Size = len(p.fakes.FrontendIDs.Entries) + 2 })
	sinkOf(p.agent).SetService(*web(), nil)
	p.mustPass(t, true)
	model, err := p.services(t.Context())
	if err != nil || len(model.Errors) == 0 {
		t.Fatalf("no Service fails: %v", err)
	}
	p.mustPass(t, true)
}

// If nothing can be written, the node is unhealthy after a while, also when
// nothing changes any more, and well again when writes succeed.
func TestNothingCanBeProgrammed(t *testing.T) {
	p := mustRunLoop(t)
	p.broken.Store(true)
	sinkOf(p.agent).SetService(*web(), nil)
	p.mustPass(t, false)
	p.mustPass(t, false)
	mustChange(t, p, func(*model) {}) // nothing that is written
	p.mustPass(t, false)
	if code := p.livez(); code != http.StatusOK {
		t.Errorf("/livez is %d: the kubelet restarts the agent, which does not mend a map", code)
	}
	p.broken.Store(false)
	sinkOf(p.agent).DeleteService(web().Name)
	p.mustPass(t, true)
}

// The same, but for the retries alone.
func TestProgrammedByARetry(t *testing.T) {
	p := mustRunLoop(t)
	p.broken.Store(true)
	sinkOf(p.agent).SetService(*web(), nil)
	p.mustPass(t, false)
	p.broken.Store(false)
	lab.Eventually(t, "healthy", p.proxy.Healthy)
}

func mustChange(t *testing.T, p *loopScene, change func(*model)) {
	t.Helper()
	if _, err := queue.Ask(t.Context(), p.queue, func() struct{} { change(p.model); return struct{}{} }); err != nil {
		t.Fatal(err)
	}
}

// A loop that hangs is found out by those who ask, who do not hang.
func TestHangingLoop(t *testing.T) {
	p := mustRunLoop(t)
	hung, release := make(chan struct{}), make(chan struct{})
	p.queue.Enqueue(func(*model) { close(hung); <-release })
	<-hung
	if !p.proxy.Healthy() {
		t.Error("unhealthy at once")
	}
	p.passed.Add(int64(2 * time.Minute))
	if code := p.livez(); code != http.StatusServiceUnavailable {
		t.Errorf("/livez is %d", code)
	}
	close(release)
	p.mustPass(t, true)
}

// livez returns the code of an answer at /livez.
func (p *loopScene) livez() int {
	w := httptest.NewRecorder()
	health.Handler(health.Config{Proxy: p.proxy, Eligible: p.model.eligible.Load, Ready: func() []string { return nil }}).
		ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/livez", nil))

	return w.Code
}

// Hooks without effect make the node unhealthy, once they have been for long. A restart would not help.
func TestHooksWithoutEffect(t *testing.T) {
	p := mustRunLoop(t)
	p.proxy.Effective(false)
	p.mustPass(t, false)
	if code := p.livez(); code != http.StatusOK {
		t.Errorf("/livez is %d", code)
	}
	p.proxy.Effective(true)
	p.mustPass(t, true)
}

// Load balancers find this node while its Node exists and is to stay.
func TestEligible(t *testing.T) {
	m := newModel(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, parts{})
	for _, step := range []struct {
		name string
		node kube.Node
		want bool
	}{
		{"a Node", nodeWith(primary), true},
		{"one that is leaving", kube.Node{Node: lb.Node{Name: "node-1"}, Exists: true, Leaving: true}, false},
		{"one that stays after all", nodeWith(primary), true},
		{"none", kube.Node{Node: lb.Node{Name: "node-1"}}, false},
		{"one that is back", nodeWith(), true},
	} {
		m.setNode(step.node)
		if got := m.eligible.Load(); got != step.want {
			t.Errorf("with %s: %t, want %t", step.name, got, step.want)
		}
	}
	if newModel(Config{Log: slog.New(slog.DiscardHandler)}, parts{}).eligible.Load() {
		t.Error("eligible without any Node")
	}
}

// The other verbs are answered from the model as it is now, by the loop.
func TestSocketAnswersFromTheLoop(t *testing.T) {
	p := mustRunLoopOn(t, maps.NewFakes(100), 0, func(a *agent) { a.cfg.Socket = filepath.Join(t.TempDir(), "agent.sock") })
	lab.MustRun(t, p.newStatusServer(nil, monitors{flows: new(flow.Monitor)}, time.Time{}).Run)
	client := status.NewClient(p.cfg.Socket)
	lab.Eventually(t, "answered", func() bool { _, err := client.Services(t.Context()); return err == nil })
	sinkOf(p.agent).SetService(*web(), []lb.Problem{{Object: "Service ns/web", Field: "f", Message: "m"}})
	services, err := client.Services(t.Context())
	if err != nil || len(services) != 1 || services[0].Name != "ns/web" || len(services[0].Problems) == 0 || services[0].Problems[0].Field != "f" {
		t.Fatalf("services are %+v, %v, want ns/web with its problem", services, err)
	}
	// Two ports, three kinds of addresses, the catch-alls, and the agent's own.
	if desired, err := client.Desired(t.Context()); err != nil || len(desired) < 11 {
		t.Errorf("%d frontends are desired, %v, want at least 11", len(desired), err)
	}
	sinkOf(p.agent).DeleteService(web().Name)
	if services, err = client.Services(t.Context()); err != nil || len(services) != 0 {
		t.Errorf("services are %+v, %v, want none", services, err)
	}

	// What the loop owns is read by the loop alone: an answer waits for it.
	working, release := make(chan struct{}), make(chan struct{})
	p.queue.Enqueue(func(*model) { close(working); <-release })
	<-working
	soon, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := client.Services(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while the loop is busy: %v, want %v", err, context.DeadlineExceeded)
	}
	close(release)
}
