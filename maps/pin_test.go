package maps

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// small limits the capacities of maps in tests.
func small() Options {
	return Options{Capacities: map[string]uint32{
		NameFrontendIDs: 16, NameServicePorts: 16, NameRefusals: 64, NameAffinity: 16, NameUDPPins: 16,
	}}
}

func mustCreate(t *testing.T, root string, opts Options) *Pinned {
	t.Helper()
	p, err := Create(root, opts)
	lab.Must(t, err)
	t.Cleanup(func() { p.Close() })

	return p
}

var (
	web         = FrontendKeyOf(netip.MustParseAddr("10.96.0.1"), 80, 6, ScopeInternal)
	webFrontend = Frontend{Key: web, PoolId: 5, Kind: KindClusterIP}
	webPool     = Pool{SlotBase: 3, SlotCount: 2, ServicePortId: ID(7, 1)}
)

// The library asks for SYS_RESOURCE where a process lacks SYS_ADMIN. Only old kernels have the limit that it lifts.
func TestExplainMemlock(t *testing.T) {
	for version, want := range map[uint32]string{5<<16 | 10<<8: "SYS_RESOURCE", linux5_11: "which takes SYS_ADMIN", 6<<16 | 18<<8: "which takes SYS_ADMIN"} {
		err := explainMemlock(unix.EPERM, version)
		if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), want) || want != "SYS_RESOURCE" && strings.Contains(err.Error(), "SYS_RESOURCE") {
			t.Errorf("on Linux %#x: %v, want one that names %s only", version, err, want)
		}
	}
}

// Who looks at a node without an agent learns from the pins since when there is none.
func TestHeartbeat(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	if at := first.Heartbeat.LastBeat(); !at.IsZero() {
		t.Errorf("no agent has run, but one at %v", at)
	}
	first.Heartbeat.Beat()
	before := time.Now()
	lab.Must(t, first.Close())
	time.Sleep(50 * time.Millisecond)
	later, err := Load(root)
	lab.Must(t, err)
	defer later.Close()
	if d := before.Sub(later.Heartbeat.LastBeat()); d < -10*time.Millisecond || d > 10*time.Millisecond {
		t.Errorf("the last beat is %v off", d)
	}

	lab.Must(t, os.Remove(PinOf(root, NameHeartbeat)))
	without, err := Load(root)
	if err != nil {
		t.Fatalf("maps of an agent without a heartbeat: %v", err)
	}
	defer without.Close()
	if at := without.Heartbeat.LastBeat(); !at.IsZero() {
		t.Errorf("without a heartbeat an agent last ran at %v, want it unknown", at)
	}
}

func TestCreateAdopts(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	err := errors.Join(first.FrontendIDs.Put(web, 9), first.Frontends.Put(9, webFrontend),
		first.Pools.Put(5, webPool), first.Slots.Put(3, 99), first.Close())
	lab.Must(t, err)

	for name, open := range map[string]func() (*Pinned, error){
		"Create":                       func() (*Pinned, error) { return Create(root, small()) },
		"Create with other capacities": func() (*Pinned, error) { return Create(root, Options{}) },
		"Load":                         func() (*Pinned, error) { return Load(root) },
	} {
		t.Run("complete after "+name, func(t *testing.T) {
			p, err := open()
			lab.Must(t, err)
			defer p.Close()
			if got, ok, err := p.FrontendIDs.Lookup(web); got != 9 || !ok || err != nil {
				t.Errorf("frontend id %v, %v, %v, want 9", got, ok, err)
			}
			if got := p.Frontends.Get(9); got != webFrontend {
				t.Errorf("frontend %v, want %v", got, webFrontend)
			}
			if got := p.Pools.Get(5); got != webPool {
				t.Errorf("pool %v, want %v", got, webPool)
			}
			if id := p.Slots.Get(3); id != 99 {
				t.Errorf("slot 3: %d, want 99", id)
			}
			if n := p.byName[NameFrontendIDs].MaxEntries(); n != 16 {
				t.Errorf("room for %d frontends, want the 16 it was created with", n)
			}
		})
	}
}

// No one but root reaches the pins, and no program can write to a hash map that the agent fills.
func TestMapsAreForRoot(t *testing.T) {
	root := lab.MustBPFRoot(t)
	p := mustCreate(t, root, small())
	defer p.Close()
	folders, err := filepath.Glob(filepath.Join(root, "*"))
	lab.Must(t, err)
	for _, folder := range folders {
		found, err := os.Stat(folder)
		lab.Must(t, err)
		if mode := found.Mode().Perm(); found.IsDir() && mode != 0o700 {
			t.Errorf("%s has the mode %o", folder, mode)
		}
	}
	if len(folders) == 0 {
		t.Error("there are no folders")
	}
	for _, name := range []string{
		NameFrontendIDs, NameServicePorts, NameAddrs, NameDevices, NameSourceRanges, NameServiceCIDRs, NameLocalCIDRs, NameOptedOut,
	} {
		_, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SchedCLS, License: "GPL",
			Instructions: asm.Instructions{
				asm.Mov.Imm(asm.R3, 0),
				asm.StoreMem(asm.RFP, -8, asm.R3, asm.DWord), asm.StoreMem(asm.RFP, -16, asm.R3, asm.DWord),
				asm.StoreMem(asm.RFP, -24, asm.R3, asm.DWord), asm.StoreMem(asm.RFP, -32, asm.R3, asm.DWord),
				asm.StoreMem(asm.RFP, -40, asm.R3, asm.DWord),
				asm.LoadMapPtr(asm.R1, p.byName[name].FD()),
				asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -40),
				asm.FnMapDeleteElem.Call(), asm.Mov.Imm(asm.R0, 0), asm.Return(),
			},
		})
		if !errors.Is(err, unix.EACCES) || !strings.Contains(err.Error(), "write into map forbidden") {
			t.Errorf("a program that deletes from %s: %v", name, err)
		}
	}
}

func TestCapacities(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	if n := p.byName[NameFrontendIDs].MaxEntries(); n != 16 {
		t.Errorf("room for %d frontends, want 16", n)
	}
	if n := p.byName[NameAddrs].MaxEntries(); n != 262144 {
		t.Errorf("room for %d node addresses, want the 262144 of maps.h", n)
	}
	few := mustCreate(t, lab.MustBPFRoot(t), Options{Capacities: map[string]uint32{NameSlots: 2}})
	if n := few.Slots.Limit(); n != 2*int(abiChunkCHUNK_SLOTS) {
		t.Errorf("room for %d slots, want 2 chunks", n)
	}
	if err := few.Slots.Put(2*uint32(abiChunkCHUNK_SLOTS), 1); !errors.Is(err, ErrFull) {
		t.Errorf("a slot in the third chunk: %v, want %v", err, ErrFull)
	}
	_, err := Create(lab.MustBPFRoot(t), Options{Capacities: map[string]uint32{"frontend": 1}})
	if err == nil || !strings.Contains(err.Error(), `"frontend"`) {
		t.Errorf("capacity of a map that is not there: %v", err)
	}
}

func TestLoadWithoutPins(t *testing.T) {
	root := lab.MustBPFRoot(t)
	if _, err := Load(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without any pin: %v, want %v", err, fs.ErrNotExist)
	}
	mustCreate(t, root, small())
	lab.Must(t, os.Remove(PinOf(root, NameReasons)))
	if _, err := Load(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without one pin: %v, want %v", err, fs.ErrNotExist)
	}
}

func TestStalePins(t *testing.T) {
	for name, change := range map[string]func(*ebpf.MapSpec){
		"of another type":       func(s *ebpf.MapSpec) { s.Type, s.Flags = ebpf.LRUHash, 0 },
		"with other keys":       func(s *ebpf.MapSpec) { s.KeySize, s.Key = 8, nil },
		"with other values":     func(s *ebpf.MapSpec) { s.ValueSize, s.Value = 80, nil },
		"with other protection": func(s *ebpf.MapSpec) { s.Flags &^= 1 << 7 },
	} {
		t.Run(name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			specs, err := mapSpecs()
			lab.Must(t, err)
			spec := specs[NameServicePorts]
			change(spec)
			dir := filepath.Join(root, Version)
			lab.Must(t, os.MkdirAll(dir, 0o700))
			m, err := create(dir, NameServicePorts, spec)
			lab.Must(t, err)
			defer m.Close()

			if _, err := Create(root, small()); !errors.Is(err, ErrStale) {
				t.Errorf("create: %v, want %v", err, ErrStale)
			}
			if _, err := Load(root); err == nil {
				t.Error("load: no error")
			}
			pins, err := os.ReadDir(dir)
			if err != nil || len(pins) != 1 {
				t.Errorf("%v, %v; want nothing changed", pins, err)
			}
		})
	}
}
