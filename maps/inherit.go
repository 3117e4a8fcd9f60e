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

// asidePrefix begins the name of a folder that inherit has not finished.
const asidePrefix = "new-"

// inherit makes the folder of this [Version] where it is missing, with what an agent of
// another version has left in its own that others remember: the names of service ports by
// their ids, the backends by theirs, and the addresses that flows may have dialled. The
// writer adopts them as if it had been there all the time, so that flows, sockets, affinity
// and loads mean the same backends before and after. The folder appears at once and
// complete: an agent that is killed meanwhile leaves none.
//
// Where no such folder can be read, ids will be given out anew, and what is remembered under
// them would be another backend's: then the state is forgotten as well.
//
// To read them, every build must know the maps service_ports, backends and addrs of every
// other. Their keys and what is in their values now are frozen; a later build can add to the
// end of the values.
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

// errNotFrozen is of a map that is not as every build has it.
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

// openFrozen opens a pinned map, of which the value may have more than this build knows.
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

// copyTo makes new maps in dir, which does not exist, that have what these have.
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

// copyBackends copies all places, those that are free as well: of these, the next
// generation is there.
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

// beginOf returns the value that begins with these bytes, of which it may be all.
func beginOf[V any](value []byte) V {
	var v V
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), value)

	return v
}
