package maps

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustBeOther makes p's folder that of an agent with another layout, and closes p.
func mustBeOther(t *testing.T, p *Pinned, root, version string) {
	t.Helper()
	err := errors.Join(p.Close(), os.Rename(filepath.Join(root, Version), filepath.Join(root, version)))
	lab.Must(t, err)
}

var (
	vip         = AddrOf(netip.MustParseAddr("10.96.0.1"))
	webPort     = ServicePortOf("shop", "web", "http", 6, 4)
	flowOfWeb   = FlowKeyOf(HookIngress, 6, netip.MustParseAddrPort("192.0.2.1:5000"), netip.MustParseAddrPort("10.96.0.1:80"))
	backendWeb  = BackendOf(ID(perChunk+1, 3), ID(7, 1), netip.MustParseAddrPort("10.0.1.7:8080"), BackendLocal)
	freeBackend = Backend{Reserved: 9} // its next generation
)

// mustHaveState puts something into each map that a build of another version must find.
func mustHaveState(t *testing.T, p *Pinned) {
	t.Helper()
	err := errors.Join(
		p.ServicePorts.Put(ID(7, 1), webPort), p.Counts.Begin(ID(7, 1)),
		p.Backends.Put(perChunk+1, backendWeb), p.Backends.Put(5, freeBackend),
		p.Addrs.Put(vip, AddrUse{Flags: AddrService}),
		p.FrontendIDs.Put(web, 9), p.Frontends.Put(9, webFrontend),
		p.Flows.Put(flowOfWeb, Flow{BackendId: backendWeb.Id}),
		p.Loads.Reserve(int(perChunk)+2),
		p.Health.Reserve(int(perChunk)+2),
	)
	lab.Must(t, err)
	p.Loads.AddFlows(backendWeb.Id, 3)
}

func mustHave[K comparable, V comparable](t *testing.T, table Table[K, V], k K, want V) {
	t.Helper()
	if have, ok, err := table.Lookup(k); have != want || !ok || err != nil {
		t.Errorf("map %s: %+v, %v, %v, want %+v", table.Name(), have, ok, err, want)
	}
}

func TestAnotherVersionKeepsIDsAndState(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	mustBeOther(t, first, root, "v1x")

	p := mustCreate(t, root, small())
	mustHave(t, p.ServicePorts, ID(7, 1), webPort)
	mustHave(t, p.Addrs, vip, AddrUse{Flags: AddrService})
	mustHave(t, p.Flows, flowOfWeb, Flow{BackendId: backendWeb.Id})
	if b, free := p.Backends.Get(perChunk+1), p.Backends.Get(5); b != backendWeb || free != freeBackend {
		t.Errorf("backends %+v and %+v, want %+v and %+v", b, free, backendWeb, freeBackend)
	}
	if load := p.Loads.Load(backendWeb.Id); load.Flows != 3 {
		t.Errorf("load %+v, want 3 flows", load)
	}
	// The writer fills the maps whose layout belongs to the version.
	if _, ok, err := p.FrontendIDs.Lookup(web); ok || err != nil || p.Frontends.Get(9) != (Frontend{}) {
		t.Errorf("a frontend: %v, %v, %+v", ok, err, p.Frontends.Get(9))
	}
	if others, err := OtherFolders(root); err != nil || len(others) != 1 || filepath.Base(others[0]) != "v1x" {
		t.Errorf("other folders: %v, %v", others, err)
	}
}

// Maps with too little room are made anew and larger, with the ids and the state of the former ones, which programs may still
// use. Maps with more room stay as they are.
func TestMapsGetMoreRoom(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	lab.Must(t, first.Close())

	for _, least := range []uint32{64, 32} {
		opts := small()
		opts.Least = map[string]uint32{NameFrontendIDs: least, NameAddrs: 1 << 18, NameSourceRanges: 1 << 17}
		p := mustCreate(t, root, opts)
		if ids, ranges := p.FrontendIDs.Capacity(), p.SourceRanges.Capacity(); ids != 64 || ranges != 1<<17 {
			t.Errorf("room for %d frontends and %d source ranges, want 64 and %d", ids, ranges, 1<<17)
		}
		mustHave(t, p.ServicePorts, ID(7, 1), webPort)
		mustHave(t, p.Addrs, vip, AddrUse{Flags: AddrService})
		mustHave(t, p.Flows, flowOfWeb, Flow{BackendId: backendWeb.Id})
		if b := p.Backends.Get(perChunk + 1); b != backendWeb {
			t.Errorf("backend %+v, want %+v", b, backendWeb)
		}
		_, ok, err := p.FrontendIDs.Lookup(web)
		lab.Must(t, err)
		if least == 64 {
			if others, err := OtherFolders(root); ok || err != nil || len(others) != 1 {
				t.Errorf("a frontend: %v; other folders %v, %v, want that of the former maps, and no frontend", ok, others, err)
			}
			lab.Must(t, p.FrontendIDs.Put(web, 9))
		} else if !ok {
			t.Error("maps with enough room were made anew")
		}
		lab.Must(t, p.Close())
	}
}

// An agent that was killed as it made the maps anew has left the former ones, which the next agent inherits from.
func TestAgentIsKilledAsMapsGetMoreRoom(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	mustBeOther(t, first, root, Version+"-short")

	p := mustCreate(t, root, Options{})
	mustHave(t, p.ServicePorts, ID(7, 1), webPort)
	mustHave(t, p.Flows, flowOfWeb, Flow{BackendId: backendWeb.Id})
}

// The arrays of counts get room for more chunks, and keep what was counted.
func TestCountsGetMoreRoom(t *testing.T) {
	root := lab.MustBPFRoot(t)
	opts := small()
	opts.Capacities[NamePortCounts] = 2
	first := mustCreate(t, root, opts)
	perChunk := uint32(abiChunkCHUNK_COUNTS)
	id := ID(perChunk+1, 0)
	lab.Must(t, first.ServicePorts.Put(id, webPort))
	lab.Must(t, first.Stats.Begin(id))
	if err := first.Stats.Begin(ID(2*perChunk, 0)); !errors.Is(err, ErrFull) {
		t.Fatalf("a third chunk: %v, want %v", err, ErrFull)
	}
	mustCount(t, first, id, PortCounts{Connections: 5})

	p := mustCreate(t, root, small())
	lab.Must(t, p.Stats.Begin(ID(2*perChunk, 0)))
	counted := StatKey{id, uint32(ReasonTranslated)}
	cpus := uint64(ebpf.MustPossibleCPU())
	if n := mustStats(t, p)[counted]; n != 5*cpus {
		t.Errorf("%d connections were counted, want %d", n, 5*cpus)
	}
	mustCount(t, first, id, PortCounts{Connections: 6}) // by a program that uses the former array
	if n := mustStats(t, p)[counted]; n != 6*cpus {
		t.Errorf("%d connections were counted, want %d", n, 6*cpus)
	}
}

// A folder that exists is used, and the rest of a failed attempt is not.
func TestIDsAreInheritedOnce(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	mustBeOther(t, first, root, "v1x")
	lab.Must(t, os.MkdirAll(filepath.Join(root, asidePrefix+Version, "left"), 0o700))

	p := mustCreate(t, root, small())
	lab.Must(t, p.Backends.Put(perChunk+1, Backend{}), p.Close())
	p = mustCreate(t, root, small())
	if b := p.Backends.Get(perChunk + 1); b.Id != 0 {
		t.Errorf("a backend that had gone is back: %+v", b)
	}
	if _, err := os.Stat(filepath.Join(root, asidePrefix+Version)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder aside: %v", err)
	}
}

// Of two folders that exist, that of the programs in force is inherited, and of two that programs use, the younger: an
// agent that was killed as it replaced programs has left both.
func TestIDsOfTheFolderInForce(t *testing.T) {
	for name, test := range map[string]struct {
		inUse     []string // folders whose maps programs use; the other one is the younger
		inherited bool
	}{
		"the other one":                        {[]string{"v1x"}, true},
		"both, and the other one is younger":   {[]string{Version, "v1x"}, true},
		"the own one":                          {[]string{Version}, false},
		"none, as if nothing was attached yet": {nil, false},
	} {
		t.Run("it is "+name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			older := mustCreate(t, root, small())
			mustHaveState(t, older)
			lab.Must(t, older.Close())
			lab.Must(t, os.Rename(filepath.Join(root, Version), filepath.Join(root, "aside")))
			other := mustCreate(t, root, small())
			lab.Must(t, other.ServicePorts.Put(ID(8, 1), webPort))
			mustBeOther(t, other, root, "v1x")
			lab.Must(t, os.Rename(filepath.Join(root, "aside"), filepath.Join(root, Version)))

			opts := small()
			for _, folder := range test.inUse {
				id, err := pinnedID(filepath.Join(root, folder, NameFrontends))
				lab.Must(t, err)
				opts.InUse = append(opts.InUse, id)
			}
			p := mustCreate(t, root, opts)
			_, own, err := p.ServicePorts.Lookup(ID(7, 1))
			lab.Must(t, err)
			_, others, err := p.ServicePorts.Lookup(ID(8, 1))
			lab.Must(t, err)
			if others != test.inherited || own == test.inherited {
				t.Errorf("ids of the own folder %t, of the other one %t; want only one of them", own, others)
			}
		})
	}
}

// Of the folders of other versions, that of the programs in force is inherited, however young those are that others have
// left; without one in force, the youngest.
func TestIDsOfTheFolderInForceAmongOthers(t *testing.T) {
	for name, test := range map[string]struct {
		inUse []string // "v1x" is the older folder, "v1y" the younger
		want  uint32
	}{
		"the older one in force":   {[]string{"v1x"}, ID(7, 1)},
		"the younger one in force": {[]string{"v1y"}, ID(8, 1)},
		"the younger one of two":   {[]string{"v1x", "v1y"}, ID(8, 1)},
		"the younger one of none":  {nil, ID(8, 1)},
	} {
		t.Run("it is "+name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			older := mustCreate(t, root, small())
			lab.Must(t, older.ServicePorts.Put(ID(7, 1), webPort), older.Close())
			lab.Must(t, os.Rename(filepath.Join(root, Version), filepath.Join(root, "aside")))
			younger := mustCreate(t, root, small())
			lab.Must(t, younger.ServicePorts.Put(ID(8, 1), webPort))
			mustBeOther(t, younger, root, "v1y")
			lab.Must(t, os.Rename(filepath.Join(root, "aside"), filepath.Join(root, "v1x")))

			opts := small()
			for _, folder := range test.inUse {
				id, err := pinnedID(filepath.Join(root, folder, NameFrontends))
				lab.Must(t, err)
				opts.InUse = append(opts.InUse, id)
			}
			p := mustCreate(t, root, opts)
			for e, err := range p.ServicePorts.All() {
				lab.Must(t, err)
				if e.Key != test.want {
					t.Errorf("service port %d is inherited, want %d", e.Key, test.want)
				}
			}
			mustHave(t, p.ServicePorts, test.want, webPort)
		})
	}
}

// A later build has longer values.
func TestLongerValues(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	mustBeOther(t, first, root, "v9")
	pin := filepath.Join(root, "v9", NameServicePorts)
	specs, err := mapSpecs()
	lab.Must(t, err)
	spec := specs[NameServicePorts]
	value := make([]byte, spec.ValueSize+8)
	copy(value, unsafe.Slice((*byte)(unsafe.Pointer(&webPort)), len(value)-8))
	spec.ValueSize, spec.Value = spec.ValueSize+8, nil
	longer, err := ebpf.NewMap(spec)
	lab.Must(t, err)
	defer longer.Close()
	lab.Must(t, os.Remove(pin), longer.Pin(pin), longer.Put(ID(7, 1), value))

	p := mustCreate(t, root, small())
	mustHave(t, p.ServicePorts, ID(7, 1), webPort)
}

// Backends and service ports have room for their counts, even if the state was lost.
func TestStateIsYounger(t *testing.T) {
	root := lab.MustBPFRoot(t)
	port := ID(uint32(abiChunkCHUNK_COUNTS)+1, 1)
	first := mustCreate(t, root, small())
	err := errors.Join(first.ServicePorts.Put(port, webPort), first.Counts.Begin(port),
		first.Backends.Put(perChunk+1, backendWeb), first.Close(), os.RemoveAll(filepath.Join(root, StateVersion)))
	lab.Must(t, err)
	p := mustCreate(t, root, small())
	p.Loads.AddFlows(backendWeb.Id, 3)
	if load := p.Loads.Load(backendWeb.Id); load.Flows != 3 {
		t.Errorf("load %+v, want 3 flows", load)
	}
	if m, _ := p.Stats.counts.place(port); m == nil {
		t.Error("there is no room to count of the service port")
	}
}

// Without the ids of the earlier agent, state would refer to other backends: it is deleted.
func TestStateWithoutIDsIsDeleted(t *testing.T) {
	for name, harm := range map[string]func(root string) error{
		"no folder": func(root string) error { return os.RemoveAll(filepath.Join(root, Version)) },
		"a folder that cannot be read": func(root string) error {
			other := filepath.Join(root, "v1")

			return errors.Join(os.Rename(filepath.Join(root, Version), other), os.Remove(filepath.Join(other, NameServicePorts)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			first := mustCreate(t, root, small())
			mustHaveState(t, first)
			lab.Must(t, first.Close(), harm(root))
			p := mustCreate(t, root, small())
			if _, ok, err := p.Flows.Lookup(flowOfWeb); ok || err != nil {
				t.Errorf("the flow is there: %v, %v", ok, err)
			}
			if b := p.Backends.Get(perChunk + 1); b != (Backend{}) {
				t.Errorf("the backend is there: %+v", b)
			}
		})
	}
}
