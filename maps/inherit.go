package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/cilium/ebpf"
)

// asidePrefix begins the name of a folder that appear has not completed.
const asidePrefix = "new-"

// inherit makes the folder of this [Version] if it is missing. It copies what other state refers
// to from the folder of an agent with another version: the names of service ports by id, the
// backends by id, and the addresses that may be the original destinations of flows. The writer
// then adopts them like its own, so that flows, sockets, affinity and loads refer to the same
// backends before and after. The folder appears at once and complete: an agent that is killed
// meanwhile leaves none.
//
// If no such folder can be read, ids are assigned anew, and state that refers to the old ones
// would refer to other backends: then the state is deleted as well.
//
// Every build must be able to read the maps service_ports, backends and addrs of every other
// build. Their keys, and the present fields of their values, are frozen; a later build can append
// fields to the values.
func inherit(root string, specs map[string]*ebpf.MapSpec) error {
	if _, err := os.Stat(filepath.Join(root, Version)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	others, err := youngestFirst(root, "v[0-9]*", NameServicePorts)
	if err != nil {
		return err
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
	for _, state := range states {
		if err := os.RemoveAll(state); err != nil {
			return err
		}
	}

	return nil
}

// appear makes a folder of maps below root, which appears at once and complete: fill writes what is in it.
func appear(root, folder string, fill func(aside string) error) error {
	aside := filepath.Join(root, asidePrefix+folder)
	err := os.RemoveAll(aside)
	if err == nil {
		err = os.MkdirAll(filepath.Join(aside, chunksFolder), 0o700)
	}
	if err == nil {
		err = fill(aside)
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
		if err := errors.Join(copyMissing(from, to), to.Close()); err != nil {
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
