package flow

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestEvictions(t *testing.T) {
	quiet := func(put, deleted, ours uint64, present int) tableCounts {
		return tableCounts{putBefore: put, putAfter: put, deletedBefore: deleted, deletedAfter: deleted, ours: ours, present: present}
	}
	for _, test := range []struct {
		name   string
		counts []tableCounts
		fresh  []uint64
	}{
		{"none of new maps", []tableCounts{quiet(0, 0, 0, 0), quiet(100, 0, 0, 100)}, []uint64{0, 0}},
		{"those that are neither there nor deleted", []tableCounts{quiet(0, 0, 0, 0), quiet(100, 20, 30, 45)}, []uint64{0, 5}},
		{"each only once", []tableCounts{quiet(0, 0, 0, 0), quiet(100, 0, 0, 95), quiet(200, 0, 100, 95), quiet(210, 0, 100, 95)}, []uint64{0, 5, 0, 10}},
		{"none that happened before the first look", []tableCounts{quiet(100, 20, 0, 40), quiet(150, 20, 0, 90)}, []uint64{0, 0}},
		{"none, though an earlier agent deleted", []tableCounts{quiet(1000, 0, 0, 100), quiet(1000, 50, 50, 0), quiet(1007, 50, 50, 4)}, []uint64{0, 0, 3}},
		{"none of what was put or deleted meanwhile", []tableCounts{quiet(0, 0, 0, 0), {putBefore: 100, putAfter: 120, deletedBefore: 0, deletedAfter: 10, present: 95}}, []uint64{0, 0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var e evictions
			var total uint64
			for i, c := range test.counts {
				fresh := e.observe(c)
				total += fresh
				if fresh != test.fresh[i] || e.total != total {
					t.Errorf("look %d: %d more, %d in all; want %d and %d", i+1, fresh, e.total, test.fresh[i], total)
				}
			}
		})
	}
}

// Whatever programs do while tables are read, no eviction is counted that did not happen, and all
// are counted once it is quiet.
func TestEvictionsAreTrue(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 0))
		var e evictions
		var put, deleted, ours, evicted uint64
		buckets := make([]int, 8)
		happen := func(times int) {
			for range times {
				b := &buckets[r.IntN(len(buckets))]
				switch {
				case *b == 0 || r.IntN(2) == 0:
					put, *b = put+1, *b+1
				case r.IntN(2) == 0:
					deleted, *b = deleted+1, *b-1
				default:
					evicted, *b = evicted+1, *b-1
				}
			}
		}
		look := func(busy int) uint64 {
			c := tableCounts{putBefore: put, deletedBefore: deleted, ours: ours}
			for i := range buckets {
				happen(r.IntN(busy + 1))
				c.present += buckets[i]
				happen(r.IntN(busy + 1))
			}
			c.putAfter, c.deletedAfter = put, deleted

			return e.observe(c)
		}
		happen(100)
		before := evicted
		look(5 * r.IntN(2))
		for range 20 {
			happen(r.IntN(50))
			if n := r.IntN(len(buckets)); buckets[n] > 0 {
				ours, buckets[n] = ours+1, buckets[n]-1
			}
			was := e.total
			fresh := look(r.IntN(6))
			if e.total-was != fresh || fresh > evicted {
				t.Fatalf("seed %d: %d evictions more, after %d of %d", seed, fresh, was, e.total)
			}
			if e.total > evicted-before {
				t.Fatalf("seed %d: %d evictions, but there were %d", seed, e.total, evicted-before)
			}
		}
		known := evicted
		look(0)
		happen(1000)
		look(0)
		if e.total < evicted-known {
			t.Errorf("seed %d: %d evictions in all, but %d of late alone", seed, e.total, evicted-known)
		}
	}
}

func TestAlarm(t *testing.T) {
	type look struct {
		after   time.Duration
		entries int // of 100
		evicted uint64
		on      bool
	}
	for _, test := range []struct {
		name  string
		looks []look
		times uint64
	}{
		{"off while there is room", []look{{0, 0, 0, false}, {0, 89, 0, false}}, 0},
		{"on from 90 % to below 80 %", []look{{0, 90, 0, true}, {0, 85, 0, true}, {0, 80, 0, true}, {0, 79, 0, false}, {0, 85, 0, false}, {0, 95, 0, true}}, 2},
		{"on for a minute after an eviction", []look{{0, 10, 1, true}, {time.Minute, 10, 0, true}, {1, 10, 0, false}}, 1},
		{"on for a minute after the last eviction", []look{{0, 10, 1, true}, {time.Minute, 10, 9, true}, {time.Minute, 10, 0, true}, {1, 10, 0, false}}, 1},
		{"on as long as the table is full, without evictions", []look{{0, 95, 1, true}, {time.Hour, 95, 0, true}, {0, 10, 0, false}}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			var a alarm
			now := epoch
			for i, l := range test.looks {
				now += uint64(l.after)
				a.observe(l.entries, l.evicted, now)
				if a.on != l.on {
					t.Errorf("look %d: on %v, want %v", i+1, a.on, l.on)
				}
			}
			if a.times != test.times {
				t.Errorf("on %d times, want %d", a.times, test.times)
			}
		})
	}
}

// The kernel evicts entries of a small table, and the Sweeper counts them.
func TestOverfilled(t *testing.T) {
	const capacity, puts = 512, 2000
	for _, halfOpen := range []bool{false, true} {
		t.Run(fmt.Sprintf("half open %v", halfOpen), func(t *testing.T) {
			w := newWorld(t, capacity)
			s := w.sweeper(t)
			if status := w.mustSweep(t, s); status.Emergency+status.Flood != "" {
				t.Errorf("at the start: %+v", status)
			}
			for n := range puts {
				w.put(t, flowOf(tcp, n), note{fromClient, 1, halfOpen, 0})
			}
			index := uint32(flowsPut)
			if halfOpen {
				index = halfOpenPut
			}
			w.setCount(t, index, puts)
			status := w.mustSweep(t, s)
			usage, other, alarm, no, times := status.Flows, status.HalfOpen, status.Emergency, status.Flood, status.Emergencies
			tables := 1
			if halfOpen {
				usage, other, alarm, no, times = status.HalfOpen, status.Flows, status.Flood, status.Emergency, status.Floods
				tables = 2 // that of UDP is another
			}
			if usage.Evicted != puts-uint64(usage.Entries) || usage.Capacity != tables*capacity || usage.Bytes != uint64(tables)*maps.FlowMemory(capacity) || other.Evicted != 0 {
				t.Errorf("%+v, want %d entries or what was evicted; the other table: %+v", usage, puts, other)
			}
			if !strings.Contains(alarm, fmt.Sprint(usage.Evicted)) || no != "" || times != 1 {
				t.Errorf("alarms %q and %q, %d times; want one of %d evictions", alarm, no, times, usage.Evicted)
			}
			s.took = 0 // however busy this machine is
			if soon := s.Next() == emergencyInterval; soon == halfOpen {
				t.Errorf("next sweep after %v", s.Next())
			}

			// What the Sweeper deletes is no eviction.
			w.clock += uint64(25 * time.Hour)
			evicted := usage.Evicted
			status = w.mustSweep(t, s)
			status = w.mustSweep(t, s)
			if status.Flows.Evicted+status.HalfOpen.Evicted != evicted || status.Flows.Entries+status.HalfOpen.Entries != 0 || status.Emergency+status.Flood != "" {
				t.Errorf("after the end of all: %+v, want %d evictions and no alarm", status, evicted)
			}
			next := w.sweeper(t)
			w.mustSweep(t, next)
			if status := w.mustSweep(t, next); status.Flows.Evicted+status.HalfOpen.Evicted != 0 || status.Emergency+status.Flood != "" {
				t.Errorf("to the next agent: %+v, want no evictions", status)
			}
		})
	}
}

// A flow that a program deletes at the same time is not counted as deleted by the Sweeper.
func TestDeletedByBoth(t *testing.T) {
	w := newWorld(t, 1024)
	f := flowOf(udp, 1)
	w.put(t, f, live[:2]...)
	w.setCount(t, flowsPut, 2)
	s := w.sweeper(t)
	w.mustSweep(t, s)
	w.clock += uint64(time.Hour)
	s.hook(false, &hooked{remove: func(k maps.FlowKey) {
		lab.Must(t, w.Flows.Delete(k))
		w.setCount(t, flowsDeleted, 2)
	}})
	w.mustSweep(t, s)
	for n := range 3 {
		w.put(t, flowOf(udp, n+2), live[0])
	}
	w.setCount(t, flowsPut, 8) // and three were evicted
	if status := w.mustSweep(t, s); status.Flows.Evicted != 3 {
		t.Errorf("%d evictions, want 3", status.Flows.Evicted)
	}
}

// In an emergency flows that have ended, or may have, expire sooner; others do not.
func TestEmergencyTimeouts(t *testing.T) {
	w := newWorld(t, 1024)
	kept := []maps.Flow{flowOf(tcp, 1), flowOf(udp, 2)}
	w.put(t, kept[0], note{fromClient, maps.FlowOpen, false, 23 * time.Hour})
	w.put(t, kept[1], note{fromClient, maps.FlowOpen, false, 29 * time.Second})
	hurried := []maps.Flow{flowOf(tcp, 3), flowOf(tcp, 4), flowOf(udp, 5), flowOf(udp, 6)}
	hurried[1].Ending = maps.FlowOver
	w.put(t, hurried[0], note{fromClient, maps.FlowFin, false, 32 * time.Second})
	w.put(t, hurried[1], note{fromClient, maps.FlowReset, false, 3 * time.Second})
	w.put(t, hurried[2], note{fromClient, maps.FlowOpen, false, 32 * time.Second})
	w.put(t, hurried[3], note{fromClient, maps.FlowOpen, true, 12 * time.Second})
	s := w.sweeper(t)
	if status := w.mustSweep(t, s); status.Expired != 0 {
		t.Errorf("%d flows ended without an emergency", status.Expired)
	}
	w.setCount(t, flowsPut, 1)
	w.mustSweep(t, s) // finds out
	w.mustSweep(t, s)
	for i, f := range kept {
		if w.count(t, f) != 1 {
			t.Errorf("flow %d was ended", i)
		}
	}
	for i, f := range hurried {
		if w.count(t, f) != 0 {
			t.Errorf("hurried flow %d was kept", i)
		}
	}
}

func TestReadStatus(t *testing.T) {
	w := newWorld(t, 1024)
	w.put(t, flowOf(tcp, 1), live[0], live[1], note{fromClient, 1, true, time.Hour})
	status, err := ReadStatus(w.Pinned)
	lab.Must(t, err)
	if status.Flows.Entries != 2 || status.HalfOpen.Entries != 1 || status.Flows.Capacity != 1024 {
		t.Errorf("%+v", status)
	}
	if n := w.count(t, flowOf(tcp, 1)); n != 3 {
		t.Errorf("%d entries are left of 3", n)
	}
}
