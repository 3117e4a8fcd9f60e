package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustBeOtherState makes p's state that of another version, and closes p.
func mustBeOtherState(t *testing.T, p *Pinned, root string) string {
	t.Helper()
	other := filepath.Join(root, "state-v0")
	lab.Must(t, p.Close(), os.Rename(filepath.Join(root, StateVersion), other))

	return other
}

func mustID(t *testing.T, p *Pinned, name string) ebpf.MapID {
	t.Helper()
	id, err := p.ID(name)
	lab.Must(t, err)

	return id
}

// bytesOf returns the first bytes of a value.
func bytesOf[V any](v V, n uint32) []byte {
	value := make([]byte, n)
	copy(value, unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)))

	return value
}

// mustReplace puts a hash map with longer or shorter values in the place of a pinned one.
func mustReplace(t *testing.T, folder, name string, more int) *ebpf.Map {
	t.Helper()
	specs, err := mapSpecs()
	lab.Must(t, err)
	spec := specs[name]
	spec.ValueSize, spec.Value = uint32(int(spec.ValueSize)+more), nil
	if spec.Type == ebpf.SkStorage { // the kernel compares those with their BTF
		spec.Type, spec.MaxEntries, spec.Flags = ebpf.Hash, 16, 0
	}
	m, err := ebpf.NewMap(spec)
	lab.Must(t, err)
	t.Cleanup(func() { m.Close() })
	pin := filepath.Join(folder, name)
	again, err := m.Clone()
	lab.Must(t, err)
	lab.Must(t, os.Remove(pin), again.Pin(pin), again.Close())

	return m
}

// Builds with different versions of the state share the maps with the same layout.
func TestStateIsShared(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	ids := make(map[string]ebpf.MapID)
	for _, name := range stateNames {
		ids[name] = mustID(t, first, name)
	}
	pins := first.Pins()
	other := mustBeOtherState(t, first, root)

	p := mustCreate(t, root, small())
	for _, name := range stateNames {
		if id := mustID(t, p, name); id != ids[name] {
			t.Errorf("map %s is number %d, and was %d", name, id, ids[name])
		}
	}
	mustHave(t, p.Flows, flowOfWeb, Flow{BackendId: backendWeb.Id})
	if load := p.Loads.Load(backendWeb.Id); load.Flows != 3 {
		t.Errorf("load %+v, want 3 flows", load)
	}
	if again := p.Pins(); !slices.Equal(pins, again) {
		t.Errorf("pins\n%v, were\n%v", again, pins)
	}
	lab.Must(t, p.EndInheriting())
	if _, err := os.Stat(other); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of the other version: %v", err)
	}
	mustHave(t, p.Flows, flowOfWeb, Flow{BackendId: backendWeb.Id})
}

// Maps of both versions exist, and programs use those of the other one: what they have written counts.
func TestStateInForce(t *testing.T) {
	for _, inForce := range []bool{true, false} {
		t.Run(fmt.Sprintf("it is the other one: %t", inForce), func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			first := mustCreate(t, root, small())
			other := filepath.Join(root, "state-v9")
			lab.Must(t, first.Flows.Put(flowOfWeb, Flow{BackendId: 1}), first.Close(), os.MkdirAll(other, 0o700))
			pin := filepath.Join(other, NameFlows)
			lab.Must(t, os.Rename(PinOf(root, NameFlows), pin))
			theirs := mustReplace(t, other, NameFlows, 8)
			lab.Must(t, theirs.Put(flowOfWeb, bytesOf(Flow{BackendId: 7}, theirs.ValueSize())))
			own := mustCreate(t, root, small())
			lab.Must(t, own.Flows.Put(flowOfWeb, Flow{BackendId: 1}))
			opts := small()
			if inForce {
				id, err := pinnedID(pin)
				lab.Must(t, err)
				opts.InUse = []ebpf.MapID{id}
			}
			lab.Must(t, own.Close())
			want := map[bool]Flow{true: {BackendId: 7}, false: {BackendId: 1}}[inForce]
			mustHave(t, mustCreate(t, root, opts).Flows, flowOfWeb, want)
		})
	}
}

// The folder of this version is missing, and there are two others: that of the programs in force is inherited, though one
// that a build has left which attached nothing is younger. Both share the maps whose layout is the same.
func TestStateInForceAmongOthers(t *testing.T) {
	for name, test := range map[string]struct {
		inUse func(older, younger *ebpf.Map) *ebpf.Map
		want  Flow
	}{
		"the older one in force":   {func(older, _ *ebpf.Map) *ebpf.Map { return older }, Flow{BackendId: 7}},
		"the younger one in force": {func(_, younger *ebpf.Map) *ebpf.Map { return younger }, Flow{BackendId: 8}},
		"the younger one of none":  {nil, Flow{BackendId: 8}},
	} {
		t.Run("it is "+name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			first := mustCreate(t, root, small())
			older, younger := filepath.Join(root, "state-v0"), filepath.Join(root, "state-v9")
			lab.Must(t, first.Close(), os.Rename(filepath.Join(root, StateVersion), older))
			lab.Must(t, mustCreate(t, root, small()).Close(), os.Rename(filepath.Join(root, StateVersion), younger))
			flows := make(map[string]*ebpf.Map)
			for folder, backend := range map[string]uint32{older: 7, younger: 8} {
				flows[folder] = mustReplace(t, folder, NameFlows, 8)
				lab.Must(t, flows[folder].Put(flowOfWeb, bytesOf(Flow{BackendId: backend}, flows[folder].ValueSize())))
			}
			now := time.Now()
			lab.Must(t, os.Chtimes(filepath.Join(older, NameFlows), now, now.Add(-time.Minute)))

			opts := small()
			if test.inUse != nil {
				shared, err := pinnedID(filepath.Join(younger, NameAffinity))
				lab.Must(t, err)
				info, err := test.inUse(flows[older], flows[younger]).Info()
				lab.Must(t, err)
				id, _ := info.ID()
				opts.InUse = []ebpf.MapID{shared, id}
			}
			mustHave(t, mustCreate(t, root, opts).Flows, flowOfWeb, test.want)
		})
	}
}

// If values have become longer or shorter, entries are copied, including those that programs of the other
// version add as long as they are attached.
func TestStateIsCopied(t *testing.T) {
	whole := Flow{BackendId: 7, Created: 8, LastSeen: 9, Bytes: 10}
	for name, test := range map[string]struct {
		more int
		want Flow
	}{
		"longer before":  {16, whole},
		"shorter before": {-16, Flow{BackendId: 7, Created: 8, LastSeen: 9}}, // reserved and bytes
	} {
		t.Run(name, func(t *testing.T) {
			root := lab.MustBPFRoot(t)
			first := mustCreate(t, root, small())
			mustHaveState(t, first)
			sockState := mustID(t, first, NameSockState)
			other := mustBeOtherState(t, first, root)
			old := mustReplace(t, other, NameFlows, test.more)
			put := func(port uint16) FlowKey {
				key := flowOfWeb
				key.SrcPort = port
				lab.Must(t, old.Put(bytesOf(key, old.KeySize()), bytesOf(whole, old.ValueSize())))

				return key
			}
			before := put(1)

			p := mustCreate(t, root, small())
			if id := mustID(t, p, NameSockState); id != sockState {
				t.Errorf("the state of sockets is map %d, was %d", id, sockState)
			}
			mustHave(t, p.Flows, before, test.want)
			ours := Flow{BackendId: 7, Bytes: 99}
			lab.Must(t, p.Flows.Put(before, ours))
			later := put(2)
			if err := p.Close(); err != nil { // killed, and started again
				t.Fatal(err)
			}
			p = mustCreate(t, root, small())
			mustHave(t, p.Flows, before, ours)
			mustHave(t, p.Flows, later, test.want)
			// A flow that has ended stays away, however often the devices of the other version are tried.
			ended := put(5)
			lab.Must(t, p.CopyState())
			mustHave(t, p.Flows, ended, test.want)
			lab.Must(t, p.Flows.Delete(ended), p.Flows.Delete(later))
			lab.Must(t, p.CopyState())
			for _, key := range []FlowKey{ended, later} {
				if _, found, err := p.Flows.Lookup(key); err != nil || found {
					t.Errorf("a flow from port %d that has ended is there again: %v, %v", key.SrcPort, found, err)
				}
			}
			// One that those devices go on using is there again.
			whole.LastSeen++
			used := put(5)
			lab.Must(t, p.CopyState())
			if _, found, err := p.Flows.Lookup(used); err != nil || !found {
				t.Errorf("a flow that programs of the other version use is not there: %v", err)
			}
			whole.LastSeen--
			last := put(3)
			p.SourceFilter.Begin(uint64(1 << 60)).End() // a sweep that does not know of the last one
			lab.Must(t, p.EndInheriting())
			if !p.SourceFilter.May(FlowKeyOf(HookEgress, 6, last.Destination(), last.Source())) {
				t.Error("replies to a flow that was copied are kept out")
			}
			mustHave(t, p.Flows, last, test.want)
			mustHave(t, p.Flows, before, ours)
			if _, err := os.Stat(other); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the folder of the other version: %v", err)
			}
			put(4) // not copied any more
			if err := p.CopyState(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Entries of another version for which there is no room are left behind until there is, told once, and keep nothing from
// starting. The counts of all service ports have room.
func TestStateWithoutRoom(t *testing.T) {
	root := lab.MustBPFRoot(t)
	other := mustBeOtherState(t, mustCreate(t, root, small()), root)
	old := mustReplace(t, other, NameRefusals, 8)
	for port := range uint32(40) {
		lab.Must(t, old.Put(bytesOf(RefusalKey{ServicePortId: port + 1}, old.KeySize()), make([]byte, old.ValueSize())))
	}
	ofAll := RefusalKey{ServicePortId: AllServicePorts, Reason: uint32(ReasonRejectNoBackend)}
	lab.Must(t, old.Put(bytesOf(ofAll, old.KeySize()), bytesOf(uint64(7), old.ValueSize())))
	p := mustCreate(t, root, small())
	room := p.Stats.Capacity() - (int(reasonCount) - 2) // beside those of AllServicePorts
	want := fmt.Sprintf("map refusals is full: %d entries of another version are left behind", 40-room)
	if left := p.LeftBehind(); len(left) != 1 || left[0] != want {
		t.Errorf("of 40 entries in a map with room for %d: %q, want %q", room, left, want)
	}
	mustHave(t, p.Stats.refusals, ofAll, 7)
	lab.Must(t, p.CopyState())
	if left := p.LeftBehind(); left != nil {
		t.Errorf("it is told again: %q", left)
	}
	have := func() (ports []uint32) {
		for e, err := range p.Stats.refusals.All() {
			lab.Must(t, err)
			if e.Key.ServicePortId != AllServicePorts {
				ports = append(ports, e.Key.ServicePortId)
			}
		}

		return ports
	}
	ended := have()[:3]
	for _, port := range ended {
		lab.Must(t, p.Stats.refusals.Delete(RefusalKey{ServicePortId: port}))
	}
	lab.Must(t, p.CopyState())
	if now := have(); len(now) != room || slices.ContainsFunc(now, func(port uint32) bool { return slices.Contains(ended, port) }) {
		t.Errorf("when %v have ended, there are %v, want %d others", ended, now, room)
	}
	lab.Must(t, p.EndInheriting())
}

// After a build whose programs do not write the filters, everything passes them.
func TestStateWithoutFilters(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	other := mustBeOtherState(t, first, root)
	for _, name := range filterNames {
		lab.Must(t, os.Remove(filepath.Join(other, name)))
	}
	source := FlowKeyOf(HookEgress, 6, netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("192.0.2.1:1"))
	mustPass := func(p *Pinned, what string, want bool) {
		t.Helper()
		if p.SourceFilter.May(source) != want || p.PortFilter.May(4711) != want {
			t.Errorf("%s: sources pass is %v, ports %v; want %v", what, p.SourceFilter.May(source), p.PortFilter.May(4711), want)
		}
	}
	p := mustCreate(t, root, small())
	mustPass(p, "beside the other build", true)
	p.SourceFilter.Begin(uint64(1 << 60)).End() // a sweep that found no flow
	lab.Must(t, p.EndInheriting())
	mustPass(p, "after the last program of the other build has gone", true)

	fresh := mustCreate(t, lab.MustBPFRoot(t), small())
	mustPass(fresh, "without another build", false)
}

// Socket storage cannot be copied: a build that would lose it does not start.
func TestSocketStateIsFrozen(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	mustHaveState(t, first)
	other := mustBeOtherState(t, first, root)
	mustReplace(t, other, NameSockState, 8)
	if p, err := Create(root, small()); !errors.Is(err, ErrStale) {
		p.Close()
		t.Errorf("%v, want %v", err, ErrStale)
	}
	for _, folder := range []string{StateVersion, asidePrefix + StateVersion} {
		if _, err := os.Stat(filepath.Join(root, folder)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("folder %s: %v", folder, err)
		}
	}
	if _, err := os.Stat(filepath.Join(other, NameFlows)); err != nil {
		t.Errorf("flows of the other version: %v", err)
	}
}
