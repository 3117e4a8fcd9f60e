package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"
)

// asidePrefix begins the name of a folder that appear has not completed.
const asidePrefix = "new-"

// inherit makes the folder of this [Version], if it is missing or stale. It copies what other state refers
// to from the folder of an agent with another version: the names of service ports by id, the
// backends by id, and the addresses that may be the original destinations of flows. The writer
// then adopts them like its own, so that flows, sockets, affinity and loads refer to the same
// backends before and after. The folder appears at once and complete: an agent that is killed
// meanwhile leaves none.
//
// A folder is stale if programs in force use the maps of another version, and not its own, or have used those of the
// other version since: as after a downgrade to a build that failed when its programs were on the hooks. Ids have been
// assigned in the other folder meanwhile, to which flows, sockets, affinity and loads refer.
//
// Of several other versions, the folder is taken that programs in force use, the youngest of these: younger ones can be
// left by builds that attached nothing.
//
// A folder in which a map has too little room is treated as that of another version, too.
//
// If no such folder can be read, ids are assigned anew, and state that refers to the old ones
// would refer to other backends: then the state is deleted as well.
//
// Every build must be able to read the maps service_ports, backends and addrs of every other
// build. Their keys, and the present fields of their values, are frozen; a later build can append
// fields to the values.
func inherit(root string, specs map[string]*ebpf.MapSpec, opts Options) error {
	others, err := youngestFirst(root, "v[0-9]*", NameServicePorts)
	if err != nil {
		return err
	}
	used, err := usedFolders(others, opts.InUse)
	if err != nil {
		return err
	}
	own := filepath.Join(root, Version)
	switch _, err := os.Stat(own); {
	case err == nil && (len(used) == 0 || used[0] == own):
		short, err := isShort(own, opts.Least)
		if err != nil || !short {
			return err
		}
		others = []string{own + "-short"} // which is found, too, if this process is killed now
		if err := errors.Join(os.RemoveAll(others[0]), os.Rename(own, others[0])); err != nil {
			return err
		}
	case err == nil:
		others = used[:1]
	case !errors.Is(err, fs.ErrNotExist):
		return err
	default:
		others = slices.Concat(used, others) // those in force first
	}
	for _, other := range others {
		from, err := openIDs(other)
		if errors.Is(err, errNotFrozen) || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = errors.Join(appear(root, Version, func(aside string) error { return from.copyTo(aside, specs) }), from.close())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", other, err)
		}

		return nil
	}

	states, err := filepath.Glob(filepath.Join(root, "state-v[0-9]*"))
	if err != nil {
		return err
	}
	for _, folder := range append(states, own) {
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
	}

	return nil
}

// isShort reports whether a map in a folder has less room than this, and the folder can be inherited from.
func isShort(folder string, least map[string]uint32) (bool, error) {
	short := false
	for name, n := range least {
		m, err := ebpf.LoadPinnedMap(filepath.Join(folder, name), &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("map %s: %w", name, err)
		}
		short = short || m.MaxEntries() < n
		if err := m.Close(); err != nil {
			return false, err
		}
	}
	if !short {
		return false, nil
	}
	from, err := openIDs(folder)
	if errors.Is(err, errNotFrozen) || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}

	return true, from.close()
}

// usedFolders returns those of these folders with a pin of a map that is in use, in their order. A map that several of
// them share shows nothing.
func usedFolders(folders []string, inUse []ebpf.MapID) ([]string, error) {
	if len(inUse) == 0 {
		return nil, nil
	}
	pinnedIn := make(map[ebpf.MapID][]string)
	for _, folder := range folders {
		pins, err := os.ReadDir(folder)
		if err != nil {
			return nil, err
		}
		for _, pin := range pins {
			id, err := pinnedID(filepath.Join(folder, pin.Name()))
			if pin.IsDir() || errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			pinnedIn[id] = append(pinnedIn[id], folder)
		}
	}
	isUsed := make(map[string]bool)
	for _, id := range inUse {
		if len(pinnedIn[id]) == 1 {
			isUsed[pinnedIn[id][0]] = true
		}
	}

	return slices.DeleteFunc(slices.Clone(folders), func(folder string) bool { return !isUsed[folder] }), nil
}

// pinnedID returns the kernel's number of a pinned map.
func pinnedID(pin string) (ebpf.MapID, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, fmt.Errorf("pinned map %s: %w", pin, err)
	}
	info, err := m.Info()
	if err := errors.Join(err, m.Close()); err != nil {
		return 0, fmt.Errorf("pinned map %s: %w", pin, err)
	}
	id, _ := info.ID()

	return id, nil
}

// appear makes a folder of maps below root, which appears at once and complete: fill writes what is in it. It takes the
// place of one that is there.
func appear(root, folder string, fill func(aside string) error) error {
	aside := filepath.Join(root, asidePrefix+folder)
	err := os.RemoveAll(aside)
	if err == nil {
		err = os.MkdirAll(filepath.Join(aside, chunksFolder), 0o700)
	}
	if err == nil {
		err = fill(aside)
	}
	if err == nil {
		err = os.RemoveAll(filepath.Join(root, folder))
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(aside))
	}

	return os.Rename(aside, filepath.Join(root, folder))
}

// errNotFrozen is returned for a map without the layout that all builds share.
var errNotFrozen = errors.New("not a layout that is known")

// ids are the maps of another version that every build can read.
type ids struct {
	servicePorts *ebpf.Map
	addrs        *ebpf.Map
	backends     []*ebpf.Map // chunks
}

func openIDs(dir string) (*ids, error) {
	var of ids
	err := func() (err error) {
		if of.servicePorts, err = openFrozen(filepath.Join(dir, NameServicePorts), ebpf.Hash, 4, int(unsafe.Sizeof(ServicePort{}))); err != nil {
			return err
		}
		if of.addrs, err = openFrozen(filepath.Join(dir, NameAddrs), ebpf.Hash, int(unsafe.Sizeof(Addr{})), int(unsafe.Sizeof(AddrUse{}))); err != nil {
			return err
		}
		for i := 0; ; i++ {
			chunk, err := openFrozen(chunkPin(dir, NameBackends, i), ebpf.Array, 4, int(unsafe.Sizeof(Backend{})))
			if errors.Is(err, fs.ErrNotExist) && i > 0 {
				return nil
			}
			if err != nil {
				return err
			}
			of.backends = append(of.backends, chunk)
		}
	}()
	if err != nil {
		return nil, errors.Join(err, of.close())
	}

	return &of, nil
}

// openFrozen opens a pinned map whose values may be longer than in this build.
func openFrozen(pin string, kind ebpf.MapType, key, value int) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("pinned map %s: %w", pin, err)
	}
	if m.Type() != kind || int(m.KeySize()) != key || int(m.ValueSize()) < value {
		return nil, errors.Join(fmt.Errorf("pinned map %s: %w", pin, errNotFrozen), m.Close())
	}

	return m, nil
}

func (of *ids) close() error {
	return errors.Join(of.servicePorts.Close(), of.addrs.Close(), closeAll(of.backends))
}

// copyTo makes maps with the same entries in dir.
func (of *ids) copyTo(dir string, specs map[string]*ebpf.MapSpec) error {
	for name, from := range map[string]*ebpf.Map{NameServicePorts: of.servicePorts, NameAddrs: of.addrs} {
		to, err := create(dir, name, specs[name])
		if err != nil {
			return err
		}
		full, err := (&outdated{from: from, to: to}).copyMissing()
		if full > 0 {
			err = fmt.Errorf("%w: %d ids of another version", ErrFull, full) // they must not be assigned to others
		}
		if err := errors.Join(err, to.Close()); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}

	return of.copyBackends(dir, specs[NameBackends])
}

// copyBackends copies all places, including free ones, which contain the generation of the next
// id.
func (of *ids) copyBackends(dir string, spec *ebpf.MapSpec) (err error) {
	outer, err := create(dir, NameBackends, spec)
	if err != nil {
		return err
	}
	defer outer.Close()
	c := &chunked{name: NameBackends, outer: outer, inner: spec.InnerMap, dir: dir}
	defer func() { err = errors.Join(err, c.close()) }()
	to, err := mapArray[Backend](c, 1)
	if err != nil {
		return err
	}
	place := uint32(0)
	for _, chunk := range of.backends {
		value := make([]byte, chunk.ValueSize())
		for i := range chunk.MaxEntries() {
			if err := chunk.Lookup(i, &value); err != nil {
				return fmt.Errorf("map %s: lookup: %w", NameBackends, err)
			}
			if b := beginOf[Backend](value); b != (Backend{}) {
				if err := to.Put(place, b); err != nil {
					return err
				}
			}
			place++
		}
	}

	return nil
}

// beginOf returns the value at the start of these bytes.
func beginOf[V any](value []byte) V {
	var v V
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), value)

	return v
}
