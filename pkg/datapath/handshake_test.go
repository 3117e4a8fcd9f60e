package datapath

import (
	"errors"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

func (w *world) needsTracing(t testing.TB) {
	t.Helper()
	if !w.features.Tracing {
		t.Skip("this kernel has no storage of sockets at tracepoints (Linux 5.11)")
	}
}

// answered returns how many handshakes of a service port were answered. It fails the test if there
// was one, and it is not in the bucket of its duration.
func (l *loaded) answered(t testing.TB, of string) uint64 {
	t.Helper()
	stats, sum, bucket := l.stats(t, l.at[of].id), uint64(0), 0
	for what, n := range stats {
		if what >= maps.StatHandshake {
			sum, bucket = sum+n, int(what-maps.StatHandshake)
		}
	}
	from, to := 0.0, math.Exp2(float64(maps.HistogramLeast))
	if bucket > 0 {
		from, to = to*math.Exp2(float64(bucket-1)/4), to*math.Exp2(float64(bucket)/4)
	}
	took := float64(stats[maps.StatHandshakeTime]) / 1e9
	if sum == 1 && (took <= from || took > to) {
		t.Errorf("%s: a handshake of %g s is in the bucket (%g, %g]", of, took, from, to)
	}

	return sum
}

// The handshakes of a service port are counted by their outcome and duration, and SYNs that are
// sent again as soon as they are.
func TestHandshakes(t *testing.T) {
	l := newLoaded(t)
	l.needsTracing(t)
	programs, err := l.programs()
	lab.Must(t, err)
	for _, hook := range programs.Trace[:1] { // as while one agent replaces another
		twice, err := link.AttachTracing(link.TracingOptions{Program: hook.Program, AttachType: hook.Attach})
		lab.Must(t, err)
		defer twice.Close()
	}
	for how, network := range map[string]string{"answers": "tcp4", "other": "tcp4", "v6": "tcp6"} {
		s := mustSocket(t, l.client, network)
		lab.Must(t, s.Connect(behaviours[how]), s.Close())
		if n := l.answered(t, "tcp "+how); n != 1 {
			t.Errorf("%s: %d handshakes were answered, want 1", how, n)
		}
	}
	refused, silent := mustSocket(t, l.client, "tcp4"), mustSocket(t, l.client, "tcp4")
	if err := refused.Connect(behaviours["refuses"]); err == nil {
		t.Error("not refused")
	}
	lab.Must(t, silent.SetTimeout(1500*time.Millisecond))
	if err := silent.Connect(behaviours["is silent"]); err == nil {
		t.Error("there is an answer")
	}
	if have := l.stats(t, l.at["tcp is silent"].id); have[maps.StatSYNRetransmits] == 0 || have[maps.StatUnanswered] != 0 {
		t.Errorf("while it waits: %v is counted", have)
	}
	lab.Must(t, silent.Close())
	if have := l.stats(t, l.at["tcp is silent"].id); have[maps.StatSYNs] != 1 {
		t.Errorf("after one SYN was sent again: %v is counted", have)
	}
	for _, how := range []string{"refuses", "is silent"} {
		have := l.stats(t, l.at["tcp "+how].id)
		if have[maps.StatUnanswered] != 1 || have[maps.StatRetransmits] != 0 || l.answered(t, "tcp "+how) != 0 {
			t.Errorf("%s: %v is counted", how, have)
		}
	}
	if have := l.stats(t, l.at["udp answers"].id); len(have) != 0 {
		t.Errorf("UDP: %v is counted", have)
	}
}

// The handshakes of each backend are counted on request, and a new backend does not have those of
// its predecessor.
func TestBackendHandshakes(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.BackendHandshakes = true })
	w.needsTracing(t)
	refusing := strings.Replace(w.v4(0), ":8080", ":1", 1)
	s := w.add(t, service{proto: "tcp", at: []string{webVIP}, to: []string{w.v4(0)}})
	dead := w.add(t, service{proto: "tcp", at: []string{"10.96.0.2:80"}, to: []string{refusing}})
	client := w.pod(t)
	for _, at := range []string{webVIP, webVIP, "10.96.0.2:80"} {
		socket := mustSocket(t, client, "tcp4")
		if err := socket.Connect(at); (err == nil) != (at == webVIP) {
			t.Errorf("%s: %v", at, err)
		}
		lab.Must(t, socket.Close())
	}
	loads := w.Maps().Loads
	if h := loads.Handshakes(s.backends[0]); h.Answered != 2 || h.Time == 0 || h.Failed != 0 {
		t.Errorf("%+v is counted, want two that were answered", h)
	}
	if h := loads.Handshakes(dead.backends[0]); h.Answered != 0 || h.Failed != 1 {
		t.Errorf("%+v is counted, want one that was not", h)
	}
	lab.Must(t, loads.Begin(maps.Index(s.backends[0])))
	if h := loads.Handshakes(s.backends[0]); h != (maps.BackendHandshakes{}) {
		t.Errorf("a new backend has %+v", h)
	}
}

// An agent replaces the program of another one at a tracepoint: each handshake is counted once,
// and a program that stays the same keeps its link.
func TestTracepointsReplaced(t *testing.T) {
	l := newLoaded(t)
	l.needsTracing(t)
	first := mustLinkID(t, l.world, "trace/inet_sock_set_state")
	connect := func() {
		t.Helper()
		s := mustSocket(t, l.client, "tcp4")
		lab.Must(t, s.Connect(behaviours["answers"]), s.Close())
	}
	connect()
	same := l.mustOpen(t, l.cfg)
	lab.Must(t, same.Attach())
	if now := mustLinkID(t, l.world, "trace/inet_sock_set_state"); now != first {
		t.Errorf("link %d, want %d: the program is the same", now, first)
	}
	connect()
	cfg := l.cfg
	cfg.PodOptOut = true
	other := l.mustOpen(t, cfg)
	lab.Must(t, other.Attach(), same.Close(), l.world.Close())
	if now := mustLinkID(t, l.world, "trace/inet_sock_set_state"); now == first {
		t.Error("the link still runs the old program")
	}
	connect()
	l.Datapath = other
	if n := l.answered(t, "tcp answers"); n != 3 {
		t.Errorf("%d handshakes are counted, want 3", n)
	}

	cfg.Handshakes = false
	off := l.mustOpen(t, cfg)
	lab.Must(t, off.Attach(), other.Close())
	l.Datapath = off
	if _, err := link.LoadPinnedLink(filepath.Join(traceDir(cfg.BPFRoot), "inet_sock_set_state"), nil); err == nil {
		t.Error("switched off, there is still a link")
	}
	connect()
	if n := l.answered(t, "tcp answers"); n != 3 {
		t.Errorf("switched off, %d handshakes are counted, want 3", n)
	}
}

// A tracepoint to which nothing can be attached does not keep Services from working, and is
// reported until it can.
func TestNotTraced(t *testing.T) {
	l := newLoaded(t)
	l.needsTracing(t)
	programs, err := l.programs()
	lab.Must(t, err)
	hook := programs.Trace[0]
	pin := filepath.Join(traceDir(l.cfg.BPFRoot), hook.Name)
	broken := hook
	broken.Program = nil
	l.links.trace(pin, broken, errors.New("no such tracepoint"))
	states, err := l.Hooks()
	lab.Must(t, err)
	if last := states[len(states)-2]; last.Name != hook.Name || last.Problem != "no such tracepoint" {
		t.Errorf("%+v is reported", last)
	}
	lab.Must(t, l.Attach())
	states, err = l.Hooks()
	lab.Must(t, err)
	for _, state := range states {
		if state.Problem != "" {
			t.Errorf("%s: %s", state.Name, state.Problem)
		}
	}
}
