package agent

import (
	"fmt"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/test/lab"
)

// endpointsOfLight returns the endpoints of the light Service in the maps, and an error if it has no frontend.
func (p *loopScene) endpointsOfLight(t *testing.T) string {
	t.Helper()
	key := maps.FrontendKeyOf(light().ClusterIPs[0], 80, uint8(lb.TCP), uint8(lb.Internal))
	text, err := queue.Ask(t.Context(), p.queue, func() string {
		id, ok := p.fakes.FrontendIDs.Entries[key]
		if !ok {
			return "no frontend"
		}
		pool := p.fakes.Pools.Get(p.fakes.Frontends.Get(id).PoolId)
		text := ""
		for i := range pool.SlotCount {
			b, _ := p.fakes.Tables.BackendOf(p.fakes.Slots.Get(pool.SlotBase + i))
			text += fmt.Sprint(b.AddrPort().Addr())
		}

		return text
	})
	lab.Must(t, err)

	return text
}

// A Service with an object that cannot be read when the agent starts keeps what an earlier agent programmed, until the object
// can be read, or is gone.
func TestUnreadObjectsKeepWhatTheyHad(t *testing.T) {
	const ofService, ofSlice = "Service ns/light", "EndpointSlice ns/light-1"
	name, was, next := light().Name, lightSlice(1), lightSlice(2)
	set := func(s sink, slices ...kube.Slice) {
		s.SetService(light(), nil)
		for _, slice := range slices {
			s.SetSlice(slice, nil)
		}
	}
	old := was.Endpoints[0].Addr.String()
	for _, test := range []struct {
		name  string
		start func(s sink)
		later func(s sink)
		want  string
	}{
		{"of a Service that changes, and is not read again", func(s sink) { s.Unread(ofService, name, nil) }, func(s sink) { s.Unread(ofService, name, nil) }, old},
		{"of a Service that is read later", func(s sink) { s.Unread(ofService, name, nil) }, func(s sink) { s.Report(ofService, nil); set(s, next) }, next.Endpoints[0].Addr.String()},
		{"of a Service that is deleted", func(s sink) { s.Unread(ofService, name, nil) }, func(s sink) { s.Report(ofService, nil) }, "no frontend"},
		{"of a slice that is read later", func(s sink) { set(s); s.Unread(ofSlice, name, nil) }, func(s sink) { s.Report(ofSlice, nil); set(s, next) }, next.Endpoints[0].Addr.String()},
		{"of a slice that is deleted", func(s sink) { set(s); s.Unread(ofSlice, name, nil) }, func(s sink) { s.Report(ofSlice, nil) }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			fakes := maps.NewFakes(1 << 20)
			first := mustRunLoopOn(t, fakes, 0, nil)
			set(sinkOf(first.agent).sink, was)
			sinkOf(first.agent).Enqueue(func(*model) {})
			lab.Eventually(t, "in the maps", func() bool { return first.endpointsOfLight(t) == old })

			second := mustRunLoopOn(t, fakes, 0, func(a *agent) { a.synced, a.complete = false, false })
			s := sink{second.queue, second.agent.metrics}
			test.start(s)
			_, err := queue.Ask(t.Context(), second.queue, func() struct{} { second.takeOver(); return struct{}{} })
			lab.Must(t, err)
			if got := second.endpointsOfLight(t); got != old {
				t.Errorf("after the start it has %q, want %q", got, old)
			}
			test.later(s)
			s.Enqueue(func(*model) {})
			lab.Eventually(t, "it has "+test.want, func() error {
				if got := second.endpointsOfLight(t); got != test.want {
					return fmt.Errorf("it has %q", got)
				}

				return nil
			})
		})
	}
}
