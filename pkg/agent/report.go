package agent

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	stdmaps "maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// impairedInterval is the time between reports of Services that cannot be programmed. Many
// of them are programmed at the second try, and need no report.
const impairedInterval = 5 * time.Second

// reportImpaired records Events for Services that have become impaired, or are for another
// reason. The caller has the turn, and does not wait: there may be 100,000 Services.
func (a *agent) reportImpaired(ctx context.Context) {
	// Endpoints come and go all the time, and there may be thousands of Services.
	if a.reporting || !a.synced || !a.newlyFailed && !a.model.claimsChanged && len(a.impaired.Failed) == 0 {
		return
	}
	a.newlyFailed, a.model.claimsChanged, a.reporting = false, false, true
	before := a.impaired
	go func() {
		statuses, err := a.statuses(ctx)
		if err != nil {
			return // the agent ends
		}
		now := status.ImpairedOf(slices.Values(statuses))
		a.events.Impaired(now, before)
		a.queue.Enqueue(func(*model) { a.impaired, a.reporting = now, false })
	}()
}

// reportServer returns what reports whether the server at an address listens. Field is the one of the address.
func (a *agent) reportServer(field string, address netip.AddrPort) func(error) {
	return func(err error) {
		var problems []lb.Problem
		if errors.Is(err, unix.EADDRINUSE) && a.cfg.KubeProxyListens != nil && a.cfg.KubeProxyListens(address) {
			err = nil // until it is stopped
		}
		if err != nil {
			p := lb.Problem{
				Object: lb.Configuration, Field: field, Value: address.String(), Message: fmt.Sprintf("nothing answers there: %v", err),
				Remedy: "Set an address and a port on which the agent may listen", Effect: lb.Degraded,
			}
			switch {
			case errors.Is(err, unix.EADDRINUSE):
				p.Remedy = fmt.Sprintf("Another program listens there, which ss -ltnp 'sport = :%d' shows: end it, or set another port", address.Port())
			case errors.Is(err, unix.EADDRNOTAVAIL):
				p.Remedy = "No device of this node has the address: set one of this node, or 0.0.0.0"
			}
			problems = []lb.Problem{p}
		}
		a.queue.Enqueue(func(m *model) { m.report(field, problems) })
	}
}

// status returns the fields of a [status.Status] that the model and the writer have. Any goroutine but that which has the
// turn may call it. What takes long is collected in many short turns.
func (a *agent) status(ctx context.Context) (status.Status, error) {
	s, err := queue.Ask(ctx, a.queue, a.state)
	if err != nil {
		return s, err
	}
	statuses, problems, err := a.collect(ctx)
	if err != nil {
		return s, err
	}

	return statusOf(s, slices.Values(statuses), problems), nil
}

// statusOf adds what is not as it should be to the other fields.
func statusOf(s status.Status, statuses iter.Seq[reconcile.Status], problems map[string][]lb.Problem) status.Status {
	s.Errors, s.Problems = status.ErrorsOf(statuses), []lb.Problem{}
	for _, source := range slices.Sorted(stdmaps.Keys(problems)) {
		s.Problems = append(s.Problems, problems[source]...)
	}

	return s
}

// state returns the fields of a [status.Status] that take no time. The caller has the turn.
func (a *agent) state() status.Status {
	s := status.Status{
		Version:      a.cfg.Version,
		Node:         a.cfg.NodeName,
		Source:       a.cfg.APIServer,
		Ignored:      a.cfg.Ignored,
		Synced:       a.synced,
		CgroupRoot:   a.cfg.Datapath.CgroupRoot,
		BPFRoot:      a.cfg.Datapath.BPFRoot,
		ThroughStack: "the devices are not known yet",
		Services:     a.model.state.Len(),
		Writes:       make(map[string]uint64),
	}
	s.Limits = a.model.limits()
	for _, pod := range a.model.optOuts.List() {
		s.OptedOut = append(s.OptedOut, status.OptedOutPod{Pod: pod.Namespace + "/" + pod.Name, UID: pod.UID})
	}
	if a.stackReason != nil {
		s.ThroughStack = *a.stackReason
	}
	if a.cfg.Manifests != "" {
		s.Source = "manifests in " + a.cfg.Manifests
	}
	for name, w := range a.writer.Counters().Writes {
		s.Writes[name] = w.Puts + w.Deletes
	}

	return s
}

// unready returns why connections fail on this node, for /readyz: some of the troubles in its status, see TestReadiness. Hooks and
// devices are those of their monitors. Any goroutine may call it: it does not wait for the loop, which may be busy.
func (a *agent) unready(hooks, devices []string) []string {
	var unknown []string
	if !a.known.Load() {
		unknown = []string{"not all Services and endpoints are known and programmed yet"}
	}

	return slices.Concat(unknown, hooks, devices, a.model.unready())
}

// statuses returns the statuses of Services that are not as they should be. It takes many short turns.
func (a *agent) statuses(ctx context.Context) ([]reconcile.Status, error) {
	var statuses []reconcile.Status // a step may add to it after an error
	err := queue.Collect(ctx, a.queue, a.writer.StatusesInSteps(), func(s *reconcile.Status) {
		if s != nil && len(s.Failures)+len(s.Lost)+len(s.Overlaps) > 0 {
			statuses = append(statuses, *s)
		}
	})
	if err != nil {
		return nil, err
	}

	return statuses, nil
}

// collect returns these statuses, and the problems. It takes many short turns.
func (a *agent) collect(ctx context.Context) ([]reconcile.Status, map[string][]lb.Problem, error) {
	statuses, err := a.statuses(ctx)
	if err != nil {
		return nil, nil, err
	}
	problems := make(map[string][]lb.Problem)
	err = queue.Collect(ctx, a.queue, stdmaps.Keys(a.model.problems), func(source string) { problems[source] = a.model.problems[source] })

	return statuses, problems, err
}

// services returns a copy of what is known of Services. Any goroutine but that which has the turn may call it. It takes
// many short turns, so that it is of one moment for each Service, but not for all.
func (a *agent) services(ctx context.Context) (status.Model, error) {
	statuses, problems, err := a.collect(ctx)
	if err != nil {
		return status.Model{}, err
	}
	count, err := queue.Ask(ctx, a.queue, a.model.state.Len)
	if err != nil {
		return status.Model{}, err
	}
	snapshots := make([]lb.Snapshot, 0, count)
	err = queue.Collect(ctx, a.queue, a.model.state.Snapshots(), func(s lb.Snapshot) { snapshots = append(snapshots, s) })
	if err != nil {
		return status.Model{}, err
	}

	return a.modelOf(snapshots, slices.Values(statuses), problems), nil
}

// modelOf returns what is known of Services.
func (a *agent) modelOf(snapshots []lb.Snapshot, statuses iter.Seq[reconcile.Status], problems map[string][]lb.Problem) status.Model {
	m := status.NewModel(statuses)
	m.Resolve, m.Problems, m.Own = a.resolve.Resolve, problems, a.probe
	slices.SortFunc(snapshots, lb.Snapshot.Compare)
	m.Snapshots = snapshots

	return m
}

// modelStats returns the metrics of the model and the writer. The caller has the turn.
func (a *agent) modelStats() metrics.Node {
	counters := a.writer.Counters()
	n := metrics.Node{
		Synced:   a.synced,
		Services: a.model.state.Len(),
		Failed:   len(a.impaired.Failed),
		Taken:    len(a.impaired.Taken),
		Writes:   counters.Writes,
		Fills:    counters.Fill,
	}
	for _, problems := range a.model.problems {
		for _, p := range problems {
			if p.Effect == lb.LeftOut {
				n.Problems++
			} else {
				n.OfNode++
			}
		}
	}
	if a.cfg.LogLost != nil {
		n.LogLost = a.cfg.LogLost()
	}

	return n
}

const (
	sameErrorPause  = time.Minute
	otherErrorPause = 5 * time.Second
)

// repeatedError logs an error that may come back with every turn of the loop: at most each minute the
// same text, and another one, as with other Services, each five seconds. Any goroutine may call it.
type repeatedError struct {
	mu       sync.Mutex
	text     string    // what was logged last
	logged   time.Time // when
	unlogged int       // errors since then
}

func (r *repeatedError) log(log *slog.Logger, level slog.Level, msg string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text, pause := err.Error(), otherErrorPause
	if text == r.text {
		pause = sameErrorPause
	}
	if time.Since(r.logged) < pause {
		r.unlogged++

		return
	}
	log.Log(context.Background(), level, msg, "error", text, "repeats", r.unlogged)
	r.text, r.logged, r.unlogged = text, time.Now(), 0
}
