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
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
)

// Version identifies the layout of the maps that the agent fills, and is the name of their
// folder. It changes whenever one of them or a type in it does. It is a variable only so that a
// test can build an agent with another layout, and so is [StateVersion]:
//
//	go build -ldflags '-X github.com/sluice-lb/sluice/maps.Version=v3x' ./cmd/sluice
var Version = "v4"

// StateVersion identifies the layout of the maps that programs write, and is the name of their
// folder. Builds with the same one share these maps, whatever their [Version]; other builds share
// those with the same layout. So flows, sockets and affinity outlive an upgrade and a downgrade.
var StateVersion = "state-v2"

// folderOf returns the folder below root in which a map is pinned.
func folderOf(root, name string) string {
	if slices.Contains(stateNames, name) {
		return filepath.Join(root, StateVersion)
	}

	return filepath.Join(root, Version)
}

// PinOf returns the path of the pin of a map below root.
func PinOf(root, name string) string { return filepath.Join(folderOf(root, name), name) }

// ChunkPinOf returns the path of the pin of a chunk of an array below root.
func ChunkPinOf(root, name string, chunk int) string {
	return chunkPin(folderOf(root, name), name, chunk)
}

// Folders returns the folders of maps below root, including those of builds with other layouts.
func Folders(root string) ([]string, error) {
	var folders []string
	for _, pattern := range []string{"v[0-9]*", "state-v[0-9]*", asidePrefix + "v[0-9]*", asidePrefix + "state-v[0-9]*"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, fmt.Errorf("folders of maps: %w", err)
		}
		folders = append(folders, found...)
	}

	return folders, nil
}

// OtherFolders returns the [Folders] of builds with another [Version]. [Pinned.EndInheriting]
// removes those of another [StateVersion].
func OtherFolders(root string) ([]string, error) {
	folders, err := Folders(root)

	return slices.DeleteFunc(folders, func(folder string) bool {
		name := filepath.Base(folder)

		return name == Version || strings.HasPrefix(name, "state-")
	}), err
}

// ErrStale is returned when a pinned map has another layout than this build.
var ErrStale = errors.New("pinned map has another layout")

// prefix starts the kernel name of every map; pins go without.
const prefix = "sl_"

// Pinned are the maps in the kernel, pinned below a bpffs directory. They outlive the process
// that made them.
type Pinned struct {
	Tables
	Affinity *Map[AffinityKey, Affinity]
	Claims   *Map[AffinityKey, Affinity] // of clients whose flows are unconfirmed
	UDPPins  *Map[UDPPinKey, UDPPin]
	// Flows are the flows of devices. HalfOpen are unconfirmed connections, and Unanswered are
	// unanswered datagrams: see [Pinned.Opening].
	Flows        *Map[FlowKey, Flow]
	HalfOpen     *Map[FlowKey, Flow]
	Unanswered   *Map[FlowKey, Flow]
	SourceFilter *SourceFilter
	FlowUsage    *FlowUsage
	Stats        *Stats

	backendHandshakes *Array[BackendHandshakes]
	chunked           map[string]*chunked
	listeners         shared[uint64] // see [Pinned.Listen]
	inheriting        sync.Mutex
	outdated          []*outdated
	leftBehind        []string
	unfiltered        bool // programs of another version may put flows without writing the filters of this one
	root              string
	byName            map[string]*ebpf.Map
	fills             []func() (Fill, error)
}

// Options are optional settings of [Create].
type Options struct {
	// Capacities overrides the capacities of maps, by name; those of growing arrays are in chunks.
	// It has no effect on maps that exist.
	Capacities map[string]uint32
	// Least is the room that maps have at least, see [LeastCapacities]. If one that exists has less, all maps of this
	// [Version] are made anew, as after an upgrade from another version.
	Least map[string]uint32
	// Handshakes makes room for the handshakes of every service port: some 800 bytes for each.
	Handshakes bool
	// BackendHandshakes makes room for those of every backend: 32 bytes for each.
	BackendHandshakes bool
	// InUse are the maps of the programs that are in force: see inherit.
	InUse []ebpf.MapID
}

// LiftMemlock removes the limit of memory for maps and programs of this process: before Linux
// 5.11 they count as locked memory of its user, which other processes may have used up.
func LiftMemlock() error {
	unlifted := rlimit.RemoveMemlock()
	if unlifted == nil {
		return nil
	}
	version, err := features.LinuxVersionCode()
	if err != nil {
		return errors.Join(unlifted, err)
	}

	return explainMemlock(unlifted, version)
}

const linux5_11 = 5<<16 | 11<<8

// explainMemlock says why a limit could not be lifted. The library tries to lift it whenever it may not
// create a map, of which a limit that does not exist is no reason.
func explainMemlock(err error, version uint32) error {
	if version >= linux5_11 {
		return fmt.Errorf("this process may not create maps or load programs, which takes SYS_ADMIN and a seccomp profile that allows bpf(): %w", err)
	}

	return fmt.Errorf("limit of locked memory, which maps and programs count against before Linux 5.11, and which takes SYS_RESOURCE (without SYS_ADMIN, they cannot be created at all): %w", err)
}

// Create adopts the maps that are pinned below root (in the folders of this [Version] and this
// [StateVersion]), and creates and pins the others. If the folder of this version is missing, or was in force
// before that of another version, ids are inherited from that: see inherit. Create returns an error
// wrapping [ErrStale], and changes nothing, if a pinned map has another layout. The caller closes
// the result, which leaves the pins.
func Create(root string, opts Options) (*Pinned, error) {
	if err := LiftMemlock(); err != nil {
		return nil, err
	}
	specs, err := mapSpecs()
	if err != nil {
		return nil, err
	}
	for name, n := range opts.Capacities {
		if specs[name] == nil {
			return nil, fmt.Errorf("capacity of map %q: there is no such map", name)
		}
		specs[name].MaxEntries = n
	}
	for name, n := range opts.Least {
		specs[name].MaxEntries = max(specs[name].MaxEntries, n)
	}
	if err := checkPins(root, specs); err != nil {
		return nil, err
	}
	if err := inherit(root, specs, opts); err != nil {
		return nil, fmt.Errorf("ids of another version: %w", err)
	}
	if err := errors.Join(removeStaleState(root, opts.InUse), inheritState(root, specs, opts.InUse)); err != nil {
		return nil, fmt.Errorf("state of another version: %w", err)
	}
	for _, version := range []string{Version, StateVersion} {
		if err := os.MkdirAll(filepath.Join(root, version), 0o700); err != nil {
			return nil, fmt.Errorf("pin directory: %w", err)
		}
	}

	p, err := open(root, specs, 1, func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		m, err := adopt(root, name, spec)
		if err == nil && isChunked(spec) && slices.Contains(stateNames, name) && m.MaxEntries() < spec.MaxEntries {
			return enlarge(m, folderOf(root, name), name, spec)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return m, err
		}

		return create(folderOf(root, name), name, spec)
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(p.reserveState(opts), p.findOutdated(opts.InUse), p.countAll(), p.CopyState()); err != nil {
		return nil, errors.Join(err, p.Close())
	}

	return p, nil
}

// reserveState makes room for the loads and counts of the backends and service ports that exist,
// in case the state is new.
func (p *Pinned) reserveState(opts Options) error {
	p.Stats.measures = opts.Handshakes
	if opts.BackendHandshakes {
		p.Loads.handshakes = p.backendHandshakes
	}
	if err := errors.Join(p.Loads.Reserve(p.Backends.Len()), p.Health.Reserve(p.Backends.Len())); err != nil {
		return err
	}
	counts := p.chunked[NamePortCounts]
	if counts.have(0) == nil || opts.Handshakes {
		places := 0
		for port, err := range p.ServicePorts.All() {
			if err != nil {
				return err
			}
			places = max(places, int(Index(port.Key))+1)
		}
		if err := p.Stats.Reserve(places); err != nil {
			return err
		}
	}
	p.Stats.zeroFrom = uint32(len(counts.chunks)) * counts.inner.MaxEntries

	return nil
}

// checkPins returns an error if a pinned map cannot be adopted.
func checkPins(root string, specs map[string]*ebpf.MapSpec) error {
	for name, spec := range specs {
		m, err := adopt(root, name, spec)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		m.Close()
		if !isChunked(spec) {
			continue
		}
		c := &chunked{name: name, inner: spec.InnerMap, dir: folderOf(root, name)}
		if err := errors.Join(c.openPinned(), c.close()); err != nil {
			return err
		}
	}

	return nil
}

// Load opens the maps that an agent has pinned below root. It returns an error wrapping
// [fs.ErrNotExist] if one is missing, and [ErrStale] if one has another layout. The heartbeat may be
// missing: not every agent with these maps has one. The caller closes the result.
func Load(root string) (*Pinned, error) {
	specs, err := mapSpecs()
	if err != nil {
		return nil, err
	}

	if _, err := os.Lstat(PinOf(root, NameHeartbeat)); errors.Is(err, fs.ErrNotExist) {
		delete(specs, NameHeartbeat)
	}

	return open(root, specs, 0, func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		return adopt(root, name, spec)
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

// isChunked reports whether a map is an array of chunks.
func isChunked(spec *ebpf.MapSpec) bool {
	return spec.InnerMap != nil && spec.InnerMap.Type != ebpf.RingBuf
}

// open gets all maps, and makes at least this many chunks of each array.
func open(root string, specs map[string]*ebpf.MapSpec, chunks int, get func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*Pinned, error) {
	p := &Pinned{root: root, byName: make(map[string]*ebpf.Map, len(specs)), chunked: make(map[string]*chunked)}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		m, err := get(name, specs[name])
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.byName[name] = m
		if isChunked(specs[name]) {
			p.chunked[name] = &chunked{name: name, outer: m, inner: specs[name].InnerMap, dir: folderOf(root, name)}
			if err := p.chunked[name].adopt(); err != nil {
				return nil, errors.Join(err, p.Close())
			}
		}
	}
	if err := errors.Join(p.mapFilters(), p.mapArrays(chunks)); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.FrontendIDs = table[FrontendKey, uint32](p, NameFrontendIDs)
	servicePorts := table[uint32, ServicePort](p, NameServicePorts)
	p.ServicePorts = servicePorts
	p.Addrs = table[Addr, AddrUse](p, NameAddrs)
	p.SourceRanges = table[SourceRangeKey, uint32](p, NameSourceRanges)
	p.ServiceCIDRs = table[CIDRKey, uint32](p, NameServiceCIDRs)
	p.LocalCIDRs = table[CIDRKey, uint32](p, NameLocalCIDRs)
	p.OptedOut = table[PodUID, uint32](p, NameOptedOut)
	p.Devices = table[uint32, Device](p, NameDevices)
	p.Stats = &Stats{
		counts: p.chunked[NamePortCounts], handshakes: p.chunked[NameHandshakes],
		refusals: table[RefusalKey, uint64](p, NameRefusals), ports: servicePorts,
	}
	p.Counts = p.Stats
	p.Affinity = table[AffinityKey, Affinity](p, NameAffinity)
	p.Claims = table[AffinityKey, Affinity](p, NameClaims)
	p.UDPPins = table[UDPPinKey, UDPPin](p, NameUDPPins)
	p.Flows = table[FlowKey, Flow](p, NameFlows)
	p.HalfOpen = table[FlowKey, Flow](p, NameHalfOpen)
	p.Unanswered = table[FlowKey, Flow](p, NameUnanswered)

	return p, nil
}

// mapFilters maps the filters, the usage of flows and the listeners into this process' memory.
func (p *Pinned) mapFilters() error {
	addrs, errAddrs := mapShared[uint64](p.byName[NameAddrFilter], NameAddrFilter)
	covers, errCovers := mapShared[uint64](p.byName[NameCIDRCovers], NameCIDRCovers)
	ports, errPorts := mapShared[byte](p.byName[NamePortFilter], NamePortFilter)
	sources, errSources := mapShared[uint32](p.byName[NameSourceFilter], NameSourceFilter)
	usage, errUsage := mapShared[int64](p.byName[NameFlowUsage], NameFlowUsage)
	listeners, errListeners := mapShared[uint64](p.byName[NameListeners], NameListeners)
	var heartbeat shared[uint64]
	var errHeartbeat error
	if m := p.byName[NameHeartbeat]; m != nil {
		heartbeat, errHeartbeat = mapShared[uint64](m, NameHeartbeat)
	}
	p.AddrFilter, p.CIDRCovers = newAddrFilter(addrs), newCIDRCovers(covers)
	p.PortFilter, p.SourceFilter = &PortFilter{ports}, &SourceFilter{sources}
	p.FlowUsage, p.listeners, p.Heartbeat = &FlowUsage{usage}, listeners, &Heartbeat{heartbeat}

	return errors.Join(errAddrs, errCovers, errPorts, errSources, errUsage, errListeners, errHeartbeat)
}

// mapArrays maps the arrays into this process' memory.
func (p *Pinned) mapArrays(chunks int) error {
	var errs [7]error
	p.Frontends, errs[0] = mapArray[Frontend](p.chunked[NameFrontends], chunks)
	p.Pools, errs[1] = mapArray[Pool](p.chunked[NamePools], chunks)
	p.Slots, errs[2] = mapArray[uint32](p.chunked[NameSlots], chunks)
	p.Backends, errs[3] = mapArray[Backend](p.chunked[NameBackends], chunks)
	p.Loads.Array, errs[4] = mapArray[BackendLoad](p.chunked[NameBackendLoad], chunks)
	p.Health, errs[5] = mapArray[BackendHealth](p.chunked[NameHealth], chunks)
	p.backendHandshakes, errs[6] = mapArray[BackendHandshakes](p.chunked[NameBackendHandshakes], 0)

	return errors.Join(errs[:]...)
}

// WaitForPrograms returns when every program that was running before has ended: no program uses
// what was deleted from the maps before the call. It usually takes some 10 ms, and seconds on a
// busy machine.
func (p *Pinned) WaitForPrograms() error { return p.chunked[NameFrontends].wait() }

func table[K comparable, V any](p *Pinned, name string) *Map[K, V] {
	t := &Map[K, V]{name: name, m: p.byName[name]}
	p.fills = append(p.fills, t.fill)

	return t
}

// adopt opens the pin of a map and checks that its layout is that of spec. The capacity may
// differ.
func adopt(root, name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	path := PinOf(root, name)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("pinned map %s: %w", path, err)
	}
	if err := sameLayout(m, spec); err != nil {
		return nil, errors.Join(fmt.Errorf("pinned map %s: %w", path, err), m.Close())
	}

	return m, nil
}

// sameLayout returns an error wrapping [ErrStale] if m has another layout than spec. The capacity
// may differ.
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

// enlarge replaces the pin of an array with chunks by that of one with room for more. It has the same chunks once
// they are adopted, so programs that use the former one count as before.
func enlarge(former *ebpf.Map, dir, name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	aside := asidePrefix + name
	if err := os.Remove(filepath.Join(dir, aside)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errors.Join(err, former.Close())
	}
	m, err := create(dir, aside, spec)
	if err := errors.Join(err, former.Close()); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(dir, aside), filepath.Join(dir, name)); err != nil {
		return nil, errors.Join(fmt.Errorf("map %s: pin: %w", name, err), m.Close())
	}

	return m, nil
}

// Replacements returns the maps by their names in C, for loading programs that share them. The
// maps stay owned by p.
func (p *Pinned) Replacements() map[string]*ebpf.Map {
	replacements := make(map[string]*ebpf.Map, len(p.byName))
	for name, m := range p.byName {
		replacements[prefix+name] = m
	}

	return replacements
}

// Fill is the number of entries of a map.
type Fill struct {
	Name     string `json:"name"`
	Entries  int    `json:"entries"`
	Capacity int    `json:"capacity"`
}

// Size is the size of a map.
type Size struct {
	Name    string // which is also that of its pin
	Entries uint32 // current capacity
	Bytes   uint64 // of memory, as reported by the kernel; of some maps, only what is in use
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

// Fills counts the entries of every hash map and trie, and the backends, sorted by name. It reads all of
// them, which is too expensive for every second.
func (p *Pinned) Fills() ([]Fill, error) {
	var fills []Fill
	for _, fill := range p.fills {
		of, err := fill()
		if err != nil {
			return nil, err
		}
		fills = append(fills, of)
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

// ID returns the kernel's id of a map.
func (p *Pinned) ID(name string) (ebpf.MapID, error) {
	info, err := p.byName[name].Info()
	if err != nil {
		return 0, fmt.Errorf("map %s: %w", name, err)
	}
	id, _ := info.ID()

	return id, nil
}

// SockState returns the map of socket-local storage, for an iterator over it. It stays owned by
// p.
func (p *Pinned) SockState() *ebpf.Map { return p.byName[NameSockState] }

// UDPDials returns the map of the destinations of unconnected UDP sockets, for an iterator over it. It
// stays owned by p.
func (p *Pinned) UDPDials() *ebpf.Map { return p.byName[NameUDPDials] }

// ReasonCounts returns how often each reason was counted, summed over all CPUs.
func (p *Pinned) ReasonCounts() (map[Reason]uint64, error) {
	counts := make(map[Reason]uint64)
	for _, r := range Reasons() {
		if uint32(r) >= p.byName[NameReasons].MaxEntries() {
			continue // the map was made by a build without this reason
		}
		n, err := sumPerCPU(p.byName[NameReasons], uint32(r))
		if err != nil {
			return nil, fmt.Errorf("map %s: %s: %w", NameReasons, r, err)
		}
		counts[r] = n
	}

	return counts, nil
}

// pinned returns every map, including chunks, by the path of its pin.
func (p *Pinned) pinned() map[string]*ebpf.Map {
	pins := make(map[string]*ebpf.Map)
	for name, m := range p.byName {
		pins[PinOf(p.root, name)] = m
	}
	for _, c := range p.chunked {
		for i := 0; c.have(i) != nil; i++ {
			pins[c.pin(i)] = c.have(i)
		}
	}

	return pins
}

// Pins returns the paths of the pins, sorted.
func (p *Pinned) Pins() []string { return slices.Sorted(maps.Keys(p.pinned())) }

// PinAgain restores missing pins, and returns their paths. The folder must be on bpffs. An array
// is pinned after its chunks, and these from the last to the first: if this process is killed
// meanwhile, the next agent never finds an array with a gap.
func (p *Pinned) PinAgain() ([]string, error) {
	var missing, order []string
	pins := p.pinned()
	for _, name := range slices.Sorted(maps.Keys(p.chunked)) {
		c := p.chunked[name]
		for i := 0; c.have(i) != nil; i++ {
			order = append(order, c.pin(i))
		}
	}
	slices.Reverse(order)
	for _, name := range slices.Sorted(maps.Keys(p.byName)) {
		order = append(order, PinOf(p.root, name))
	}
	for _, path := range order {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		missing = append(missing, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return missing, fmt.Errorf("pin directory: %w", err)
		}
		if err := pinToo(pins[path], path); err != nil {
			return missing, err
		}
	}
	slices.Sort(missing)

	return missing, nil
}

// Close closes the maps and leaves their pins.
func (p *Pinned) Close() error {
	errs := []error{p.closeOutdated()}
	if p.SourceFilter != nil {
		errs = append(errs, p.AddrFilter.close(), p.CIDRCovers.close(), p.PortFilter.close(), p.SourceFilter.close(), p.FlowUsage.close(), p.listeners.close(), p.Heartbeat.close())
	}
	for _, c := range p.chunked {
		errs = append(errs, c.close())
	}
	for _, m := range p.byName {
		errs = append(errs, m.Close())
	}

	return errors.Join(errs...)
}
