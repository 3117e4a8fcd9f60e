package top

import (
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-lb/sluice/maps"
)

// sampleOf returns a sample, so many seconds after the first one, of the Services shop/web (ports 1 and 2, a
// backend each) and shop/db (port 3, without backends).
func sampleOf(second int, counts map[maps.StatKey]uint64, sockets map[uint64]connection) *Sample {
	at := func(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

	return &Sample{
		at: time.Date(2026, 11, 23, 1, 0, second, 0, time.UTC),
		ports: map[uint32]maps.ServicePort{
			1: maps.ServicePortOf("shop", "web", "http", 6, 4), 2: maps.ServicePortOf("shop", "web", "https", 6, 4),
			3: maps.ServicePortOf("shop", "db", "", 6, 4),
		},
		counts: counts,
		backends: []backend{
			{maps.BackendOf(11, 1, at("10.244.1.2:8080"), 0), 2},
			{maps.BackendOf(12, 2, at("10.244.1.2:8443"), 0), 0},
			{maps.BackendOf(13, 99, at("10.244.1.9:80"), 0), 7}, // of no Service any more
		},
		sockets: sockets,
	}
}

const (
	translated = uint32(maps.ReasonTranslated)
	noBackend  = uint32(maps.ReasonRejectNoBackend)
	noRange    = uint32(maps.ReasonDropSourceRange)
)

// Rates are by Service, over the time between the samples, and those of an id that is another's by now begin
// anew.
func TestBetween(t *testing.T) {
	before := sampleOf(0, map[maps.StatKey]uint64{{ServicePortId: 1, What: translated}: 100, {ServicePortId: 2, What: translated}: 7}, nil)
	after := sampleOf(2, map[maps.StatKey]uint64{
		{ServicePortId: 1, What: translated}: 110, {ServicePortId: 2, What: translated}: 9,
		{ServicePortId: 3, What: noBackend}: 4, {ServicePortId: 3, What: noRange}: 6,
		{ServicePortId: 77, What: noBackend}:          1000,
		{ServicePortId: 1, What: maps.StatUnanswered}: 5, {ServicePortId: 2, What: maps.StatSYNRetransmits}: 7, {ServicePortId: 2, What: maps.StatRetransmits}: 1,
		// 97 of 1 ms, in the bucket (2^-10, 2^-9.75], and 3 of 1 s, in (2^-0.25, 2^0].
		{ServicePortId: 1, What: maps.StatHandshake + 25}: 90, {ServicePortId: 2, What: maps.StatHandshake + 25}: 7, {ServicePortId: 2, What: maps.StatHandshake + 64}: 3,
	}, nil)
	after.reasons = map[maps.Reason]uint64{maps.ReasonRejectNoBackend: 4, maps.ReasonDropUnallocated: 8, maps.ReasonTranslated: 50}
	table := Between(before, after, false)
	want := []Service{
		{Service: "shop/db", Refused: map[string]float64{"reject_no_backend": 2, "drop_source_range": 3}, Backends: []Backend{}},
		{Service: "shop/web", Live: 2, New: 6, Refused: map[string]float64{}, Unanswered: 2.5, Rates: Rates{Retransmits: 4}, Handshake: table.Services[1].Handshake, Backends: []Backend{
			{Backend: netip.MustParseAddrPort("10.244.1.2:8080"), Port: "shop/web:http", Protocol: "TCP", Live: 2},
			{Backend: netip.MustParseAddrPort("10.244.1.2:8443"), Port: "shop/web:https", Protocol: "TCP"},
		}},
	}
	if diff := cmp.Diff(want, table.Services, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if h := table.Services[1].Handshake; h == nil || h.P50Seconds < 0.00098 || h.P50Seconds > 0.00117 || h.P99Seconds < 0.84 || h.P99Seconds > 1 {
		t.Errorf("handshakes took %+v", h)
	}
	if diff := cmp.Diff(map[string]float64{"reject_no_backend": 2, "drop_unallocated": 4}, table.Refused); diff != "" {
		t.Errorf("of the node (-want +got):\n%s", diff)
	}

	after.ports[3] = maps.ServicePortOf("shop", "cache", "", 6, 4)
	if table = Between(before, after, false); len(table.Services) != 1 || table.Quiet != 1 {
		t.Errorf("with another Service that has the id of db: %+v", table)
	}
	first := Between(nil, before, false)
	var text strings.Builder
	if err := first.Write(&text, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`01:00:00  2 live; quiet Services: 1
SERVICE    LIVE   NEW/S   REFUSED/S   SENT/S   RECEIVED/S   HANDSHAKE P50 P99   UNANSWERED/S   RETRANS/S
shop/web   2      -       -           -        -            -                   -              -
`, text.String()); diff != "" {
		t.Errorf("after one sample (-want +got):\n%s", diff)
	}
}

// A percentile is the geometric mean of the bounds of the bucket in which that share of all handshakes is reached.
func TestPercentiles(t *testing.T) {
	fast, slow := math.Exp2(-9.875), math.Exp2(-0.125) // of the buckets (2^-10, 2^-9.75] and (2^-0.25, 2^0]
	for _, test := range []struct {
		of       histogram
		p50, p99 float64
	}{
		{histogram{25: 0.5}, fast, fast},
		{histogram{25: 99, 64: 1}, fast, fast},
		{histogram{25: 98, 64: 2}, fast, slow},
		{histogram{25: 50, 64: 50}, fast, slow},
		{histogram{25: 49, 64: 51}, slow, slow},
	} {
		if diff := cmp.Diff(&Durations{test.p50, test.p99}, test.of.durations(), cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.of, diff)
		}
	}
}

// Bytes are those of connections that live and of those that have ended, each byte once, whether programs
// count ended ones or not.
func TestBytes(t *testing.T) {
	sent := func(n uint64) map[maps.StatKey]uint64 {
		return map[maps.StatKey]uint64{{ServicePortId: 1, What: maps.StatBytesSent}: n}
	}
	socks := func(bytes ...uint64) map[uint64]connection {
		all := make(map[uint64]connection)
		for i, n := range bytes {
			if n > 0 {
				all[uint64(i)] = connection{servicePortID: 1, backendID: 11, sent: n, retransmits: n / 100, rtt: uint32(100 * (i + 1))}
			}
		}

		return all
	}
	for _, test := range []struct {
		name          string
		before, after *Sample
		sent, backend float64
		retransmits   float64
		rtt           uint32
	}{
		{"of one that goes on", sampleOf(0, sent(0), socks(1000)), sampleOf(2, sent(0), socks(3000)), 1000, 1000, 10, 100},
		{"of a new one", sampleOf(0, sent(0), nil), sampleOf(2, sent(0), socks(0, 500)), 250, 250, 2.5, 200},
		{"of one that has ended and is counted", sampleOf(0, sent(50), socks(1000)), sampleOf(2, sent(50+1600), nil), 300, 0, 0, 0},
		{"of one that has ended and is counted, beside another", sampleOf(0, sent(0), socks(1000, 100)), sampleOf(2, sent(1600), socks(0, 400)), 450, 150, 1.5, 200},
		{"without one that has ended and is not counted", sampleOf(0, sent(0), socks(9000, 100)), sampleOf(2, sent(0), socks(0, 400)), 150, 150, 1.5, 200},
		{"of the mean round-trip time", sampleOf(0, sent(0), socks(100, 100)), sampleOf(2, sent(0), socks(100, 100)), 0, 0, 0, 150},
	} {
		t.Run(test.name, func(t *testing.T) {
			table := Between(test.before, test.after, true)
			web := table.Services[1]
			b := web.Backends[0]
			if web.Sent != test.sent || web.Retransmits != test.retransmits || b.Sent != test.backend || b.RTTMicroseconds != test.rtt {
				t.Errorf("%v sent, %v sent again, backend %v, round trip %d, want %+v", web.Sent, web.Retransmits, b.Sent, b.RTTMicroseconds, test)
			}
		})
	}
	// Bytes of a flow, which programs take out of the flow when they count them.
	flow := func(n uint64) map[maps.FlowKey]connection {
		return map[maps.FlowKey]connection{{}: {servicePortID: 1, backendID: 11, received: n}}
	}
	before, after := sampleOf(0, nil, nil), sampleOf(2, map[maps.StatKey]uint64{{ServicePortId: 1, What: maps.StatBytesReceived}: 700}, nil)
	before.flows, after.flows = flow(500), flow(300)
	if table := Between(before, after, true); table.Services[1].Received != 250 {
		t.Errorf("of a flow: %v received, want 250", table.Services[1].Received)
	}
}

// The bytes of a socket that its process has closed are counted by then; those of the kernel's own never are.
func TestClosedSockets(t *testing.T) {
	var s Sample
	s.sockets = make(map[uint64]connection)
	sock := func(cookie, inode uint64, proto uint8, counted uint32) maps.TranslatedSock {
		return maps.TranslatedSock{Cookie: cookie, Inode: inode, Proto: proto, State: maps.SockState{Counted: counted}}
	}
	s.addSockets([]maps.TranslatedSock{sock(1, 7, 6, 1), sock(2, 0, 6, 1), sock(3, 0, 6, 0), sock(4, 8, 17, 1)})
	if _, one := s.sockets[1]; len(s.sockets) != 2 || !one || s.sockets[3] != (connection{}) {
		t.Errorf("%v, want 1 and 3", s.sockets)
	}
}

// Readings take a tenth of the time at most.
func TestPause(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: time.Second, 50 * time.Millisecond: time.Second, time.Second: 10 * time.Second} {
		if got := (&Sample{took: took}).Pause(time.Second); got != want {
			t.Errorf("after %v: %v, want %v", took, got, want)
		}
	}
}

func TestSort(t *testing.T) {
	table := Table{Services: []Service{
		{Service: "b", Live: 1, New: 5, Handshake: &Durations{P99Seconds: 2}, Rates: Rates{Sent: 1}},
		{Service: "c", Live: 3, New: 5, Unanswered: 1, Handshake: &Durations{P99Seconds: 1}, Refused: map[string]float64{"x": 1}, Rates: Rates{Received: 1}},
		{Service: "a", Live: 2, Refused: map[string]float64{"x": 1, "y": 1}, Rates: Rates{Retransmits: 1}},
	}}
	for order, want := range map[string]string{
		"service": "abc", "live": "cab", "new": "bca", "refused": "acb", "sent": "bac", "received": "cab", "retransmits": "abc",
		"handshake": "bca", "unanswered": "cab",
	} {
		if err := table.Sort(order); err != nil {
			t.Fatal(err)
		}
		got := table.Services[0].Service + table.Services[1].Service + table.Services[2].Service
		if got != want {
			t.Errorf("by %s: %s, want %s", order, got, want)
		}
	}
	if err := table.Sort("size"); err == nil || !strings.Contains(err.Error(), `"size"`) || len(Orders()) != 9 {
		t.Errorf("by size: %v", err)
	}
}

// A reading that fails is shown, and the next one follows; a Service that ends is said to be gone.
func TestScreenErrors(t *testing.T) {
	s := newScreen(nil, sampleOf(0, nil, nil), Config{Interval: time.Second, Order: "service"})
	s.Update(tea.WindowSizeMsg{Width: 80, Height: 8})
	s.Update(tea.KeyPressMsg{Code: tea.KeyEnter})
	screenHas := func(want string) {
		t.Helper()
		if seen := s.View().Content; !strings.Contains(seen, want) {
			t.Errorf("the screen is\n%s\nwant %q", seen, want)
		}
	}
	screenHas("10.244.1.2:8443   shop/web:https")
	if _, next := s.Update(sampled{err: errors.New("map is gone")}); next == nil {
		t.Error("no reading follows an error")
	}
	screenHas("error: map is gone")
	screenHas("10.244.1.2:8443   shop/web:https")
	gone := sampleOf(2, nil, nil)
	delete(gone.ports, 1)
	delete(gone.ports, 2)
	s.Update(sampled{sample: gone})
	screenHas("shop/web is gone")
	s.Update(tea.KeyPressMsg{Code: tea.KeyEscape})
	screenHas("quiet Services: 1")
}

func TestSparkline(t *testing.T) {
	for want, rates := range map[string][]float64{
		"":     nil,
		"▁":    {0},
		"▁▄█▁": {0, 5, 10, 0},
	} {
		if got := strings.TrimLeft(sparkline(rates), " "); got != want || len([]rune(sparkline(rates))) != history {
			t.Errorf("%v: %q, want %q", rates, sparkline(rates), want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for want, got := range map[string]string{
		"0": number(0), "0.3": number(0.25001), "9.9": number(9.94), "12": number(12.4),
		"85µs": duration(0.0000851), "1.2ms": duration(0.00123), "12s": duration(12.3),
		"999 B": size(999), "1.0 KiB": size(1024), "98 KiB": size(100_000), "1.5 GiB": size(3 << 29),
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
