package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
)

// Version names the layout of everything below it in the pin path. It changes
// whenever a type or a map in types.h or maps.h does.
const Version = "v2"

// ErrStale is returned when a pinned map has another layout than this build.
var ErrStale = errors.New("pinned map has another layout")

// prefix starts the kernel name of every map; pins go without.
const prefix = "sl_"

// Pinned are the maps in the kernel, pinned below a bpffs directory. They
// outlive the process that made them.
type Pinned struct {
	Tables
	Affinity *Map[AffinityKey, Affinity]
	UDPPins  *Map[UDPPinKey, UDPPin]
	// Flows and HalfOpen are what devices translate.
	Flows     *Map[FlowKey, Flow]
	HalfOpen  *Map[FlowKey, Flow]
	EgressUse *EgressUse
	Stats     *Stats

	chunked map[string]*chunked
	dir     string
	byName  map[string]*ebpf.Map
	counted []countable
}

// Options are the choices that [Create] leaves open.
type Options struct {
	// Capacities overrides how many entries a map has room for, by the name
	// of its pin; for arrays that grow, how many chunks. It only counts for maps that
	// are not there yet.
	Capacities map[string]uint32
}

// Create adopts the maps that are pinned below root (in the folder of this
// [Version]) and creates and pins those that are not. It returns an error
// wrapping [ErrStale] if a pinned map has another layout; nothing is changed
// then. The caller closes the result, which leaves the pins.
func Create(root string, opts Options) (*Pinned, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("limit of locked memory, which maps count against before Linux 5.11, and which takes SYS_RESOURCE: %w", err)
	}
	specs, err := mapSpecs()
	if err != nil {
		return nil, err
	}
	for name := range opts.Capacities {
		if specs[name] == nil {
			return nil, fmt.Errorf("capacity of map %q: there is no such map", name)
		}
	}
	dir := filepath.Join(root, Version)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("pin directory: %w", err)
	}
	if err := checkPins(dir, specs); err != nil {
		return nil, err
	}

	return open(dir, specs, 1, func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		m, err := adopt(dir, name, spec)
		if !errors.Is(err, fs.ErrNotExist) {
			return m, err
		}
		if n, ok := opts.Capacities[name]; ok {
			spec.MaxEntries = n
		}

		return create(dir, name, spec)
	})
}

// checkPins returns an error if a pinned map cannot be adopted.
func checkPins(dir string, specs map[string]*ebpf.MapSpec) error {
	for name, spec := range specs {
		m, err := adopt(dir, name, spec)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		m.Close()
		if spec.InnerMap == nil {
			continue
		}
		c := &chunked{name: name, inner: spec.InnerMap, dir: dir}
		if err := errors.Join(c.openPinned(), c.close()); err != nil {
			return err
		}
	}

	return nil
}

// Load opens the maps that an agent has pinned below root. It returns an
// error wrapping [fs.ErrNotExist] if one is not there, and [ErrStale] if one
// has another layout. The caller closes the result.
func Load(root string) (*Pinned, error) {
	specs, err := mapSpecs()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(root, Version)

	return open(dir, specs, 0, func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		return adopt(dir, name, spec)
	})
}

// mapSpecs returns the specification of every map by the name of its pin.
func mapSpecs() (map[string]*ebpf.MapSpec, error) {
	abi, err := loadAbi()
	if err != nil {
		return nil, fmt.Errorf("embedded maps: %w", err)
	}
	specs := make(map[string]*ebpf.MapSpec)
	for name, spec := range abi.Maps {
		if pin, ok := strings.CutPrefix(name, prefix); ok {
			specs[pin] = spec
		}
	}

	return specs, nil
}

// open returns the maps that get returns, of which arrays have so many chunks at least.
func open(dir string, specs map[string]*ebpf.MapSpec, chunks int, get func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*Pinned, error) {
	p := &Pinned{dir: dir, byName: make(map[string]*ebpf.Map, len(specs)), chunked: make(map[string]*chunked)}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		m, err := get(name, specs[name])
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.byName[name] = m
		if inner := specs[name].InnerMap; inner != nil {
			p.chunked[name] = &chunked{name: name, outer: m, inner: inner, dir: dir}
			if err := p.chunked[name].adopt(); err != nil {
				return nil, errors.Join(err, p.Close())
			}
		}
	}
	var err error
	if p.EgressUse, err = mapEgressUse(p.byName[NameEgressUse]); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	if p.AddrFilter, err = mapAddrFilter(p.byName[NameAddrFilter]); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	if err := p.mapArrays(chunks); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.FrontendIDs = table[FrontendKey, uint32](p, NameFrontendIDs)
	servicePorts := table[uint32, ServicePort](p, NameServicePorts)
	p.ServicePorts = servicePorts
	p.Addrs = table[Addr, AddrUse](p, NameAddrs)
	p.SourceRanges = table[SourceRangeKey, uint32](p, NameSourceRanges)
	p.ServiceCIDRs = table[CIDRKey, uint32](p, NameServiceCIDRs)
	p.LocalCIDRs = table[CIDRKey, uint32](p, NameLocalCIDRs)
	p.Devices = table[uint32, Device](p, NameDevices)
	p.Stats = &Stats{
		counts: p.chunked[NamePortCounts], refusals: table[RefusalKey, uint64](p, NameRefusals), ports: servicePorts,
	}
	p.Counts = p.Stats
	p.Affinity = table[AffinityKey, Affinity](p, NameAffinity)
	p.UDPPins = table[UDPPinKey, UDPPin](p, NameUDPPins)
	p.Flows = table[FlowKey, Flow](p, NameFlows)
	p.HalfOpen = table[FlowKey, Flow](p, NameHalfOpen)

	return p, nil
}

// mapArrays brings the arrays into this process' memory.
func (p *Pinned) mapArrays(chunks int) error {
	var errs [5]error
	p.Frontends, errs[0] = mapArray[Frontend](p.chunked[NameFrontends], chunks)
	p.Pools, errs[1] = mapArray[Pool](p.chunked[NamePools], chunks)
	p.Slots, errs[2] = mapArray[uint32](p.chunked[NameSlots], chunks)
	p.Backends, errs[3] = mapArray[Backend](p.chunked[NameBackends], chunks)
	p.Loads.Array, errs[4] = mapArray[BackendLoad](p.chunked[NameBackendLoad], chunks)

	return errors.Join(errs[:]...)
}

// WaitForPrograms returns when every program has ended that was running before: what was
// taken out of the maps before the call, no program knows any more. It takes some 10 ms as
// a rule, and seconds on a busy machine.
func (p *Pinned) WaitForPrograms() error { return p.chunked[NameFrontends].wait() }

func table[K comparable, V any](p *Pinned, name string) *Map[K, V] {
	t := &Map[K, V]{name: name, m: p.byName[name]}
	p.counted = append(p.counted, t)

	return t
}

// adopt opens the pin of a map and checks that its layout is that of spec.
// How many entries it has room for may differ.
func adopt(dir, name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	path := filepath.Join(dir, name)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("pinned map %s: %w", path, err)
	}
	if err := sameLayout(m, spec); err != nil {
		return nil, errors.Join(fmt.Errorf("pinned map %s: %w", path, err), m.Close())
	}

	return m, nil
}

// sameLayout returns an error wrapping [ErrStale] if m is not as spec has it, but for how
// many entries it has room for.
func sameLayout(m *ebpf.Map, spec *ebpf.MapSpec) error {
	have := fmt.Sprintf("%s, key %d bytes, value %d bytes, flags %#x", m.Type(), m.KeySize(), m.ValueSize(), m.Flags())
	want := fmt.Sprintf("%s, key %d bytes, value %d bytes, flags %#x", spec.Type, spec.KeySize, spec.ValueSize, spec.Flags)
	if have != want {
		return fmt.Errorf("%w: it is %s; this build has %s", ErrStale, have, want)
	}

	return nil
}

func create(dir, name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", name, err)
	}
	if err := m.Pin(filepath.Join(dir, name)); err != nil {
		m.Close()

		return nil, fmt.Errorf("map %s: pin: %w", name, err)
	}

	return m, nil
}

// Replacements returns the maps by their names in C, for loading programs
// that share them. The maps stay owned by p.
func (p *Pinned) Replacements() map[string]*ebpf.Map {
	replacements := make(map[string]*ebpf.Map, len(p.byName))
	for name, m := range p.byName {
		replacements[prefix+name] = m
	}

	return replacements
}

// Fill is how full a map is.
type Fill struct {
	Name     string
	Entries  int
	Capacity int
}

// Size is how large a map is.
type Size struct {
	Name    string // of its pin
	Entries uint32 // that it has room for now
	Bytes   uint64 // that it takes now, by the kernel's word: some only take what is in use
}

// Sizes returns the sizes of all maps, with their chunks, sorted by name.
func (p *Pinned) Sizes() ([]Size, error) {
	var sizes []Size
	for name, m := range p.byName {
		size := Size{Name: name, Entries: m.MaxEntries()}
		all := []*ebpf.Map{m}
		if c := p.chunked[name]; c != nil {
			size.Entries = 0
			for i := 0; c.have(i) != nil; i++ {
				all = append(all, c.have(i))
				size.Entries += c.have(i).MaxEntries()
			}
		}
		for _, m := range all {
			info, err := m.Info()
			if err != nil {
				return nil, fmt.Errorf("map %s: %w", name, err)
			}
			bytes, _ := info.Memlock()
			size.Bytes += bytes
		}
		sizes = append(sizes, size)
	}
	slices.SortFunc(sizes, func(a, b Size) int { return strings.Compare(a.Name, b.Name) })

	return sizes, nil
}

// Fills counts the entries of every hash map and trie, and the backends, sorted by name.
// It reads all of them, so it is for people who ask and not for every second.
func (p *Pinned) Fills() ([]Fill, error) {
	var fills []Fill
	for _, t := range p.counted {
		n, err := t.count()
		if err != nil {
			return nil, err
		}
		fills = append(fills, Fill{Name: t.Name(), Entries: n, Capacity: t.Capacity()})
	}
	backends := 0
	for _, b := range p.Backends.All() {
		if b.Id != 0 {
			backends++
		}
	}
	fills = append(fills, Fill{Name: NameBackends, Entries: backends, Capacity: p.Backends.Limit()})
	slices.SortFunc(fills, func(a, b Fill) int { return strings.Compare(a.Name, b.Name) })

	return fills, nil
}

// countable is a [Map] of any types.
type countable interface {
	Name() string
	Capacity() int
	count() (int, error)
}

// ID returns the kernel's number of a map.
func (p *Pinned) ID(name string) (ebpf.MapID, error) {
	info, err := p.byName[name].Info()
	if err != nil {
		return 0, fmt.Errorf("map %s: %w", name, err)
	}
	id, _ := info.ID()

	return id, nil
}

// SockState returns the map of socket-local storage, for an iterator over it.
// It stays owned by p.
func (p *Pinned) SockState() *ebpf.Map { return p.byName[NameSockState] }

// ReasonCounts returns how often each reason was given, on all CPUs together.
func (p *Pinned) ReasonCounts() (map[Reason]uint64, error) {
	counts := make(map[Reason]uint64)
	for _, r := range Reasons() {
		n, err := sumPerCPU(p.byName[NameReasons], uint32(r))
		if err != nil {
			return nil, fmt.Errorf("map %s: %s: %w", NameReasons, r, err)
		}
		counts[r] = n
	}

	return counts, nil
}

// pinned returns every map, chunks as well, by where it is pinned.
func (p *Pinned) pinned() map[string]*ebpf.Map {
	pins := make(map[string]*ebpf.Map)
	for name, m := range p.byName {
		pins[filepath.Join(p.dir, name)] = m
	}
	for _, c := range p.chunked {
		for i := 0; c.have(i) != nil; i++ {
			pins[c.pin(i)] = c.have(i)
		}
	}

	return pins
}

// Pins returns where the maps are pinned, sorted.
func (p *Pinned) Pins() []string { return slices.Sorted(maps.Keys(p.pinned())) }

// PinAgain pins the maps whose pins are missing, and returns their pins. The folder
// must be on bpffs.
func (p *Pinned) PinAgain() ([]string, error) {
	var missing []string
	pins := p.pinned()
	for _, path := range slices.Sorted(maps.Keys(pins)) {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		missing = append(missing, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return missing, fmt.Errorf("pin directory: %w", err)
		}
		// The map itself was pinned already, and would only be moved.
		m, err := pins[path].Clone()
		if err == nil {
			err = errors.Join(m.Pin(path), m.Close())
		}
		if err != nil {
			return missing, fmt.Errorf("map %s: pin: %w", filepath.Base(path), err)
		}
	}

	return missing, nil
}

// Unpin removes the pins. The maps live on as long as a program or a process
// uses them.
func (p *Pinned) Unpin() error {
	if err := os.RemoveAll(p.dir); err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}

	return nil
}

// Close closes the maps and leaves their pins.
func (p *Pinned) Close() error {
	errs := []error{p.EgressUse.close(), p.AddrFilter.close()}
	for _, c := range p.chunked {
		errs = append(errs, c.close())
	}
	for _, m := range p.byName {
		errs = append(errs, m.Close())
	}

	return errors.Join(errs...)
}
