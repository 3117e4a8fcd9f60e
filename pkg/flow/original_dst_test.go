package flow

import (
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// flowTo returns the nth flow, to an address.
func flowTo(proto uint8, n int, vip string) maps.Flow {
	f := masqueraded(flowOf(proto, n))
	f.OriginalDst = addr(vip)

	return f
}

func (d OriginalDsts) String() string {
	addrs := slices.Collect(stdmaps.Keys(d.Addrs))
	slices.SortFunc(addrs, func(a, b maps.Addr) int { return a.IP().Compare(b.IP()) })
	ips := make([]netip.Addr, len(addrs))
	for i, a := range addrs {
		ips[i] = a.IP()
	}

	return fmt.Sprint(ips)
}

// A sweep returns the original destinations of flows, whichever entry is left of them: in either table, of
// any protocol, idle or not. The next sweep no longer returns those of flows that this one ends.
func TestOriginalDsts(t *testing.T) {
	w := newWorld(t, 1024)
	s := w.sweeper(t)
	if d := s.OriginalDsts(); len(d.Addrs) > 0 || !d.Begin.IsZero() {
		t.Errorf("%s before the first sweep, at %v", d, d.Begin)
	}
	w.put(t, flowTo(tcp, 1, "192.0.2.1"), live...)
	w.put(t, flowTo(tcp, 2, "192.0.2.1"), live...)
	w.put(t, flowTo(tcp, 3, "2001:db8::2"), note{fromClient, maps.FlowNew, true, 0})
	w.put(t, flowTo(tcp, 4, "192.0.2.3"), note{toClient, maps.FlowOpen, false, 23 * time.Hour})
	w.put(t, flowTo(sctp, 5, "192.0.2.4"), note{toBackend, maps.FlowOpen, false, 0})
	w.put(t, flowTo(udp, 6, "192.0.2.5"), note{fromBackend, maps.FlowOpen, true, 0})
	w.put(t, flowTo(tcp, 7, "192.0.2.6"), note{fromClient, maps.FlowReset, false, 2 * time.Hour})
	w.mustSweep(t, s)
	first := s.OriginalDsts()
	if got, want := first.String(), "[192.0.2.1 192.0.2.3 192.0.2.4 192.0.2.5 192.0.2.6 2001:db8::2]"; got != want {
		t.Errorf("first %s, want %s", got, want)
	}
	before := first.String()
	w.mustSweep(t, s)
	if got, want := s.OriginalDsts().String(), "[192.0.2.1 192.0.2.3 192.0.2.4 192.0.2.5 2001:db8::2]"; got != want {
		t.Errorf("then %s, want %s", got, want)
	}
	if first.String() != before {
		t.Errorf("the result of the first sweep has become %s", first)
	}
}

// Begin is before the sweep reads anything. A sweep that fails changes neither Begin nor the addresses.
func TestOriginalDstsBegin(t *testing.T) {
	w := newWorld(t, 1024)
	w.put(t, flowTo(tcp, 1, "192.0.2.1"), live...)
	s := w.sweeper(t)
	var read []time.Time
	s.hook(true, &hooked{all: func() { read = append(read, time.Now()) }})
	before := time.Now()
	w.mustSweep(t, s)
	good := s.OriginalDsts()
	if good.Begin.Before(before) || len(read) != 1 || good.Begin.After(read[0]) {
		t.Errorf("it began at %v: called at %v, read at %v", good.Begin, before, read)
	}
	lab.Must(t, w.Replacements()["sl_flows"].Close())
	if _, err := s.Sweep(); err == nil {
		t.Fatal("no error without a table")
	}
	if failed := s.OriginalDsts(); failed.Begin != good.Begin || failed.String() != "[192.0.2.1]" {
		t.Errorf("after a failure %s since %v, want %s since %v", failed, failed.Begin, good, good.Begin)
	}
}
