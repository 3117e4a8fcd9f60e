package status

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// serve starts a server that answers with *state, on fake maps.
func serve(t *testing.T, state *lb.State) *Client {
	t.Helper()

	return serveAt(t, filepath.Join(t.TempDir(), "below", "agent.sock"), state)
}

func serveAt(t *testing.T, socket string, state *lb.State) *Client {
	t.Helper()
	server := Server{
		Socket: socket,
		Log:    slog.New(slog.DiscardHandler),
		Tables: maps.NewFakes(100).Tables,
		Ping:   func(context.Context) error { return nil },
		Model: func(context.Context) (Model, error) {
			return Model{
				Snapshots: slices.Collect(state.Snapshots()), Resolve: lb.Snapshot.ResolveIn, Own: ProbeFrontends(80),
				Errors:   []ServiceError{{Service: "ns/web", Error: "one"}, {Service: "ns/web", Error: "two"}},
				Problems: map[string][]lb.Problem{"Service ns/web": {{Object: "Service ns/web", Field: "f", Message: "m"}}},
				Owners: map[lb.FrontendKey]lb.ServiceName{
					webKey(80): {Namespace: "ns", Name: "other"}, webKey(53): {Namespace: "ns", Name: "web"},
				},
				Contested: map[lb.FrontendKey][]string{webKey(80): {"Service ns/other claims it, too"}},
			}, nil
		},
	}
	release, err := LockSocket(server.Socket)
	lab.Must(t, err)
	t.Cleanup(func() { release() })
	lab.MustRun(t, server.Run)

	return NewClient(server.Socket)
}

// webKey is the frontend of web's first ClusterIP at a port.
func webKey(port uint16) lb.FrontendKey {
	protocol := lb.TCP
	if port == 53 {
		protocol = lb.UDP
	}

	return lb.FrontendKey{Addr: web().ClusterIPs[0], Port: port, Protocol: protocol, Scope: lb.Internal}
}

func mustAsk[T any](t *testing.T, ask func(context.Context) (T, error)) T {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	for {
		value, err := ask(ctx)
		if err == nil {
			return value
		}
		if !errors.Is(err, ErrNotRunning) || ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestClientSeesTheModel(t *testing.T) {
	state := lb.NewState(lb.Node{Name: "node-1"})
	state.SetService(*web())
	client := serve(t, state)
	services := mustAsk(t, client.Services)
	if len(services) != 1 || services[0].Name != "ns/web" {
		t.Fatalf("services are %+v, want ns/web", services)
	}
	if svc := services[0]; svc.Error != "one; two" || len(svc.Problems) == 0 || svc.Problems[0].Field != "f" {
		t.Errorf("it has the error %q and the problems %v", svc.Error, svc.Problems)
	}
	// Two ports, three kinds of addresses, the catch-alls, and the agent's own.
	desired := mustAsk(t, client.Desired)
	if len(desired) < 10 {
		t.Errorf("%d frontends are desired, want at least 10", len(desired))
	}
	has := func(port uint16) bool {
		key := webKey(port)

		return slices.ContainsFunc(desired, func(f Frontend) bool {
			return f.Key() == key
		})
	}
	if has(80) || !has(53) {
		t.Error("desired are not the frontends that the Service owns")
	}
	if !slices.ContainsFunc(desired, func(f Frontend) bool { return f.Address.Addr() == datapath.ProbeAddr }) {
		t.Error("the agent's own frontend is missing")
	}
}

// Each endpoint of the Service is there with its use at the frontend that is asked about, and no other
// frontend is.
func TestSelection(t *testing.T) {
	state := lb.NewState(lb.Node{Name: "node-1"})
	state.SetService(*web())
	state.SetSlice(*webSlice())
	client := serve(t, state)
	balancer := webKey(80)
	balancer.Addr, balancer.Scope = web().LoadBalancers[0].Addr, lb.External
	for _, test := range []struct {
		key             lb.FrontendKey
		policy          string
		eligible, other int
		contested       int
	}{
		{webKey(80), "Cluster", 2, 0, 1},
		{balancer, "Local", 1, 1, 0},
	} {
		selection := mustAsk(t, func(ctx context.Context) (Selection, error) { return client.Selection(ctx, "ns/web", test.key) })
		eligible, other := 0, 0
		for _, e := range selection.Endpoints {
			if e.Eligible {
				eligible++
			} else if e.Reason == lb.NotLocal.String() {
				other++
			}
		}
		if selection.Policy != test.policy || eligible != test.eligible || other != test.other || selection.Error == "" || len(selection.Contested) != test.contested {
			t.Errorf("%s: the selection is %+v", test.key, selection)
		}
	}
	for service, port := range map[string]uint16{"ns/nosuch": 80, "ns/web": 81} {
		if _, err := client.Selection(t.Context(), service, webKey(port)); err == nil || !strings.Contains(err.Error(), "has no frontend") {
			t.Errorf("%s at port %d: %v", service, port, err)
		}
	}
}

func TestClientWithoutAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("without a socket: %v, want %v", err, ErrNotRunning)
	}
	// What a killed agent leaves.
	lab.Must(t, os.WriteFile(path, nil, 0o600))
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("with a dead socket: %v, want %v", err, ErrNotRunning)
	}
}

func TestSocketHasOneAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "below", "agent.sock")
	release, err := LockSocket(path)
	lab.Must(t, err)
	if _, err := LockSocket(path); !errors.Is(err, datapath.ErrRunning) || !strings.Contains(err.Error(), path) {
		t.Errorf("while one runs: %v, want %v with the socket's path", err, datapath.ErrRunning)
	}
	lab.Must(t, release())
	release, err = LockSocket(path)
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	release()
}

// No one but root can ask the agent, or have another program answer in its place.
func TestSocketIsForRoot(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "below", "agent.sock")
	mustAsk(t, serveAt(t, socket, lb.NewState(lb.Node{Name: "node-1"})).Services)
	for path, want := range map[string]os.FileMode{socket: 0o600, filepath.Dir(socket): 0o700} {
		found, err := os.Stat(path)
		lab.Must(t, err)
		if got := found.Mode().Perm(); got != want {
			t.Errorf("%s has the mode %o, want %o", path, got, want)
		}
	}
}

// An agent whose loop hangs is told within two seconds, whatever is asked.
func TestAgentThatHangs(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	lab.MustRun(t, Server{
		Socket: socket, Log: slog.New(slog.DiscardHandler),
		Ping:   func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		Status: func(context.Context) (Status, error) { t.Error("it is asked nevertheless"); return Status{}, nil },
		Model:  func(context.Context) (Model, error) { t.Error("it is asked nevertheless"); return Model{}, nil },
	}.Run)
	client := NewClient(socket)
	lab.Eventually(t, "the server listens", func() bool { _, err := os.Stat(socket); return err == nil })
	for name, ask := range map[string]func() error{
		"status":   func() error { _, err := client.Status(t.Context()); return err },
		"services": func() error { _, err := client.Services(t.Context()); return err },
	} {
		begin := time.Now()
		if err := ask(); !errors.Is(err, ErrHung) || err.Error() != "the agent does not answer within 2s" {
			t.Errorf("%s: %v, want %v", name, err, ErrHung)
		}
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("%s took %v", name, took)
		}
	}
}

// An agent of an older build has no path for pings. It answers what it is asked.
func TestOlderAgentWithoutPings(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", socket)
	lab.Must(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"running": true, "version": "older"}`) })
	server := &http.Server{Handler: mux}
	go server.Serve(listener)
	defer server.Close()
	if s, err := NewClient(socket).Status(t.Context()); err != nil || s.Version != "older" {
		t.Errorf("status is of version %q, %v", s.Version, err)
	}
}

// An agent of an older build answers with one array, which is read as well.
func TestOlderAgentWithoutParts(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", socket)
	lab.Must(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /services", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `[{"name": "ns/web", "ports": []}, {"name": "ns/dns", "ports": []}]`)
	})
	mux.HandleFunc("GET /desired", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `[{"service": "ns/web:http", "address": "10.96.0.1:80", "protocol": "TCP", "scope": "internal", "kind": "ClusterIP", "backends": []}]`)
	})
	server := &http.Server{Handler: mux}
	go server.Serve(listener)
	defer server.Close()
	client := NewClient(socket)
	if services, err := client.Services(t.Context()); err != nil || len(services) != 2 {
		t.Errorf("services are %+v, %v", services, err)
	}
	if svc, err := client.Service(t.Context(), "dns"); err != nil || svc.Name != "ns/dns" {
		t.Errorf("the Service is %+v, %v", svc, err)
	}
	if desired, err := client.Desired(t.Context()); err != nil || len(desired) != 1 || desired[0].Address.Port() != 80 {
		t.Errorf("desired are %+v, %v", desired, err)
	}
}

// An answer in parts is what was sent, and its frontends share the lists that those of the agent share. One that ends
// too soon is an error, and no short list.
func TestParts(t *testing.T) {
	svc := web()
	for i := range 300 {
		svc.ExternalIPs = append(svc.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}))
	}
	snapshot := snapshotOf(svc, webSlice())
	sent := newViews().service(snapshot, snapshot.Resolve())
	sent.Ports[0].Backends[0].Connections = 7
	answer := httptest.NewRecorder()
	to := newStream(deadlines{answer})
	lab.Must(t, to.service(sent), to.service(Service{Name: "ns/none"}), to.end(nil))
	text := answer.Body.Bytes()
	read := func(text []byte) (services []Service, err error) {
		err = readParts(bytes.NewReader(text), func(svc Service) error {
			services = append(services, svc)

			return nil
		}, noFrontend)

		return services, err
	}
	got, err := read(text)
	lab.Must(t, err)
	if diff := cmp.Diff([]Service{sent, {Name: "ns/none", Ports: []ServicePort{}}}, got, cmpopts.EquateComparable(netip.AddrPort{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-sent +read:\n%s", diff)
	}
	lists := make(map[*netip.AddrPort]bool)
	for _, f := range got[0].Ports[0].Frontends {
		if len(f.Backends) > 0 {
			lists[&f.Backends[0]] = true
		}
	}
	if count := bytes.Count(text, []byte("10.0.1.9:8080")); len(lists) > 2 || count > 5 {
		t.Errorf("%d frontends have %d lists, and a backend is written %d times", len(got[0].Ports[0].Frontends), len(lists), count)
	}
	for _, end := range []int{len(text) / 2, bytes.LastIndexByte(text[:len(text)-1], '\n') + 1} {
		if services, err := read(text[:end]); err == nil || !strings.Contains(err.Error(), "not complete") {
			t.Errorf("after %d of %d bytes: %d Services, %v", end, len(text), len(services), err)
		}
	}
	if _, err := read([]byte(`{"end": true, "error": "the loop hangs"}`)); err == nil || err.Error() != "the loop hangs" {
		t.Errorf("an answer that could not be made: %v", err)
	}
}

// deadlines is a ResponseWriter that takes deadlines, as that of a connection.
type deadlines struct{ *httptest.ResponseRecorder }

func (deadlines) SetWriteDeadline(time.Time) error { return nil }

// A Service is found in each form in which a person, DNS or a table of ours names it. One that is not there is no error of
// the agent, and the error has what there is.
func TestServiceByName(t *testing.T) {
	state := lb.NewState(lb.Node{Name: "node-1"})
	state.SetService(*web())
	for _, name := range []lb.ServiceName{{Namespace: "ns", Name: "other"}, {Namespace: "shop", Name: "db"}, {Namespace: "test", Name: "db"}} {
		svc := *web()
		svc.Name = name
		state.SetService(svc)
	}
	client := serve(t, state)
	mustAsk(t, client.Services)
	for name, want := range map[string]string{
		"web": "ns/web", "ns/web": "ns/web", "svc/web": "ns/web", "service/web": "ns/web", "services/ns/web": "ns/web",
		"web.ns": "ns/web", "web.ns.svc": "ns/web", "web.ns.svc.cluster.local": "ns/web", "web.ns.svc.cluster.local.": "ns/web",
		"ns/web:http": "ns/web", "web:80": "ns/web", "svc/web:80/TCP": "ns/web", "db.shop.svc:80": "shop/db", "test/db:http": "test/db",
	} {
		if svc, err := client.Service(t.Context(), name); err != nil || svc.Name != want || len(svc.Ports) != 2 {
			t.Errorf("%s: %+v, %v, want %s", name, svc, err, want)
		}
	}
	for name, want := range map[string]string{
		"nosuch":                 `no Service is called "nosuch"; there are ns/other, ns/web, shop/db, test/db`,
		"svc/webs":               `no Service is called "svc/webs"; there are ns/web`,
		"wbe.ns.svc":             `no Service is called "wbe.ns.svc"; there are ns/web, ns/other`,
		"web-0.web.ns.svc":       `no Service is called "web-0.web.ns.svc"; there are ns/web`,
		"other.example.com":      `no Service is called "other.example.com"; there are ns/other`,
		"db":                     `2 Services are called "db": choose one of shop/db, test/db`,
		"svc/db:80":              `2 Services are called "svc/db:80": choose one of shop/db, test/db`,
		"db.prod.svc.cluster.eu": `no Service is called "db.prod.svc.cluster.eu"; there are shop/db, test/db`,
	} {
		if _, err := client.Service(t.Context(), name); err == nil || err.Error() != want || !errors.As(err, new(NameError)) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	if _, err := ServiceNamed(nil, "web"); err == nil || err.Error() != `no Service is called "web"; there are none` {
		t.Errorf("of none: %v", err)
	}
}
