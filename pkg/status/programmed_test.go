package status

import (
	"encoding/json"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/lab"
)

// web is a Service with everything that a frontend can have.
func web() *lb.Service {
	return &lb.Service{
		Name:           lb.ServiceName{Namespace: "ns", Name: "web"},
		Type:           lb.LoadBalancer,
		ClusterIPs:     []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		Families:       []lb.Family{lb.IPv4, lb.IPv6},
		LoadBalancers:  []lb.LoadBalancerIP{{Addr: netip.MustParseAddr("192.0.2.1")}},
		SourceRanges:   []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("10.0.0.0/8")},
		ExternalPolicy: lb.Local,
		Affinity:       time.Hour,
		Ports: []lb.ServicePort{
			{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: lb.UDP, Port: 53},
		},
	}
}

func webSlice() *lb.EndpointSlice {
	endpoint := func(addr, node string) lb.Endpoint {
		return lb.Endpoint{Addr: netip.MustParseAddr(addr), Place: unique.Make(lb.Place{NodeName: node}), Ready: true, Serving: true}
	}

	return &lb.EndpointSlice{
		Name:    lb.SliceName{Namespace: "ns", Name: "web-1"},
		Service: web().Name,
		Family:  lb.IPv4,
		Ports:   []lb.EndpointPort{{Name: "http", Protocol: lb.TCP, Port: 8080}},
		Endpoints: []lb.Endpoint{
			endpoint("10.0.1.10", "node-1"), endpoint("10.0.1.9", "node-2"),
			{Addr: netip.MustParseAddr("10.0.1.11"), Place: unique.Make(lb.Place{NodeName: "node-1"})},
		},
	}
}

// snapshotOf returns what is known of a Service and its slice on node-1.
func snapshotOf(svc *lb.Service, slice *lb.EndpointSlice) lb.Snapshot {
	state := lb.NewState(lb.Node{Name: "node-1"})
	state.SetService(*svc)
	state.SetSlice(*slice)
	snapshot, _ := state.Snapshot(svc.Name)

	return snapshot
}

// programmed returns fake maps that hold web, and what should be in them.
func programmed(t *testing.T) (*maps.Fakes, []Frontend) {
	t.Helper()
	node := &lb.Node{
		Name: "node-1", PrimaryIPs: []netip.Addr{netip.MustParseAddr("10.1.1.1")}, MasqueradeAll: true, Algorithm: lb.Maglev,
	}
	res := lb.Resolve(web(), []*lb.EndpointSlice{webSlice()}, node)
	fakes := maps.NewFakes(1000)
	writer, err := reconcile.New(reconcile.Config{Tables: fakes.Tables, TableSize: 67})
	lab.Must(t, err)
	writer.Set(web().Name, time.Time{}, res)
	lab.Must(t, writer.Apply())
	var desired []Frontend
	convert := newViews()
	for _, f := range res.Frontends {
		desired = append(desired, convert.frontend(f))
	}

	return fakes, desired
}

func TestProgrammedIsWhatWasDesired(t *testing.T) {
	fakes, desired := programmed(t)
	have, problems, err := Programmed(fakes.Tables)
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	options := []cmp.Option{
		cmpopts.EquateComparable(netip.AddrPort{}, netip.Prefix{}), cmpopts.EquateEmpty(),
		cmpopts.SortSlices(func(a, b Frontend) bool { return a.Compare(b) < 0 }),
	}
	if diff := cmp.Diff(desired, have, options...); diff != "" {
		t.Errorf("programmed (+) is not what is desired (-):\n%s", diff)
	}
	if differences := Compare(desired, have); len(differences) > 0 {
		t.Error(differences)
	}
}

// Compare or Programmed finds each change that another program makes to a map.
func TestCompareFinds(t *testing.T) {
	key := maps.FrontendKeyOf(netip.MustParseAddr("10.96.0.1"), 80, uint8(lb.TCP), maps.ScopeInternal)
	vip := maps.FrontendKeyOf(netip.MustParseAddr("192.0.2.1"), 80, uint8(lb.TCP), maps.ScopeExternal)

	for _, test := range []struct {
		name string
		edit func(*maps.Fakes)
		want string
	}{
		{"a frontend that is missing", func(f *maps.Fakes) { delete(f.FrontendIDs.Entries, key) },
			"ns/web:http: frontend 10.96.0.1:80/TCP internal is not programmed"},
		{"a frontend too many", func(f *maps.Fakes) {
			const id = 900
			other := f.Frontends.Get(f.FrontendIDs.Entries[key])
			other.Key.Port = maps.Port(81)
			mustPut(t, f.Frontends, id, other)
			f.FrontendIDs.Entries[other.Key] = id
		}, "frontend 10.96.0.1:81/TCP internal is programmed, but no Service has it"},
		{"an id of another frontend", func(f *maps.Fakes) {
			id := f.FrontendIDs.Entries[key]
			other := f.Frontends.Get(id)
			other.Key = vip
			mustPut(t, f.Frontends, id, other)
		}, "frontend 10.96.0.1:80: its id leads to another frontend"},
		{"fewer backends", editPool(t, key, func(p *maps.Pool) { p.SlotCount-- }),
			"frontend 10.96.0.1:80/TCP internal: backends is"},
		{"a masquerade that is gone", editPool(t, key, func(p *maps.Pool) { p.Flags &^= maps.PoolMasquerade }),
			"frontend 10.96.0.1:80/TCP internal: masquerade is false, should be true"},
		{"another algorithm", editPool(t, key, func(p *maps.Pool) { p.Algorithm = maps.AlgorithmSH }),
			"frontend 10.96.0.1:80/TCP internal: algorithm is sh, should be maglev"},
		{"a backend of another pool in the table", func(f *maps.Fakes) {
			pool := poolOf(f, key)
			mustPut(t, f.Slots, pool.TableBase+pool.TableSize-1, 9)
		}, "backend 9 is in the table only"},
		{"no table", editPool(t, key, func(p *maps.Pool) { p.TableSize = 0 }),
			"frontend 10.96.0.1:80/TCP internal: it has no table for its algorithm"},
		{"a source range that is gone", func(f *maps.Fakes) {
			for k := range f.SourceRanges.Entries {
				if k.ServicePortId == poolOf(f, vip).ServicePortId {
					delete(f.SourceRanges.Entries, k)

					break
				}
			}
		}, "frontend 192.0.2.1:80/TCP external: sourceRanges"},
		{"a backend that does not exist", func(f *maps.Fakes) {
			for i := range f.Backends.All() {
				lab.Must(t, f.Backends.Put(i, maps.Backend{}))
			}
		}, "frontend 10.96.0.1:80/TCP internal: slot"},
		{"a backend of another service port", func(f *maps.Fakes) {
			for i, b := range f.Backends.All() {
				b.ServicePortId += 1000
				mustPut(t, f.Backends, i, b)
			}
		}, "belongs to service port id"},
		{"an id without a name", func(f *maps.Fakes) { clear(f.ServicePorts.Entries) }, "its service port id has no name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			fakes, desired := programmed(t)
			test.edit(fakes)
			have, problems, err := Programmed(fakes.Tables)
			lab.Must(t, err)
			found := strings.Join(append(problems, Compare(desired, have)...), "\n")
			if !strings.Contains(found, test.want) {
				t.Errorf("found %q, want %q in it", found, test.want)
			}
		})
	}
}

func poolOf(f *maps.Fakes, key maps.FrontendKey) maps.Pool {
	return f.Pools.Get(f.Frontends.Get(f.FrontendIDs.Entries[key]).PoolId)
}

// editPool changes the pool of a frontend.
func editPool(t *testing.T, key maps.FrontendKey, edit func(*maps.Pool)) func(*maps.Fakes) {
	return func(f *maps.Fakes) {
		pool := poolOf(f, key)
		edit(&pool)
		mustPut(t, f.Pools, f.Frontends.Get(f.FrontendIDs.Entries[key]).PoolId, pool)
	}
}

func mustPut[V any](t *testing.T, a *maps.Array[V], i uint32, v V) {
	t.Helper()
	lab.Must(t, a.Put(i, v))
}

func TestProgrammedServices(t *testing.T) {
	fakes, _ := programmed(t)
	services, err := ProgrammedServices(fakes.Tables)
	lab.Must(t, err)
	if len(services) != 1 || services[0].Name != "ns/web" || len(services[0].Ports) != 2 {
		t.Fatalf("services are %+v, want ns/web with two ports", services)
	}
	// Without an agent, the endpoint that is not ready is not known.
	http := services[0].Ports[1]
	if http.Name != "ns/web:http" || len(http.Backends) != 2 {
		t.Errorf("port is %q with backends %v, want ns/web:http with two", http.Name, http.Backends)
	}
}

// A backend that is a suspect is shown as such, with an agent and without one; one in whose place a
// suspect was before is not.
func TestSuspects(t *testing.T) {
	fakes, _ := programmed(t)
	var now unix.Timespec
	lab.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	for i, b := range stdmaps.Collect(fakes.Backends.All()) {
		h := maps.BackendHealth{Id: b.Id, Cause: uint8(maps.HealthRefused), Suspected: uint64(now.Nano()), Until: uint64(now.Nano() + int64(time.Minute))}
		if b.AddrPort().String() == "10.0.1.10:8080" {
			h.Id = maps.ID(i, maps.Generation(b.Id)+1)
		}
		mustPut(t, fakes.Health, i, h)
	}
	services, err := ProgrammedServices(fakes.Tables)
	lab.Must(t, err)
	with := []Service{newViews().service(snapshotOf(web(), webSlice()), lb.Resolve(web(), []*lb.EndpointSlice{webSlice()}, &lb.Node{Name: "node-1"}))}
	mustAddStates(t, with, fakes.Tables)
	for _, port := range []ServicePort{services[0].Ports[1], with[0].Ports[0]} {
		for _, b := range port.Backends {
			if b.Address.String() != "10.0.1.9:8080" {
				if b.Suspect != nil {
					t.Errorf("%s is a suspect", b.Address)
				}

				continue
			}
			if b.Suspect == nil {
				t.Fatalf("%s is no suspect", b.Address)
			}
			if left := time.Until(b.Suspect.Until); b.Suspect.Reason != "refuses connections" || left < 50*time.Second || left > time.Minute+time.Millisecond {
				t.Errorf("%s: %+v", b.Address, b.Suspect)
			}
		}
	}
}

// The connections of a backend are shown with an agent, and without one:
// those of one service port alone, wherever they were counted.
func TestConnections(t *testing.T) {
	fakes, _ := programmed(t)
	const drains = 77 // the second endpoint, as another backend than the one of now
	for i, b := range stdmaps.Collect(fakes.Backends.All()) {
		switch b.AddrPort().String() {
		case "10.0.1.9:8080":
			mustPut(t, fakes.Loads.Array, i, maps.BackendLoad{Sockets: 2, Flows: 3})
			b.Id = drains
			mustPut(t, fakes.Backends, drains, b)
			b.Id, b.ServicePortId = drains+1, 99
			mustPut(t, fakes.Backends, drains+1, b)
		case "10.0.1.10:8080":
			mustPut(t, fakes.Loads.Array, i, maps.BackendLoad{Sockets: -1})
		}
	}
	mustPut(t, fakes.Loads.Array, drains, maps.BackendLoad{Sockets: 10})
	mustPut(t, fakes.Loads.Array, drains+1, maps.BackendLoad{Sockets: 100})
	want := map[string]int{"10.0.1.9:8080": 15, "10.0.1.10:8080": 0}
	without, err := ProgrammedServices(fakes.Tables)
	lab.Must(t, err)
	checkConnections(t, without[0].Ports[1], want)

	with := []Service{newViews().service(snapshotOf(web(), webSlice()), lb.Resolve(web(), []*lb.EndpointSlice{webSlice()}, &lb.Node{Name: "node-1"}))}
	mustAddStates(t, with, fakes.Tables)
	want["10.0.1.11:8080"] = 0 // not ready
	checkConnections(t, with[0].Ports[0], want)
}

func mustAddStates(t *testing.T, services []Service, tables maps.Tables) {
	t.Helper()
	states, err := newStates(&tables, "")
	lab.Must(t, err)
	for i := range services {
		lab.Must(t, states.add(&services[i]))
	}
}

func checkConnections(t *testing.T, port ServicePort, want map[string]int) {
	t.Helper()
	have := make(map[string]int)
	for _, b := range port.Backends {
		have[b.Address.String()] = b.Connections
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("%s (-want +have):\n%s", port.Name, diff)
	}
}

func TestServiceShowsWhyBackendsAreInactive(t *testing.T) {
	res := lb.Resolve(web(), []*lb.EndpointSlice{webSlice()}, &lb.Node{Name: "node-1"})
	view := newViews().service(snapshotOf(web(), webSlice()), res)
	reasons := map[string]string{}
	for _, b := range view.Ports[0].Backends {
		reasons[b.Address.String()] = b.Reason
	}
	want := map[string]string{"10.0.1.9:8080": "", "10.0.1.10:8080": "", "10.0.1.11:8080": "not ready"}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Error(diff)
	}
}

// A text names three failures, and how many more there are.
func TestListText(t *testing.T) {
	for n, want := range []string{"", "x", "x; x", "x; x; x", "x; x; x; and 1 more", "x; x; x; and 2 more"} {
		if got := ListText(slices.Repeat([]string{"x"}, n)); got != want {
			t.Errorf("of %d: %q, want %q", n, got, want)
		}
	}
}

// Endpoints that are behind no port are shown with what keeps them out.
func TestEndpointsThatDoNotJoin(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*lb.EndpointSlice)
		why    string
	}{
		{"of another name", func(s *lb.EndpointSlice) { s.Ports[0].Name = "web" }, "of an EndpointSlice without the port http/TCP: it has web/TCP 8080"},
		{"without a name", func(s *lb.EndpointSlice) { s.Ports[0].Name = "" }, "of an EndpointSlice without the port http/TCP: it has without a name/TCP 8080"},
		{"of another protocol", func(s *lb.EndpointSlice) { s.Ports[0].Protocol = lb.UDP }, "of an EndpointSlice without the port http/TCP: it has http/UDP 8080"},
		{"without ports", func(s *lb.EndpointSlice) { s.Ports = nil }, "of an EndpointSlice without the port http/TCP: it has no ports"},
		{"of the other family", func(s *lb.EndpointSlice) {
			s.Family = lb.IPv6
			for i := range s.Endpoints {
				s.Endpoints[i].Addr = netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i + 1)})
			}
		}, "of an EndpointSlice for IPv6, and none is for IPv4"},
		{"which join", func(*lb.EndpointSlice) {}, ""},
	} {
		t.Run("it has endpoints "+test.name, func(t *testing.T) {
			slice := webSlice()
			test.change(slice)
			snapshot := snapshotOf(web(), slice)
			model := Model{Snapshots: []lb.Snapshot{snapshot}, Resolve: lb.Snapshot.ResolveIn}
			selection, ok := model.Selection("ns/web", webKey(80))
			var whys, backends []string
			for _, e := range selection.Endpoints {
				if strings.HasPrefix(e.Reason, "of an") {
					whys = append(whys, e.Reason)
				}
			}
			for _, b := range slices.Collect(model.Services())[0].Ports[0].Backends {
				if strings.HasPrefix(b.Reason, "of an EndpointSlice without") {
					backends = append(backends, b.Reason)
				}
			}
			if test.why == "" {
				if len(whys)+len(backends) > 0 || !ok {
					t.Errorf("kept out is %q, and shown as backends %q", whys, backends)
				}

				return
			}
			if len(whys) != 3 || whys[0] != test.why {
				t.Errorf("kept out is %q, want 3 of %q", whys, test.why)
			}
			if strings.Contains(test.why, "without") && len(backends) != 3 {
				t.Errorf("shown as backends are %q, want 3 of %q", backends, test.why)
			}
		})
	}
}

// Lists that are empty are so in JSON, too: programs that read it need no case for null.
func TestEmptyListsInJSON(t *testing.T) {
	svc := &lb.Service{Name: lb.ServiceName{Namespace: "ns", Name: "none"}, Families: []lb.Family{lb.IPv4}}
	empty := &lb.EndpointSlice{Name: lb.SliceName{Namespace: "ns", Name: "x"}}
	alone := web()
	fakes, _ := programmed(t)
	kernel, err := ProgrammedServices(fakes.Tables)
	lab.Must(t, err)
	for name, services := range map[string][]Service{
		"a Service without ports":                        slices.Collect(Model{Snapshots: []lb.Snapshot{snapshotOf(svc, empty)}, Resolve: lb.Snapshot.ResolveIn}.Services()),
		"a Service without endpoints":                    slices.Collect(Model{Snapshots: []lb.Snapshot{snapshotOf(alone, empty)}, Resolve: lb.Snapshot.ResolveIn}.Services()),
		"what is in the maps, with a port that has none": kernel,
	} {
		text, err := json.Marshal(services)
		if lab.Must(t, err); len(services) == 0 || strings.Contains(string(text), "null") {
			t.Errorf("of %s: %s", name, text)
		}
	}
}
