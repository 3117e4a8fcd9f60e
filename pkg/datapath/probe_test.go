package datapath

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestVerify(t *testing.T) {
	w := newWorld(t)
	w.add(t, service{proto: "tcp", at: []string{ProbeAddr.String()}})

	t.Run("effective when attached", func(t *testing.T) {
		if err := Verify(t.Context(), w.cfg.CgroupRoot); err != nil {
			t.Error(err)
		}
		w.mustCountNothing(t)
	})
	t.Run("too slow when it does not end in time", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := Verify(ctx, w.cfg.CgroupRoot); !errors.Is(err, ErrSlow) || !errors.Is(err, ErrNotProbed) {
			t.Errorf("got %v, want %v", err, ErrSlow)
		}
	})
	t.Run("not effective in another cgroup", func(t *testing.T) {
		err := Verify(t.Context(), lab.MustCgroup(t, "elsewhere").Path())
		if !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	t.Run("not effective without the reserved frontend", func(t *testing.T) {
		lab.Must(t, w.Maps().FrontendIDs.Delete((&service{proto: "tcp"}).key(ProbeAddr.String())))
		if err := Verify(t.Context(), w.cfg.CgroupRoot); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	w.add(t, service{proto: "tcp", at: []string{ProbeAddr.String()}})
	t.Run("not effective when detached", func(t *testing.T) {
		lab.Must(t, Remove(w.cfg.BPFRoot))
		if err := Verify(t.Context(), w.cfg.CgroupRoot); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
	})
	t.Run("not effective, at once, where the kernel routes loopback addresses", func(t *testing.T) {
		lab.Must(t, w.node.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
		begin := time.Now()
		if err := Verify(t.Context(), w.cfg.CgroupRoot); !errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v, want %v", err, ErrNotEffective)
		}
		if took := time.Since(begin); took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
	t.Run("an error without the cgroup", func(t *testing.T) {
		if err := Verify(t.Context(), "/sys/fs/cgroup/none"); err == nil || errors.Is(err, ErrNotEffective) {
			t.Errorf("got %v", err)
		}
	})
}

// Verify works with programs for old kernels, which refuse a connect in another way.
func TestVerifyOldKernels(t *testing.T) {
	w := newOldWorld(t)
	w.add(t, service{proto: "tcp", at: []string{ProbeAddr.String()}})
	if err := Verify(t.Context(), w.cfg.CgroupRoot); err != nil {
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
