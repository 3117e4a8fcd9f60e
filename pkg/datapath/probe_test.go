package datapath

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// probeAddr is the reserved frontend of the world's Datapath.
func (w *world) probeAddr(t testing.TB) string {
	t.Helper()
	id, err := w.Maps().ID(maps.NameFrontends)
	lab.Must(t, err)

	return netip.AddrPortFrom(ProbeAddr, ProbePort(id)).String()
}

func (w *world) addProbe(t testing.TB) {
	t.Helper()
	common := netip.AddrPortFrom(ProbeAddr, CommonProbePort).String()
	w.add(t, service{proto: "tcp", at: []string{w.probeAddr(t), common}, to: []string{ProbeBackend.String()}})
	w.add(t, service{at: []string{netip.AddrPortFrom(ProbeAddr, 0).String()}})
}

func TestVerify(t *testing.T) {
	w := newWorld(t)
	w.addProbe(t)

	t.Run("effective when attached", func(t *testing.T) {
		if err := w.Verify(t.Context()); err != nil {
			t.Error(err)
		}
		w.mustCountNothing(t)
	})
	t.Run("too slow when it does not end in time", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := w.Verify(ctx); !errors.Is(err, ErrSlow) || !errors.Is(err, ErrNotProbed) {
			t.Errorf("got %v, want %v", err, ErrSlow)
		}
	})
	t.Run("not effective in another cgroup", func(t *testing.T) {
		err := Verify(t.Context(), w.cfg.BPFRoot, lab.MustCgroup(t, "elsewhere").Path())
		if !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	t.Run("not effective without the reserved frontend", func(t *testing.T) {
		lab.Must(t, w.Maps().FrontendIDs.Delete((&service{proto: "tcp"}).key(w.probeAddr(t))))
		if err := w.Verify(t.Context()); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	w.addProbe(t)
	t.Run("not effective when detached", func(t *testing.T) {
		lab.Must(t, Remove(w.cfg.BPFRoot))
		if err := w.Verify(t.Context()); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	t.Run("not effective, at once, where the kernel routes loopback addresses", func(t *testing.T) {
		lab.Must(t, w.node.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
		begin := time.Now()
		if err := w.Verify(t.Context()); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
		if took := time.Since(begin); took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
	t.Run("an error without the cgroup", func(t *testing.T) {
		if err := Verify(t.Context(), w.cfg.BPFRoot, "/sys/fs/cgroup/none"); err == nil || errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v", err)
		}
	})
}

// Verify works with programs for old kernels, which refuse a connect in another way.
func TestVerifyOldKernels(t *testing.T) {
	w := newOldWorld(t)
	w.addProbe(t)
	if err := w.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	w.mustCountNothing(t)
}

// mustCountNothing fails the test if programs have counted a refusal: there was none but that of the trial.
func (w *world) mustCountNothing(t *testing.T) {
	t.Helper()
	counts, err := w.Maps().ReasonCounts()
	lab.Must(t, err)
	for reason, n := range counts {
		if reason.Refuses() && n > 0 {
			t.Errorf("%d are counted as %q", n, reason)
		}
	}
	for count, err := range w.Maps().Stats.All() {
		lab.Must(t, err)
		t.Errorf("a service port has the count %+v", count)
	}
}
