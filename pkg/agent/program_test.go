package agent

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/decision"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/heavy"
	"github.com/sluice-lb/sluice/test/lab"
)

// A panic about one Service, be it in the loop or beside it, leaves that Service as it was,
// is reported once, and holds up no other.
func TestPanicIsOfOneService(t *testing.T) {
	for _, externalIPs := range []int{0, decision.HeavySize} {
		t.Run(fmt.Sprint(externalIPs, " external IPs"), func(t *testing.T) {
			var log bytes.Buffer
			var events []kube.Event
			p := mustRunLoopOn(t, maps.NewFakes(1<<20), 0, func(a *agent) {
				a.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
				a.model.events = func(e kube.Event) { events = append(events, e) }
				a.resolve = func(s lb.Snapshot, m *lb.Memory) lb.Resolution {
					if s.Service.Affinity == 2*time.Second {
						panic("this cannot be")
					}

					return s.ResolveIn(m)
				}
			})
			h := heavy.New(1, 0, externalIPs, 2)
			h.Affinity = time.Second
			p.set(h)
			lab.Eventually(t, "in the maps", func() bool { return p.inMaps(t, h.Name) })
			h.Affinity = 2 * time.Second
			sinkOf(p.agent).SetService(h.Service, nil)
			isReported := func() bool {
				reported, err := queue.Ask(t.Context(), p.queue, func() bool { return len(p.model.undecided) == 1 })

				return err == nil && reported
			}
			lab.Eventually(t, "reported", isReported)
			for range 3 { // as often as it changes
				h.HealthCheckNodePort++
				sinkOf(p.agent).SetService(h.Service, nil)
				lab.Eventually(t, "decided", func() bool { return p.isDecided(t, h.Name) })
			}
			sinkOf(p.agent).SetService(light(), nil)
			lab.Eventually(t, "another Service in the maps", func() bool { return p.inMaps(t, light().Name) })
			if got := p.affinityOf(t, h.Name); got != 1 {
				t.Errorf("in the maps is a Service of %d seconds, want 1", got)
			}
			if p.inMaps(t, h.Name) {
				t.Error("the Service is said to be in the maps")
			}
			p.mustPass(t, true)
			want := []kube.Event{{
				Service: h.Name, Reason: kube.ReasonIgnored, Action: "Read",
				Note: "internal error, so it stays as it was: panic: this cannot be",
			}}
			if !slices.Equal(events, want) {
				t.Errorf("reported is %+v", events)
			}
			if n := strings.Count(log.String(), "could not be decided"); n != 1 || !strings.Contains(log.String(), "program_test.go") {
				t.Errorf("logged %d times, want once, with the stack:\n%s", n, log.String())
			}

			h.Affinity = 3 * time.Second
			sinkOf(p.agent).SetService(h.Service, nil)
			lab.Eventually(t, "in the maps", func() bool { return p.inMaps(t, h.Name) })
			if got := p.affinityOf(t, h.Name); got != 3 {
				t.Errorf("in the maps is a Service of %d seconds, want 3", got)
			}
			if len(p.model.problems) > 0 {
				t.Errorf("problems are left: %v", p.model.problems)
			}
		})
	}
}

// A Service about which nothing can be decided keeps what an earlier agent gave it.
func TestPanicAtTheStart(t *testing.T) {
	fakes := maps.NewFakes(1000)
	for _, failing := range []bool{false, true} {
		writer, err := reconcile.New(reconcile.Config{Tables: fakes.Tables})
		lab.Must(t, err)
		r := NewOffline(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, writer)
		r.agent.resolve = func(s lb.Snapshot, m *lb.Memory) lb.Resolution {
			if failing {
				panic("this cannot be")
			}

			return s.ResolveIn(m)
		}
		r.Sink().SetService(light(), nil)
		r.Sink().SetSlice(lightSlice(1), nil)
		r.Work()
		if n := len(fakes.FrontendIDs.Entries); n != 4 {
			t.Errorf("with a panic: %t; there are %d frontends, want 4", failing, n)
		}
		r.Sink().DeleteService(light().Name)
		if failing {
			r.Work()
			if n := len(fakes.FrontendIDs.Entries); n != 0 {
				t.Errorf("there are %d frontends of a Service that is gone", n)
			}
		}
	}
}

// However many Services there are, few decisions wait to be written at a time, and all are.
func TestDecisionsAtATime(t *testing.T) {
	const services = 2*decidedAtOnce + 7
	fakes := maps.NewFakes(10 * services)
	writer, err := reconcile.New(reconcile.Config{Tables: fakes.Tables})
	lab.Must(t, err)
	r := NewOffline(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, writer)
	var decided, most atomic.Int64
	r.agent.resolve = func(s lb.Snapshot, m *lb.Memory) lb.Resolution {
		written := int64(len(fakes.FrontendIDs.Entries) / 4)
		if ahead := decided.Add(1) - written; ahead > most.Load() {
			most.Store(ahead)
		}

		return s.ResolveIn(m)
	}
	for i := range services {
		svc := light()
		svc.Name.Name = fmt.Sprint("light-", i)
		svc.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		r.Sink().SetService(svc, nil)
	}
	r.Work()
	if n := len(fakes.FrontendIDs.Entries); n != 4*services {
		t.Errorf("there are %d frontends, want %d", n, 4*services)
	}
	if most.Load() > decidedAtOnce {
		t.Errorf("there were %d decisions at a time, want %d at most", most.Load(), decidedAtOnce)
	}
}
