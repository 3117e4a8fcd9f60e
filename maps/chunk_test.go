package maps

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

const perChunk = uint32(abiChunkCHUNK_BACKENDS)

// mustLookup returns a backend as programs find it: through the outer map.
func mustLookup(t *testing.T, p *Pinned, i uint32) Backend {
	t.Helper()
	var id ebpf.MapID
	if err := p.byName[NameBackends].Lookup(i/perChunk, &id); err != nil {
		t.Fatalf("chunk %d: %v", i/perChunk, err)
	}
	chunk, err := ebpf.NewMapFromID(id)
	lab.Must(t, err)
	defer chunk.Close()
	var b Backend
	lab.Must(t, chunk.Lookup(i%perChunk, &b))

	return b
}

// Programs look up the values that are written to memory.
func TestMappedArray(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	for _, i := range []uint32{1, perChunk - 1, perChunk, 3*perChunk + 5} {
		lab.Must(t, p.Backends.Put(i, backendNo(i)))
		if got := mustLookup(t, p, i); got != backendNo(i) {
			t.Errorf("place %d: programs find %+v", i, got)
		}
	}
}

// An array that grows by hundreds of chunks at once does not leave hundreds of threads behind.
func TestGrowsWithFewThreads(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		lab.Must(t, err)

		return len(tasks)
	}
	before := threads()
	lab.Must(t, p.Counts.Reserve(4*addedAtOnce*int(abiChunkCHUNK_COUNTS)))
	if more := threads() - before; more > addedAtOnce+10 {
		t.Errorf("there are %d more threads", more)
	}
}

// The counts of programs are found in every chunk, also by another id of the place.
func TestMappedLoads(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	lab.Must(t, p.Loads.Reserve(2*int(perChunk)))
	want := map[uint32]BackendLoad{1: {Flows: 3}, 7: {Flows: -1}, perChunk + 1: {Sockets: 2}}
	for i, load := range want {
		lab.Must(t, p.chunked[NameBackendLoad].chunks[i/perChunk].Put(i%perChunk, load))
	}
	have := map[uint32]BackendLoad{}
	for i, load := range p.Loads.All() {
		have[i] = load
	}
	if diff := gocmp.Diff(want, have, gocmp.Comparer(func(a, b BackendLoad) bool { return a == b })); diff != "" {
		t.Errorf("all loads (-want +have):\n%s", diff)
	}
	p.Loads.AddFlows(ID(7, 9), 5)
	if load := p.Loads.Load(ID(7, 3)); load != (BackendLoad{Flows: 4}) {
		t.Errorf("load of 7: %+v", load)
	}
	for _, id := range []uint32{ID(5*perChunk, 0), ID(1<<24-1, 0)} {
		p.Loads.AddFlows(id, 1)
		if load := p.Loads.Load(id); load != (BackendLoad{}) {
			t.Errorf("load of a place that does not exist: %+v", load)
		}
	}
}

// Every chunk has a pin, which Pins returns and PinAgain restores.
func TestChunkPins(t *testing.T) {
	root := lab.MustBPFRoot(t)
	p := mustCreate(t, root, small())
	lab.Must(t, p.Backends.Put(perChunk, backendNo(1)))
	chunks, err := os.ReadDir(filepath.Join(root, Version, chunksFolder))
	lab.Must(t, err)
	var have []string
	for _, c := range chunks {
		have = append(have, c.Name())
		if !slices.Contains(p.Pins(), filepath.Join(root, Version, chunksFolder, c.Name())) {
			t.Errorf("%s is not among the pins", c.Name())
		}
	}
	want := []string{"backends_0", "backends_1", "frontends_0", "pools_0", "slots_0"}
	if diff := gocmp.Diff(want, have); diff != "" {
		t.Errorf("pins of chunks (-want +have):\n%s", diff)
	}
	if !slices.Contains(p.Pins(), ChunkPinOf(root, NameBackendLoad, 0)) {
		t.Errorf("no chunk of %s is among the pins", NameBackendLoad)
	}

	lab.Must(t, os.RemoveAll(root))
	again, err := p.PinAgain()
	lab.Must(t, err)
	if diff := gocmp.Diff(p.Pins(), again); diff != "" {
		t.Errorf("pinned again (-want +have):\n%s", diff)
	}
	if got := mustLookup(t, mustCreate(t, root, small()), perChunk); got != backendNo(1) {
		t.Errorf("the next agent finds %+v", got)
	}
}

// An agent that is killed can leave chunks that are pinned, but not added. The next agent adds them, and
// finds the values of the others.
func TestCreateAdoptsChunks(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	for _, i := range []uint32{1, perChunk + 1} {
		lab.Must(t, first.Backends.Put(i, backendNo(i)))
	}
	c := first.chunked[NameBackends]
	m, err := c.create(2)
	lab.Must(t, err)
	for _, err := range []error{m.Close(), c.outer.Delete(uint32(1)), first.Close()} {
		lab.Must(t, err)
	}

	p := mustCreate(t, root, small())
	if n := p.Backends.Len(); n != 3*int(perChunk) {
		t.Errorf("%d places, want %d", n, 3*perChunk)
	}
	lab.Must(t, p.Backends.Put(2*perChunk, backendNo(3)))
	for i, want := range map[uint32]Backend{
		1: backendNo(1), perChunk + 1: backendNo(perChunk + 1), 2 * perChunk: backendNo(3),
	} {
		if got := p.Backends.Get(i); got != want {
			t.Errorf("place %d: %+v, want %+v", i, got, want)
		}
		if got := mustLookup(t, p, i); got != want {
			t.Errorf("place %d: programs find %+v, want %+v", i, got, want)
		}
	}
}

// An array grows while another process has the maps open, and either can go on.
func TestGrowsBesideAnother(t *testing.T) {
	root := lab.MustBPFRoot(t)
	agent := mustCreate(t, root, small())
	reader, err := Load(root)
	lab.Must(t, err)
	defer reader.Close()
	for _, i := range []uint32{1, perChunk + 1} {
		lab.Must(t, agent.Backends.Put(i, backendNo(i)))
	}
	if got := reader.Backends.Get(1); got != backendNo(1) {
		t.Errorf("a chunk that was there: %+v", got)
	}
	if got := reader.Backends.Get(perChunk + 1); got != (Backend{}) {
		t.Errorf("a chunk that was not: %+v, want none", got)
	}
	later, err := Load(root)
	lab.Must(t, err)
	defer later.Close()
	if got := later.Backends.Get(perChunk + 1); got != backendNo(perChunk+1) {
		t.Errorf("one that opens the maps now finds %+v", got)
	}

	// A process opens a missing chunk that the other one has added.
	lab.Must(t, reader.Backends.Put(perChunk+2, backendNo(2)))
	for what, p := range map[string]*Pinned{"the one": agent, "the other": reader} {
		if p.Backends.Get(perChunk+1) != backendNo(perChunk+1) || p.Backends.Get(perChunk+2) != backendNo(2) {
			t.Errorf("%s has %+v and %+v", what, p.Backends.Get(perChunk+1), p.Backends.Get(perChunk+2))
		}
	}
	if got := mustLookup(t, agent, perChunk+2); got != backendNo(2) {
		t.Errorf("programs find %+v", got)
	}
}

// Two processes that make a chunk at the same time get the same one.
func TestCreatesBesideAnother(t *testing.T) {
	root := lab.MustBPFRoot(t)
	one := mustCreate(t, root, small())
	c := one.chunked[NameBackends]
	var made [2]*ebpf.Map
	var ids [2]ebpf.MapID
	for i := range made {
		var err error
		if made[i], err = c.create(1); err != nil {
			t.Fatal(err)
		}
		defer made[i].Close()
		info, err := made[i].Info()
		lab.Must(t, err)
		ids[i], _ = info.ID()
	}
	if ids[0] != ids[1] {
		t.Errorf("two maps for one chunk: %v", ids)
	}
}

// A reader makes no chunks.
func TestLoadCreatesNothing(t *testing.T) {
	root := lab.MustBPFRoot(t)
	mustCreate(t, root, small())
	lab.Must(t, os.RemoveAll(filepath.Join(root, Version, chunksFolder)))
	p, err := Load(root)
	lab.Must(t, err)
	defer p.Close()
	if n := p.Backends.Len(); n != 0 || p.Backends.Get(1) != (Backend{}) {
		t.Errorf("%d places, and %+v", n, p.Backends.Get(1))
	}
	if _, err := os.Stat(filepath.Join(root, Version, chunksFolder)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a folder of chunks: %v", err)
	}
}

// A chunk of another layout is not adopted, and nothing is changed.
func TestStaleChunk(t *testing.T) {
	for name, change := range map[string]func(*ebpf.MapSpec){
		"with other values": func(s *ebpf.MapSpec) { s.ValueSize, s.Value = 80, nil },
		"of another size":   func(s *ebpf.MapSpec) { s.MaxEntries *= 2 },
	} {
		t.Run(name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			specs, err := mapSpecs()
			lab.Must(t, err)
			dir := filepath.Join(root, Version)
			c := &chunked{name: NamePools, inner: specs[NamePools].InnerMap.Copy(), dir: dir}
			change(c.inner)
			for _, err := range []error{os.MkdirAll(dir, 0o700), c.pinOuter(specs[NamePools].Copy())} {
				lab.Must(t, err)
			}
			m, err := c.create(0)
			lab.Must(t, err)
			defer m.Close()
			if _, err := Create(root, small()); !errors.Is(err, ErrStale) || !strings.Contains(err.Error(), "chunk 0") {
				t.Errorf("create: %v, want %v of chunk 0", err, ErrStale)
			}
			pins, err := os.ReadDir(dir)
			if err != nil || len(pins) != 2 {
				t.Errorf("%v, %v; want nothing changed", pins, err)
			}
		})
	}
}

// pinOuter pins an empty array of such chunks.
func (c *chunked) pinOuter(spec *ebpf.MapSpec) error {
	spec.InnerMap = c.inner
	m, err := create(c.dir, c.name, spec)
	if err != nil {
		return err
	}

	return m.Close()
}

// WaitForPrograms returns when a running program has ended, and does not change the maps.
func TestWaitForPrograms(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	err := features.HaveProgramHelper(ebpf.SocketFilter, asm.FnLoop)
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("no program can run for long: %v", err)
	}
	lab.Must(t, err)
	lab.Must(t, p.Frontends.Put(1, webFrontend))
	run := mustLongProgram(t)
	for range 3 {
		began, ended := run()
		for !began() {
		}
		lab.Must(t, p.WaitForPrograms())
		if !ended() {
			t.Error("the program runs still")
		}
	}
	if got := p.Frontends.Get(1); got != webFrontend {
		t.Errorf("frontend 1: %+v", got)
	}
}

// mustLongProgram returns a function that starts a program which runs for some time, and reports whether it has
// started and ended.
func mustLongProgram(t *testing.T) func() (began, ended func() bool) {
	t.Helper()
	words, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2})
	lab.Must(t, err)
	t.Cleanup(func() { words.Close() })
	i32 := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	u32 := &btf.Int{Name: "u32", Size: 4}
	proto := func(params ...btf.FuncParam) *btf.FuncProto { return &btf.FuncProto{Return: i32, Params: params} }
	main := btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0).WithSymbol("main"), &btf.Func{
		Name: "main", Linkage: btf.GlobalFunc, Type: proto(btf.FuncParam{Name: "ctx", Type: &btf.Pointer{Target: &btf.Void{}}}),
	})
	again := btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0).WithSymbol("again"), &btf.Func{
		Name: "again", Linkage: btf.StaticFunc,
		Type: proto(btf.FuncParam{Name: "i", Type: u32}, btf.FuncParam{Name: "ctx", Type: &btf.Pointer{Target: &btf.Void{}}}),
	})
	say := func(word int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Imm(asm.R1, word), asm.StoreMem(asm.R10, -4, asm.R1, asm.Word),
			asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.R10, -16, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, words.FD()),
			asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, -4),
			asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -16),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
		}
	}
	instructions := slices.Concat(asm.Instructions{main}, say(0), asm.Instructions{
		asm.Mov.Imm(asm.R1, 1<<23),
		asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}.WithReference("again"),
		asm.Mov.Imm(asm.R3, 0), asm.Mov.Imm(asm.R4, 0),
		asm.FnLoop.Call(),
	}, say(1), asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return(), again, asm.Return()})
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "GPL", Instructions: instructions})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { program.Close() })
	said := func(word uint32) bool {
		var one uint64

		return words.Lookup(word, &one) == nil && one == 1
	}

	return func() (began, ended func() bool) {
		lab.Must(t, words.Put(uint32(0), uint64(0)), words.Put(uint32(1), uint64(0)))
		done := make(chan error, 1)
		go func() {
			_, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 14)})
			done <- err
		}()
		t.Cleanup(func() { lab.Must(t, <-done) })

		return func() bool { return said(0) }, func() bool { return said(1) }
	}
}
