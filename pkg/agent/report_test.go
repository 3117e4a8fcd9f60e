package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/events"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/heavy"
)

// recordingEvents returns a recorder that remembers the Events.
func recordingEvents() (events.Recorder, *[]kube.Event) {
	var events []kube.Event

	return func(e kube.Event) { events = append(events, e) }, &events
}

// A part of an object that is left out gives one Event as long as it is left out.
func TestProblemsAreEvents(t *testing.T) {
	record, events := recordingEvents()
	m := newModel(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, parts{events: record})
	bad := lb.Problem{Object: "Service ns/web", Field: "metadata.annotations[sluice-lb.io/algorithm]", Message: "no such thing"}
	worse := lb.Problem{Object: "Service ns/web", Field: "spec.externalIPs[0]", Message: "not an address"}
	m.report("Service ns/web", []lb.Problem{bad})
	m.report("Service ns/web", []lb.Problem{bad})
	m.report("Service ns/web", []lb.Problem{bad, worse})
	m.report("Service ns/web", nil)
	m.report("Service ns/web", []lb.Problem{bad})
	m.report("Node node-1", []lb.Problem{{Object: "Node node-1", Field: "spec.podCIDRs[0]", Message: "m"}})
	for _, object := range []string{"EndpointSlice ns/web-1", "/etc/manifests/a.yaml", "API server", "Node other"} {
		m.report("other", []lb.Problem{{Object: object, Field: "f", Message: "m"}})
	}
	event := func(field, note string) kube.Event {
		return kube.Event{
			Service: lb.ServiceName{Namespace: "ns", Name: "web"}, Field: field,
			Reason: "FieldIgnored", Action: "Read", Note: note,
		}
	}
	annotation := event(bad.Field, "metadata.annotations[sluice-lb.io/algorithm]: no such thing")
	want := []kube.Event{
		annotation, event(worse.Field, "spec.externalIPs[0]: not an address"), annotation,
		{Field: "spec.podCIDRs[0]", Reason: "FieldIgnored", Action: "Read", Note: "spec.podCIDRs[0]: m"},
	}
	if diff := cmp.Diff(want, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// impairedScene is an agent whose impaired Services are reported.
type impairedScene struct {
	*agent
	fakes  *maps.Fakes
	events *[]kube.Event
}

func newImpairedScene(t *testing.T) *impairedScene {
	t.Helper()
	record, events := recordingEvents()
	fakes := maps.NewFakes(100)
	writer, err := reconcile.New(reconcile.Config{Tables: fakes.Tables})
	if err != nil {
		t.Fatal(err)
	}
	a := newAgent(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)},
		parts{queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), writer: writer, events: record})
	a.synced, a.complete = true, true

	return &impairedScene{agent: a, fakes: fakes, events: events}
}

// set has a Service claim what web does.
func (s *impairedScene) set(name string, created int64) {
	svc := *web()
	svc.Name.Name = name
	s.writer.Set(svc.Name, time.Unix(created, 0), lb.Resolve(&svc, nil, &lb.Node{}))
	s.model.claimsChanged = true
	s.apply()
}

func (s *impairedScene) delete(name string) {
	s.writer.Delete(lb.ServiceName{Namespace: "ns", Name: name})
	s.model.claimsChanged = true
	s.apply()
}

// fail has writes to tables of these names fail, of any without names.
func (s *impairedScene) fail(tables ...string) {
	s.fakes.Observe(func(table, operation string) error {
		if len(tables) == 0 || operation == "put" && slices.Contains(tables, table) {
			return errors.New("refused")
		}

		return nil
	}, nil)
}

// mustReport reports impaired Services, and expects Events that begin with want.
func (s *impairedScene) mustReport(t *testing.T, when string, want ...string) {
	t.Helper()
	for range 2 {
		for s.reportImpaired(t.Context()); s.reporting; s.processQueue() {
			<-s.queue.Ready()
		}
	}
	var got []string
	for _, e := range *s.events {
		got = append(got, e.Service.Name+" "+e.Reason+" "+e.Note)
	}
	*s.events = nil
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("%s, reported is\n%s\nwant\n%s", when, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A Service that cannot be programmed is reported once, and again for another reason or after it
// has recovered.
func TestImpairedServicesAreReported(t *testing.T) {
	s := newImpairedScene(t)
	s.set("a", 2)
	s.mustReport(t, "while all is well")
	s.set("b", 1)
	s.mustReport(t, "when an older Service claims the same", "a AddressTaken 10.96.0.1 belongs to Service ns/b; "+
		"10.96.0.1:53/UDP belongs to Service ns/b; 10.96.0.1:80/TCP belongs to Service ns/b; and 6 more")
	s.set("b", 1)
	s.mustReport(t, "when nothing has changed")
	s.delete("b")
	s.mustReport(t, "when that is gone")

	s.fail(maps.NameFrontends)
	s.set("c", 3)
	s.mustReport(t, "when writes fail", "c AddressTaken ") // its claims are worse, so it writes nothing
	s.delete("a")
	s.mustReport(t, "when it is its turn", "c FrontendsNotProgrammed frontend ")
	s.fakes.Observe(nil, nil)
	s.set("c", 3)
	s.mustReport(t, "when it works")
	s.fail()
	s.set("d", 0)
	s.mustReport(t, "when nothing works at all", "d FrontendsNotProgrammed ", "c AddressTaken ")
}

// Turns of the loop that fail for the same reason log it once in a minute, with how many did meanwhile.
func TestRepeatedErrorsAreLimited(t *testing.T) {
	s := newImpairedScene(t)
	var log bytes.Buffer
	s.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	mustLog := func(when string, want ...string) {
		t.Helper()
		n := strings.Count(log.String(), "not everything is programmed")
		if missing := func(part string) bool { return !strings.Contains(log.String(), part) }; n != min(len(want), 1) || slices.ContainsFunc(want, missing) {
			t.Errorf("%s, logged %d times is\n%s\nwant one line with %q, or none", when, n, log.String(), want)
		}
		log.Reset()
	}
	passes := func(d time.Duration) { s.unprogrammed.logged = s.unprogrammed.logged.Add(-d) }
	s.fail(maps.NameFrontends)
	s.set("a", 1)
	mustLog("at first", "repeats=0")
	for range 100 {
		s.set("a", 1)
	}
	mustLog("at once again")
	passes(sameErrorPause)
	s.set("a", 1)
	mustLog("after a minute", "repeats=100")
	s.delete("a")
	s.set("b", 1)
	mustLog("when another Service fails at once")
	passes(otherErrorPause)
	s.set("b", 1)
	mustLog("when another Service fails after five seconds", "ns/b", "repeats=1")
}

// Where there is no room, the Event names the namespace that has the most.
func TestFullMapIsReported(t *testing.T) {
	s := newImpairedScene(t)
	h := heavy.New(1, 0, 100, 2)
	h.Name.Namespace = "greedy"
	s.writer.Set(h.Name, time.Unix(1, 0), lb.Resolve(&h.Service, nil, &lb.Node{}))
	s.apply()
	s.fakes.FrontendIDs.Size = len(s.fakes.FrontendIDs.Entries)
	s.set("a", 2)
	s.mustReport(t, "when a map is full", "a FrontendsNotProgrammed there is no room, and Services of namespace greedy have the most frontends; "+
		"frontend 10.96.0.1:80/TCP internal: map frontend_ids, ")
}

// An older Service that names an address later takes nothing that is in use, and is told so.
func TestLaterClaimIsReported(t *testing.T) {
	s := newImpairedScene(t)
	s.writer.Prune()
	s.set("young", 2)
	s.mustReport(t, "while all is well")
	s.set("old", 1)
	s.mustReport(t, "when an older Service claims the same", "old AddressTaken 10.96.0.1 belongs to Service ns/young; ")
}

// Where an external address precedes another Service's node port, or is at its ClusterIP, both Services get an Event.
func TestOverlapsAreReported(t *testing.T) {
	s := newImpairedScene(t)
	s.set("web", 1)
	node := netip.MustParseAddr("192.0.2.10")
	s.writer.SetNodeAddrs(map[netip.Addr]maps.AddrUse{node: {Flags: maps.AddrNodePort}})
	taker := lb.Service{
		Name: lb.ServiceName{Namespace: "other", Name: "taker"}, Families: []lb.Family{lb.IPv4},
		ClusterIPs:  []netip.Addr{netip.MustParseAddr("10.96.0.2")},
		ExternalIPs: []netip.Addr{node, netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("192.0.2.11")},
		Ports:       []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 30080}, {Name: "udp", Protocol: lb.UDP, Port: 30080}},
	}
	s.writer.Set(taker.Name, time.Unix(2, 0), lb.Resolve(&taker, nil, &lb.Node{}))
	s.model.claimsChanged = true
	s.apply()
	s.mustReport(t, "when another Service names its addresses",
		"web AddressTaken 10.96.0.1:30080/TCP belongs to Service other/taker; 10.96.0.1:30080/UDP belongs to Service other/taker; "+
			"node port 30080/TCP at 192.0.2.10 belongs to Service other/taker",
		"taker AddressOverlaps 10.96.0.1:30080/TCP gets clients of the ClusterIP of Service ns/web; "+
			"10.96.0.1:30080/UDP gets clients of the ClusterIP of Service ns/web; "+
			"192.0.2.10:30080/TCP gets clients of node port 30080/TCP of Service ns/web")
	m := status.NewModel(s.writer.Statuses())
	key := lb.FrontendKey{Addr: node, Port: 30080, Protocol: lb.TCP, Scope: lb.External}
	want := []string{"192.0.2.10:30080/TCP gets clients of node port 30080/TCP of Service ns/web"}
	if !slices.Equal(m.Contested[key], want) || len(m.Errors) != 3 {
		t.Errorf("contested are %v, errors %v", m.Contested, m.Errors)
	}
	s.delete("web")
	s.mustReport(t, "when that Service is gone")
}

// A server that cannot listen is a problem of the node with the field of its address, until it listens.
func TestServersThatCannotListen(t *testing.T) {
	record, events := recordingEvents()
	s := newImpairedScene(t)
	s.model.events = record
	address := netip.MustParseAddrPort("192.0.2.1:10256")
	listening := s.reportServer("healthzBindAddress", address)
	for _, test := range []struct {
		err    error
		remedy string
	}{
		{unix.EADDRINUSE, "Another program listens there, which ss -ltnp 'sport = :10256' shows"},
		{unix.EADDRNOTAVAIL, "No device of this node has the address"},
		{unix.EACCES, "Set an address and a port"},
	} {
		listening(&net.OpError{Op: "listen", Err: os.NewSyscallError("bind", test.err)})
		s.processQueue()
		troubles := statusOf(s.state(), s.writer.Statuses(), s.model.problems).Troubles()
		if len(troubles) != 1 || !strings.Contains(troubles[0], "healthzBindAddress 192.0.2.1:10256: nothing answers there: ") || !strings.Contains(troubles[0], test.remedy) {
			t.Errorf("%v: the troubles are %q, want one with %q", test.err, troubles, test.remedy)
		}
		if n := s.modelStats(); n.OfNode != 1 || n.Problems != 0 {
			t.Errorf("%v: %d problems of the node and %d of objects are counted, want 1 and 0", test.err, n.OfNode, n.Problems)
		}
	}
	if unready := s.model.unready(); len(unready) > 0 {
		t.Errorf("connections fail by it: %q", unready)
	}
	listening(nil)
	s.processQueue()
	if troubles := statusOf(s.state(), s.writer.Statuses(), s.model.problems).Troubles(); len(troubles) > 0 {
		t.Errorf("once it listens, the troubles are %q", troubles)
	}
	for _, has := range []bool{true, false, true} {
		s.cfg.KubeProxyListens = func(at netip.AddrPort) bool { return has && at == address }
		listening(&net.OpError{Op: "listen", Err: os.NewSyscallError("bind", unix.EADDRINUSE)})
		s.processQueue()
		if troubles := statusOf(s.state(), s.writer.Statuses(), s.model.problems).Troubles(); (len(troubles) == 0) != has {
			t.Errorf("if kube-proxy has the port (%v), the troubles are %q", has, troubles)
		}
	}
	last := (*events)[len(*events)-1]
	if len(*events) != 6 || last.Reason != kube.ReasonAsConfigured || !last.Normal || last.Field != "healthzBindAddress" {
		t.Errorf("the Events are %+v", *events)
	}
}

// What fails connections makes the node unready, as long as it does.
func TestUnreadyWhileConnectionsFail(t *testing.T) {
	s := newImpairedScene(t)
	p := lb.Problem{Object: lb.Configuration, Field: "hostnameOverride", Value: "node-9", Message: "m", Effect: lb.Degraded}
	s.model.report("x", []lb.Problem{p})
	if unready := s.model.unready(); len(unready) > 0 {
		t.Errorf("the node is unready although connections work: %q", unready)
	}
	p.Effect = lb.Failing
	s.model.report("x", []lb.Problem{p})
	if want := []string{"configuration: hostnameOverride node-9: m"}; !slices.Equal(s.model.unready(), want) {
		t.Errorf("unready is %q, want %q", s.model.unready(), want)
	}
	s.model.report("x", nil)
	if unready := s.model.unready(); len(unready) > 0 {
		t.Errorf("the node stays unready: %q", unready)
	}
}
