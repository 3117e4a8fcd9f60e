package metrics

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/protobuf/testing/protocmp"

	abi "github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	noBackend  = uint32(abi.ReasonRejectNoBackend)
	notInRange = uint32(abi.ReasonDropSourceRange)
)

// show returns what a scrape shows of Services, without "sluice_service_" and
// labels' names: "connections_total ns/web".
func show(t testing.TB, s *Services) map[string]float64 {
	t.Helper()
	shown := make(map[string]float64)
	for name, value := range gather(t, s) {
		name = strings.TrimPrefix(name, "sluice_service_")
		name = strings.NewReplacer(" namespace=", " ", " service=", "/", " reason=", " ").Replace(name)
		shown[name] = value
	}

	return shown
}

// only returns what is shown of one thing.
func only(shown map[string]float64, prefix string) map[string]float64 {
	shown = maps.Clone(shown)
	maps.DeleteFunc(shown, func(name string, _ float64) bool { return !strings.HasPrefix(name, prefix+" ") })

	return shown
}

func expect(t *testing.T, when string, got, want map[string]float64) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// All ports and both families of a Service are counted together, and apart from other Services.
func TestServices(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http", 1, 2)
	w.add(2, "ns", "web", "https", 3)
	w.add(3, "ns", "dns", "", 4)
	w.add(4, "sluice.internal", "probe", "")
	s := w.services(t, 10)
	w.count(1, sent, 3)
	w.count(1, uint32(abi.ReasonTranslatedUnremembered), 1)
	w.count(2, sent, 10)
	w.count(2, noBackend, 2)
	w.count(2, notInRange, 1)
	w.count(1, abi.StatBytesSent, 1000)
	w.count(2, abi.StatBytesReceived, 2000)
	w.count(3, abi.StatHiddenRefusals, 6)
	w.count(4, sent, 1)
	w.load(1, abi.BackendLoad{Sockets: 2, Flows: 1})
	w.load(3, abi.BackendLoad{Flows: 4})
	w.load(4, abi.BackendLoad{Flows: -1})
	w.load(9, abi.BackendLoad{Flows: 100})
	w.later()
	expect(t, "a scrape", show(t, s), map[string]float64{
		"connections_total ns/web": 14, "connections_total ns/dns": 0,
		"sent_bytes_total ns/web": 1000, "sent_bytes_total ns/dns": 0,
		"received_bytes_total ns/web": 2000, "received_bytes_total ns/dns": 0,
		"active_connections ns/web": 7, "active_connections ns/dns": 0,
		"failures_total ns reject_no_backend/web": 2, "failures_total ns drop_source_range/web": 1,
		"hidden_refusals_total ns/dns": 6,
		"series":                       2, "series_limit": 10,
	})
}

// Refusals for which a map had no room are among the others, also where each Service has series of its own.
func TestRefusalsWithoutRoom(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	w.count(abi.AllServicePorts, noBackend, 7) // for an earlier agent
	s := w.services(t, 10)
	w.count(abi.AllServicePorts, noBackend, 5)
	w.later()
	expect(t, "a scrape", only(show(t, s), "failures_total"), map[string]float64{"failures_total  reject_no_backend/(others)": 5})
}

// What is known of handshakes is shown of Services that had any, also of ids that are gone.
func TestHandshakes(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	w.add(2, "ns", "web", "https")
	w.add(3, "ns", "dns", "")
	w.count(1, abi.StatHandshake+7, 100) // counted for an earlier agent
	s := w.services(t, 10)
	w.count(1, abi.StatHandshake+7, 2)
	w.count(1, abi.StatHandshakeTime, 100_000)
	w.count(1, abi.StatUnanswered, 1)
	w.count(1, abi.StatSYNs, 1)
	w.count(1, abi.StatSYNRetransmits, 4)
	w.count(2, abi.StatHandshake, 1)
	w.count(2, abi.StatRetransmits, 5)
	w.count(3, sent, 1)
	want := map[string]float64{
		"handshake_seconds ns/web": 3, "handshake_failures_total ns/web": 1,
		"syn_retransmits ns/web": 4, "retransmits_total ns/web": 5,
	}
	for _, when := range []string{"a scrape", "after a port and its id are gone"} {
		w.later()
		shown := show(t, s)
		maps.DeleteFunc(shown, func(name string, _ float64) bool {
			return !strings.Contains(name, "handshake") && !strings.Contains(name, "retransmits")
		})
		expect(t, when, shown, want)
		w.remove(2)
		w.stats.end(2)
	}
}

// Prometheus gets native histograms if it asks for them. Their buckets are those of the programs.
func TestNativeHistograms(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "")
	s := w.services(t, 1)
	w.count(1, abi.StatHandshake, 1)    // up to 2^-16 s
	w.count(1, abi.StatHandshake+1, 2)  // up to 2^-15.75 s
	w.count(1, abi.StatHandshake+92, 3) // up to 2^7 s
	w.count(1, abi.StatHandshakeTime, 3e9)
	w.count(1, abi.StatUnanswered, 2)
	w.count(1, abi.StatSYNs+2, 2) // three or four
	w.count(1, abi.StatSYNRetransmits, 7)
	w.later()
	server := testServer()
	server.Gatherers = Gatherers{s}
	request := httptest.NewRequest("GET", "/metrics", nil)
	request.Header.Set("Accept", string(expfmt.NewFormat(expfmt.TypeProtoDelim)))
	answer := httptest.NewRecorder()
	server.handler().ServeHTTP(answer, request)
	have := make(map[string]*dto.Histogram)
	for decoder := expfmt.NewDecoder(answer.Body, expfmt.NewFormat(expfmt.TypeProtoDelim)); ; {
		var f dto.MetricFamily
		err := decoder.Decode(&f)
		if errors.Is(err, io.EOF) {
			break
		}
		lab.Must(t, err)
		if f.GetType() == dto.MetricType_HISTOGRAM && strings.HasPrefix(f.GetName(), "sluice_") {
			have[f.GetName()] = f.Metric[0].Histogram
		}
	}
	want := map[string]*dto.Histogram{
		"sluice_service_handshake_seconds": {
			SampleCount: new(uint64(6)), SampleSum: new(3.0), Schema: new(int32(2)),
			ZeroThreshold: new(1.0 / 65536), ZeroCount: new(uint64(1)),
			PositiveSpan: []*dto.BucketSpan{
				{Offset: new(int32(-63)), Length: new(uint32(1))}, {Offset: new(int32(28 + 62)), Length: new(uint32(1))},
			},
			PositiveDelta: []int64{2, 1},
		},
		"sluice_service_syn_retransmits": {
			SampleCount: new(uint64(8)), SampleSum: new(7.0), Schema: new(int32(0)),
			ZeroThreshold: new(0.5), ZeroCount: new(uint64(6)),
			PositiveSpan:  []*dto.BucketSpan{{Offset: new(int32(2)), Length: new(uint32(1))}},
			PositiveDelta: []int64{2},
		},
	}
	if diff := cmp.Diff(want, have, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Counters go on when ids come and go: what is counted until an id is given back counts,
// and what is counted for its place afterwards is another's.
func TestIdsComeAndGo(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	w.add(2, "ns", "web", "https")
	s := w.services(t, 10)
	connections := func(when string, want float64) {
		t.Helper()
		w.later()
		expect(t, when, only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": want})
	}
	w.count(1, sent, 5)
	w.count(2, sent, 7)
	connections("at first", 12)

	w.remove(2)
	w.count(2, sent, 1) // by a program that had found it before
	counts := maps.Clone(w.stats.counts)
	maps.DeleteFunc(w.stats.counts, func(key abi.StatKey, _ uint64) bool { return key.ServicePortId == 2 })
	connections("when a port is gone", 12)
	w.stats.counts = counts
	w.stats.end(2)
	connections("when its id is given back", 13)
	connections("later still", 13)
	w.add(3, "ns", "web", "https")
	w.count(3, sent, 4)
	connections("when a port comes", 17)
	w.remove(3)
	w.stats.end(3)
	connections("when it goes at once", 17)

	// An id comes again, after many generations of its place, as that of another Service.
	w.add(2, "ns", "dns", "")
	w.count(2, sent, 100)
	w.later()
	expect(t, "an id that comes again", only(show(t, s), "connections_total"), map[string]float64{
		"connections_total ns/web": 17, "connections_total ns/dns": 100,
	})
}

// What an earlier agent has left is forgotten before ids are given out.
func TestStrayCounts(t *testing.T) {
	w := newWorld()
	w.services(t, 10)
	if w.stats.pruned != 1 {
		t.Errorf("pruned %d times, want once", w.stats.pruned)
	}
}

// What is counted for an id before the maps have its name counts for it afterwards.
func TestEarlyCounts(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	s := w.services(t, 10)
	w.count(8, sent, 1)
	w.later()
	expect(t, "before", only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": 0})
	w.add(8, "ns", "dns", "dns")
	w.later()
	expect(t, "after", only(show(t, s), "connections_total"), map[string]float64{
		"connections_total ns/web": 0, "connections_total ns/dns": 1,
	})
}

// After a restart everything begins at zero, and nothing with a leap.
func TestRestart(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	w.count(1, sent, 100)
	w.count(1, noBackend, 10)
	s := w.services(t, 10)
	expect(t, "right after the start", only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": 0})
	w.later()
	expect(t, "at first", only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": 0})
	w.count(1, sent, 3)
	w.later()
	expect(t, "later", only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": 3})
	expect(t, "later", only(show(t, s), "failures_total"), map[string]float64{"failures_total ns reject_no_backend/web": 0})
}

// A Service without series of its own is among the others as long as it exists,
// and its counts stay there afterwards: counters do not fall.
func TestOthers(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "a", "")
	w.add(2, "ns", "b", "")
	w.add(3, "ns", "c", "", 3)
	w.load(3, abi.BackendLoad{Sockets: 5})
	s := w.services(t, 2)
	connections := func(when string, want map[string]float64) {
		t.Helper()
		w.later()
		got := make(map[string]float64)
		for name, n := range only(show(t, s), "connections_total") {
			got[strings.TrimPrefix(name, "connections_total ")] = n
		}
		expect(t, when, got, want)
	}
	for id := range uint32(3) {
		w.count(id+1, sent, 1)
	}
	connections("the first two", map[string]float64{"ns/a": 1, "ns/b": 1, "/(others)": 1})
	expect(t, "of the others", only(show(t, s), "active_connections"), map[string]float64{
		"active_connections ns/a": 0, "active_connections ns/b": 0, "active_connections /(others)": 5,
	})
	w.remove(1)
	connections("a place is free", map[string]float64{"ns/b": 1, "/(others)": 1})
	w.add(4, "ns", "d", "")
	w.add(5, "ns", "a", "")
	w.count(4, sent, 4)
	w.count(5, sent, 5)
	connections("the next Service has it", map[string]float64{"ns/b": 1, "ns/d": 4, "/(others)": 6})
	w.remove(3)
	w.remove(5)
	connections("the others are gone", map[string]float64{"ns/b": 1, "ns/d": 4, "/(others)": 6})
	w.remove(2)
	w.remove(4)
	connections("all are gone", map[string]float64{"/(others)": 6})
	for id := range uint32(5) {
		w.stats.end(id + 1)
		lab.Must(t, s.Sweep())
	}
	if len(s.counts) != 0 {
		t.Errorf("what was counted for them is kept: %v", s.counts)
	}
}

// However many Services there are, the series are not more.
func TestBoundedCardinality(t *testing.T) {
	w := newWorld()
	for id := range uint32(50_000) {
		w.add(id+1, "ns", fmt.Sprintf("s%d", id), "http")
	}
	s := w.services(t, 500)
	w.later()
	for id := range uint32(50_000) {
		w.count(id+1, sent, 2)
	}
	shown := show(t, s)
	connections := only(shown, "connections_total")
	if len(connections) != 501 || len(shown) != 4*501+2 {
		t.Errorf("%d series of connections, %d in all, want 501 and %d", len(connections), len(shown), 4*501+2)
	}
	if n := connections["connections_total /(others)"]; n != 2*49_500 {
		t.Errorf("the others have %v connections, want %d", n, 2*49_500)
	}
	for i := range 500 { // the lowest ids
		name := fmt.Sprintf("connections_total ns/s%d", i)
		if n, ok := connections[name]; !ok || n != 2 {
			t.Fatalf("%s: %v, %v", name, n, ok)
		}
	}
}

// Bytes of flows that the agent ended are the Service's as well.
func TestEndedFlows(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	ended := map[uint32]flow.Bytes{1: {Sent: 50, Received: 60}, 9: {Sent: 1}}
	s, err := NewServices(ServicesConfig{
		Tables: abi.Tables{ServicePorts: w.ServicePorts, Backends: w.Backends, Loads: w.Loads},
		Stats:  &w.stats, Limit: 1,
		Moved: func() uint64 { return w.moved },
		Ended: func() map[uint32]flow.Bytes { return maps.Clone(ended) },
		Now:   func() time.Time { return w.now },
	})
	lab.Must(t, err)
	bytes := func(when string, sent, received float64) {
		t.Helper()
		w.later()
		shown := show(t, s)
		if shown["sent_bytes_total ns/web"] != sent || shown["received_bytes_total ns/web"] != received {
			t.Errorf("%s: %v sent and %v received, want %v and %v", when,
				shown["sent_bytes_total ns/web"], shown["received_bytes_total ns/web"], sent, received)
		}
	}
	bytes("at first", 0, 0)
	ended[1] = flow.Bytes{Sent: 55, Received: 60}
	w.count(1, abi.StatBytesSent, 1000)
	bytes("one more ended", 1005, 0)
	bytes("nothing happened", 1005, 0)
	ended[1] = flow.Bytes{Sent: 55, Received: 66}
	bytes("another", 1005, 6)
}

// Within a few seconds maps are read once, and ids only if they have changed.
func TestReadsAreRare(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	s := w.services(t, 10)
	for range 10 {
		show(t, s)
	}
	if w.stats.reads != 1 {
		t.Errorf("the counts were read %d times at once", w.stats.reads)
	}
	w.later()
	show(t, s)
	if w.stats.reads != 2 || s.index.builds != 1 {
		t.Errorf("later: counts were read %d times, ids %d times", w.stats.reads, s.index.builds)
	}
	w.add(2, "ns", "dns", "dns")
	w.later()
	show(t, s)
	if s.index.builds != 2 {
		t.Errorf("ids changed, and were read %d times", s.index.builds)
	}
}

// What cannot be read is an error, and neither zero nor less than before.
func TestUnreadable(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http")
	s := w.services(t, 10)
	w.count(1, sent, 5)
	w.later()
	w.stats.fail = errBroken
	for range 2 {
		if families, err := s.Gather(); !errors.Is(err, errBroken) || len(families) != 0 {
			t.Errorf("%d families, %v; want none, and %v", len(families), err, errBroken)
		}
	}
	w.stats.fail = nil
	show(t, s)
	w.stats.fail = errBroken
	if err := s.Sweep(); !errors.Is(err, errBroken) {
		t.Errorf("the sweep: %v", err)
	}
	if families, err := s.Gather(); err == nil {
		t.Errorf("right after it, half of what there is is shown: %d families", len(families))
	}
	w.stats.fail = nil
	expect(t, "once it can", only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": 5})
}

func TestServicesConfig(t *testing.T) {
	w := newWorld()
	whole := ServicesConfig{
		Tables: abi.Tables{ServicePorts: w.ServicePorts, Backends: w.Backends, Loads: w.Loads},
		Stats:  &w.stats, Limit: 1, Moved: func() uint64 { return 0 },
	}
	for field, breakIt := range map[string]func(*ServicesConfig){
		"Tables": func(c *ServicesConfig) { c.Tables.Loads = abi.Loads{} },
		"Stats":  func(c *ServicesConfig) { c.Stats = nil },
		"Moved":  func(c *ServicesConfig) { c.Moved = nil },
		"Limit":  func(c *ServicesConfig) { c.Limit = 0 },
	} {
		cfg := whole
		breakIt(&cfg)
		if _, err := NewServices(cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("without %s: %v", field, err)
		}
	}
	if _, err := NewServices(whole); err != nil {
		t.Error(err)
	}
}
