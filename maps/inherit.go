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

// asidePrefix begins the name of a folder that inherit has not completed.
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
	own, aside := filepath.Join(root, Version), filepath.Join(root, asidePrefix+Version)
	if _, err := os.Stat(own); !errors.Is(err, fs.ErrNotExist) {
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
		if err != nil {
			return err
		}
		if err = os.RemoveAll(aside); err == nil {
			err = from.copyTo(aside, specs)
		}
		if err := errors.Join(err, from.close()); err != nil {
			return fmt.Errorf("%s: %w", other, errors.Join(err, os.RemoveAll(aside)))
		}

		return os.Rename(aside, own)
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

// copyTo makes maps with the same entries in dir, which does not exist yet.
func (of *ids) copyTo(dir string, specs map[string]*ebpf.MapSpec) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := copyHash[uint32, ServicePort](of.servicePorts, dir, NameServicePorts, specs); err != nil {
		return err
	}
	if err := copyHash[Addr, AddrUse](of.addrs, dir, NameAddrs, specs); err != nil {
		return err
	}

	return of.copyBackends(dir, specs[NameBackends])
}

func copyHash[K comparable, V any](from *ebpf.Map, dir, name string, specs map[string]*ebpf.MapSpec) error {
	m, err := create(dir, name, specs[name])
	if err != nil {
		return err
	}
	defer m.Close()
	to := &Map[K, V]{name: name, m: m}
	var k K
	value := make([]byte, from.ValueSize())
	all := from.Iterate()
	for all.Next(&k, &value) {
		if err := to.Put(k, beginOf[V](value)); err != nil {
			return err
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("map %s: iterate: %w", name, err)
	}

	return nil
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
