package flow

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Usage of flows is repaired where it is certainly wrong, and a sweep subtracts what it ends.
func TestUsage(t *testing.T) {
	for _, test := range []struct {
		name   string
		begins int // entries, while the sweep looks
		said   byKind
		want   byKind
	}{
		{"what is right", 0, byKind{6, 2}, byKind{6, 2}},
		{"what an earlier build has not counted", 0, byKind{}, byKind{6, 2}},
		{"what the kernel has evicted", 0, byKind{100, 50}, byKind{6, 2}},
		{"what may be right", 5, byKind{10, 5}, byKind{10, 5}},
		{"what cannot be", 5, byKind{100, 1}, byKind{11, 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1024)
			for n := range 3 {
				w.put(t, flowOf(tcp, n), live[0], live[1])
			}
			w.put(t, flowOf(udp, 3), live[0], live[1])
			w.put(t, flowOf(tcp, 4), note{fromClient, 1, true, 0})
			for kind, n := range test.said {
				w.FlowUsage.Add(uint32(kind), n)
			}
			s := w.sweeper(t)
			s.hook(false, &hooked{read: func() { w.setCount(t, flowsPut, test.begins) }})
			w.mustSweep(t, s)
			if have := s.readUsage(); have != test.want {
				t.Errorf("%v are counted, want %v", have, test.want)
			}
		})
	}
	t.Run("what it ends", func(t *testing.T) {
		w := newWorld(t, 1024)
		w.put(t, flowOf(tcp, 1), live[0], live[1])
		w.put(t, flowOf(udp, 2), live[0], live[1])
		s := w.sweeper(t)
		w.mustSweep(t, s)
		w.clock += uint64(time.Hour)
		w.mustSweep(t, s)
		if have, want := s.readUsage(), (byKind{2, 0}); have != want {
			t.Errorf("%v are counted, want %v", have, want)
		}
	})
}

// percent is that of the kind that has the least room left.
func TestFullness(t *testing.T) {
	for _, test := range []struct {
		connected, udp int64
		want           int
	}{
		{0, 0, 0}, {300, 0, 40}, {750, 0, 100}, {0, 250, 50}, {0, 500, 100}, {500, 500, 100}, {400, 400, 80}, {1000, 0, 133},
	} {
		var found byKind
		found[maps.FlowsConnected], found[maps.FlowsUDP] = test.connected, test.udp
		if have := found.percent(1000); have != test.want {
			t.Errorf("%d and %d of 1000 entries: %d %%, want %d", test.connected, test.udp, have, test.want)
		}
	}
}
