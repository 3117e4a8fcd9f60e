package flows

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// datapathMaps are what the programs of a node have written.
type datapathMaps struct {
	pinned  *maps.Pinned
	budgets *ebpf.Map
}

func mustMaps(t *testing.T, root string) *datapathMaps {
	t.Helper()
	pinned, err := maps.Load(root)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, pinned.Close()) })
	budgets, err := ebpf.LoadPinnedMap(maps.PinOf(root, maps.NameICMPBudgets), nil)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, budgets.Close()) })

	return &datapathMaps{pinned, budgets}
}

// counts are how often each reason was given so far.
func (m *datapathMaps) counts(t *testing.T) map[maps.Reason]uint64 {
	t.Helper()
	counts, err := m.pinned.ReasonCounts()
	lab.Must(t, err)

	return counts
}

// forgetBudgets resets the limits of ICMP errors, so that each client gets one again.
func (m *datapathMaps) forgetBudgets(t *testing.T) {
	t.Helper()
	var client maps.Addr
	for m.budgets.NextKey(nil, &client) == nil {
		lab.Must(t, m.budgets.Delete(&client))
	}
}

// The reasons for which a client is refused, and dropped.
var (
	rejections = []maps.Reason{maps.ReasonRejectNoBackend, maps.ReasonRejectNoPort}
	drops      = []maps.Reason{maps.ReasonDropNoLocalBackend, maps.ReasonDropSourceRange, maps.ReasonDropUnallocated}
)

// checkCounts reports whether each of n attempts was refused, or dropped, for a
// reason that is counted, if that is what was expected.
func (e expected) checkCounts(n int, before, after map[maps.Reason]uint64) string {
	var reasons []maps.Reason
	switch {
	case e.kernels:
		return ""
	case slices.Equal(e.outcomes, []string{reject}):
		reasons = rejections
	case slices.Equal(e.outcomes, []string{drop}):
		reasons = drops
	default:
		return ""
	}
	counted := 0
	for _, reason := range reasons {
		counted += int(after[reason] - before[reason])
	}
	if counted < n {
		return fmt.Sprintf("%s: %d attempts, but Sluice counted %d", e.outcomes[0], n, counted)
	}

	return ""
}
