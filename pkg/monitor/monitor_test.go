package monitor

import (
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	tcp = 6
	udp = 17
)

// mustNames returns the names of a Service shop/db, which has a ClusterIP, a node port and a backend,
// and of the pods of it and of its client.
func mustNames(t *testing.T) (of names, port, backend uint32) {
	t.Helper()
	fakes := maps.NewFakes(1024)
	hand := mapstest.New(fakes.Tables)
	port, err := hand.ServicePort()
	lab.Must(t, err)
	all, err := hand.ServicePort()
	lab.Must(t, err)
	lab.Must(t, fakes.ServicePorts.Put(port, maps.ServicePortOf("shop", "db", "main", tcp, 4)))
	lab.Must(t, fakes.ServicePorts.Put(all, maps.ServicePortOf("shop", "db", "", 0, 4)))
	backend, err = hand.Backend(port, netip.MustParseAddrPort("10.244.2.7:5432"), 0)
	lab.Must(t, err)
	catchAll, err := hand.Pool(maps.Pool{ServicePortId: all}, nil, nil)
	lab.Must(t, err)
	lab.Must(t, hand.Frontend(maps.FrontendKeyOf(netip.MustParseAddr("10.96.0.10"), 0, 0, maps.ScopeInternal), maps.KindClusterIP, catchAll))
	known := map[string]pods.Pod{
		"10.244.1.2": {Name: "shop/web-1", UID: "1d1a"}, "10.244.2.7": {Name: "shop/db-0", UID: "2d2b"}, "10.244.1.3": {UID: "3d3c"},
	}

	return names{
		tables: fakes.Tables,
		pod:    func(_ uint64, a netip.Addr) (pods.Pod, error) { return known[a.String()], nil },
		device: func(index uint32) string { return map[uint32]string{2: "eth0"}[index] },
		booted: time.Date(2026, 11, 23, 1, 0, 0, 0, time.UTC),
	}, port, backend
}

// mustEvents returns an event of each kind, as programs report them.
func mustEvents(t *testing.T, port, backend uint32) []maps.MonitorEvent {
	t.Helper()
	at := func(text string) (maps.Addr, uint16) {
		a := netip.MustParseAddrPort(text)

		return maps.AddrOf(a.Addr()), maps.Port(a.Port())
	}
	var all []maps.MonitorEvent
	add := func(kind uint8, reason maps.Reason, proto, place uint8, from, to string, change func(*maps.MonitorEvent)) {
		e := maps.MonitorEvent{Time: uint64(len(all)+1) * uint64(1500*time.Millisecond), Kind: kind, Reason: uint8(reason), Proto: proto, Place: place}
		if from != "" {
			e.Client, e.ClientPort = at(from)
		}
		e.OriginalDst, e.OriginalPort = at(to)
		if place == maps.PlaceSocket {
			e.Pid = 4711
			copy(e.Comm[:], []int8{'c', 'u', 'r', 'l'})
		} else {
			e.Ifindex = 2
		}
		change(&e)
		all = append(all, e)
	}
	ofPort := func(e *maps.MonitorEvent) { e.ServicePortId = port }
	chosen := func(e *maps.MonitorEvent) { e.ServicePortId, e.BackendId = port, backend }
	none := func(*maps.MonitorEvent) {}
	add(maps.MonitorTranslated, maps.ReasonTranslated, tcp, maps.PlaceSocket, "10.244.1.2:0", "10.96.0.10:5432", chosen)
	add(maps.MonitorTranslated, maps.ReasonTranslated, tcp, maps.HookIngress, "192.0.2.9:40000", "192.168.50.1:30432", chosen)
	add(maps.MonitorTranslated, maps.ReasonTranslated, udp, maps.PlaceSocket, "", "10.96.0.10:5432", func(e *maps.MonitorEvent) { e.ServicePortId, e.BackendId = port, 77 })
	add(maps.MonitorRefused, maps.ReasonRejectNoBackend, tcp, maps.PlaceSocket, "10.244.1.2:0", "10.96.0.10:5432", ofPort)
	add(maps.MonitorRefused, maps.ReasonDropSourceRange, tcp, maps.HookIngress, "192.0.2.9:40001", "192.168.50.1:30432", ofPort)
	add(maps.MonitorRefused, maps.ReasonRejectNoPort, tcp, maps.PlaceSocket, "", "10.96.0.10:81", none)
	add(maps.MonitorRefused, maps.ReasonDropUnallocated, udp, maps.PlaceSocket, "[fd00:10:244::2]:0", "[fd00:96::7]:53", none)
	add(maps.MonitorRefused, maps.ReasonRejectNoBackend, tcp, maps.PlaceSocket, "10.244.1.3:0", "10.96.0.11:80", func(e *maps.MonitorEvent) { e.ServicePortId = 99 })

	return all
}

// Each filter selects events, and each format prints them, as testdata has it.
func TestFiltersAndFormats(t *testing.T) {
	names, port, backend := mustNames(t)
	raw := mustEvents(t, port, backend)
	for _, test := range []struct {
		name   string
		filter Filter
	}{
		{"all", Filter{}},
		{"service", Filter{Service: "shop/db"}},
		{"pod", Filter{Pod: "web-1"}},
		{"pod of a backend", Filter{Pod: "shop/db-0"}},
		{"pod by its uid", Filter{Pod: "3d3c"}},
		{"pod of a backend by its uid", Filter{Pod: "2d2b"}},
		{"ip of a client", Filter{IP: netip.MustParseAddr("192.0.2.9")}},
		{"ip of a backend", Filter{IP: netip.MustParseAddr("10.244.2.7")}},
		{"ip of a destination", Filter{IP: netip.MustParseAddr("fd00:96::7")}},
		{"reasons", Filter{Reasons: []string{"reject_no_port", "drop_source_range"}}},
		{"refused", Filter{Refused: true}},
		{"refused of a service and a pod", Filter{Refused: true, Service: "shop/db", Pod: "shop/web-1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			events := []Event{}
			for _, e := range raw {
				event, err := names.event(e)
				lab.Must(t, err)
				if test.filter.selects(event) {
					events = append(events, event)
				}
			}
			if test.name == "all" {
				at := names.booted.Add(time.Minute)
				events = append(events, Event{Time: at, Outcome: Lost, Lost: 12}, Event{Time: at, Outcome: Lost})
			}
			mustPrint(t, strings.ReplaceAll(test.name, " ", "_")+".txt", events)
		})
	}
}

// mustPrint compares how events are printed in each format with a file of testdata.
func mustPrint(t *testing.T, file string, events []Event) {
	t.Helper()
	table, lines := Header()+"\n", ""
	for _, event := range events {
		line, err := json.Marshal(event)
		lab.Must(t, err)
		table += event.String() + "\n"
		lines += string(line) + "\n"
	}
	golden.Match(t, filepath.Join("testdata", file), table+"\n"+lines)
}

// A backend becomes a suspect, gets probes, and answers again, as looks at its health find it. Looks
// find the past of a suspect, and nothing twice.
func TestSuspects(t *testing.T) {
	names, _, backend := mustNames(t)
	ms := func(n uint64) uint64 { return n * uint64(time.Millisecond) }
	h := maps.BackendHealth{Id: backend, Cause: uint8(maps.HealthUnanswered), Clients: 1<<3 | 1<<7 | 1<<15}
	looks := healing{names: names, known: make(map[uint32]maps.BackendHealth)}
	var events []Event
	for _, step := range []struct {
		name                           string
		suspected, until, cleared, now uint64 // in ms
		want                           []Outcome
	}{
		{"it works", 0, 0, 0, 1000, nil},
		{"it becomes a suspect", 20100, 21000, 0, 20200, []Outcome{Suspect}},
		{"the same", 20100, 21000, 0, 20400, nil},
		{"it gets a probe", 20100, 22900, 0, 21200, []Outcome{Probe}},
		{"most are suspects, and none is passed over", 20100, 21300, 0, 21400, nil},
		{"it gets a probe, and answers it", 0, 26000, 22950, 23100, []Outcome{Answers}},
		{"it is a suspect and answers between two looks", 0, 24000, 24100, 24200, []Outcome{Answers}},
		{"it answers, and is a suspect again", 25000, 28000, 24900, 25200, []Outcome{Answers, Suspect}},
	} {
		h.Suspected, h.Until, h.Cleared = ms(step.suspected), ms(step.until), ms(step.cleared)
		lab.Must(t, names.tables.Health.Put(maps.Index(backend), h))
		found, err := looks.look(ms(step.now))
		lab.Must(t, err)
		var outcomes []Outcome
		for _, e := range found {
			outcomes = append(outcomes, e.Outcome)
		}
		if diff := cmp.Diff(step.want, outcomes); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
		events = append(events, found...)
	}
	mustPrint(t, "suspects.txt", events)

	fresh := healing{names: names, known: make(map[uint32]maps.BackendHealth)}
	found, err := fresh.look(ms(60_000))
	if err != nil || len(found) != 2 || found[0].Outcome != Answers || found[1].Outcome != Suspect {
		t.Errorf("a first look finds %v, %v: want when it was a suspect last, and since when it is one", found, err)
	}
}

// Run prints the suspects of before, and what happens to them while it runs.
func TestRunPrintsSuspects(t *testing.T) {
	pinned := mapstest.MustCreate(t, nil)
	hand := mapstest.New(pinned.Tables)
	port, err := hand.ServicePort()
	lab.Must(t, err)
	backend, err := hand.Backend(port, netip.MustParseAddrPort("10.244.2.7:5432"), 0)
	lab.Must(t, err)
	now := maps.Now()
	h := maps.BackendHealth{Id: backend, Suspected: now - uint64(time.Second), Until: now + uint64(time.Second), Cause: uint8(maps.HealthRefused), Clients: 1}
	lab.Must(t, pinned.Health.Put(maps.Index(backend), h))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var printed []Outcome
	err = Run(ctx, Config{
		Maps: pinned, Since: time.Minute, Pods: pods.NewCache(pods.Config{CgroupRoot: t.TempDir(), Logs: t.TempDir()}),
		Print: func(e Event) error {
			if printed = append(printed, e.Outcome); e.Outcome == Answers {
				cancel()
			}
			h.Suspected, h.Cleared = 0, maps.Now()

			return pinned.Health.Put(maps.Index(backend), h)
		},
	})
	lab.Must(t, err)
	if diff := cmp.Diff([]Outcome{Suspect, Answers}, printed); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

// The example in docs/monitor.md is what is printed.
func TestDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/monitor.md")
	lab.Must(t, err)
	var printed []byte
	for _, file := range []string{"testdata/all.txt", "testdata/suspects.txt"} {
		text, err := os.ReadFile(file)
		lab.Must(t, err)
		printed = append(printed, text...)
	}
	checked := 0
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "TIME ") || strings.HasPrefix(line, "Nov 23 ") || strings.HasPrefix(line, "{") {
			checked++
			if !strings.Contains(string(printed), line) {
				t.Errorf("this is not printed: %s", line)
			}
		}
	}
	if checked < 8 {
		t.Errorf("only %d lines were checked", checked)
	}
}
