package maps

import (
	"cmp"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// inheritState makes the folder of this [StateVersion] if it is missing, with the maps of another
// version that have the same layout in this build: they get a second pin, and programs of both
// builds use them. Maps that are not in it are
// created, and filled by [Pinned.CopyState].
func inheritState(root string, specs map[string]*ebpf.MapSpec, inUse []ebpf.MapID) error {
	if _, err := os.Stat(filepath.Join(root, StateVersion)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	other, err := otherState(root, inUse)
	if err != nil || other == "" {
		return err
	}

	return appear(root, StateVersion, func(aside string) error {
		for _, name := range stateNames {
			if err := share(other, aside, name, specs[name]); err != nil {
				return fmt.Errorf("%s: %w", other, err)
			}
		}

		return nil
	})
}

// removeStaleState unpins the maps of this [StateVersion] of which programs in force use those of another version
// instead: they are made anew, and get what is in those.
func removeStaleState(root string, inUse []ebpf.MapID) error {
	other, err := otherState(root, inUse)
	if err != nil || other == "" {
		return err
	}
	for _, name := range stateNames {
		own, errOwn := pinnedID(PinOf(root, name))
		theirs, errTheirs := pinnedID(filepath.Join(other, name))
		if errors.Is(errOwn, fs.ErrNotExist) || errors.Is(errTheirs, fs.ErrNotExist) {
			continue
		}
		if err := errors.Join(errOwn, errTheirs); err != nil {
			return err
		}
		if !slices.Contains(inUse, theirs) || slices.Contains(inUse, own) {
			continue
		}
		chunks, err := filepath.Glob(filepath.Join(folderOf(root, name), chunksFolder, name+"_[0-9]*"))
		if err != nil {
			return err
		}
		for _, pin := range append(chunks, PinOf(root, name)) {
			if err := os.Remove(pin); err != nil {
				return err
			}
		}
	}

	return nil
}

// otherState returns the youngest folder of another [StateVersion] that programs in force use, the youngest of all if
// there is none, or an empty string.
func otherState(root string, inUse []ebpf.MapID) (string, error) {
	folders, err := youngestFirst(root, "state-v[0-9]*", NameFlows)
	if err != nil {
		return "", err
	}
	folders = slices.DeleteFunc(folders, func(folder string) bool { return filepath.Base(folder) == StateVersion })
	used, err := usedFolders(folders, inUse)
	if err != nil || len(folders) == 0 {
		return "", err
	}

	return append(used, folders...)[0], nil
}

// share also pins a map of another version, with its chunks, in dir, if it has the same layout in
// this build.
func share(other, dir, name string, spec *ebpf.MapSpec) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(other, name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("map %s: %w", name, err)
	}
	defer m.Close()
	if sameLayout(m, spec) != nil {
		if spec.Type == ebpf.SkStorage {
			return fmt.Errorf("map %s: %w, and what belongs to sockets cannot be copied", name, ErrStale)
		}

		return nil
	}
	if !isChunked(spec) {
		return pinToo(m, filepath.Join(dir, name))
	}
	c := &chunked{name: name, inner: spec.InnerMap, dir: other}
	err = c.openPinned()
	for i := 0; i < len(c.chunks) && err == nil; i++ {
		err = pinToo(c.chunks[i], chunkPin(dir, name, i))
	}
	if err == nil {
		err = pinToo(m, filepath.Join(dir, name))
	}
	if errors.Is(err, ErrStale) {
		err = nil // chunks of another size
	}

	return errors.Join(err, c.close())
}

// pinToo adds a pin to a map; pinning the same handle again would move its pin.
func pinToo(m *ebpf.Map, path string) error {
	again, err := m.Clone()
	if err == nil {
		err = errors.Join(again.Pin(path), again.Close())
	}
	if err != nil {
		return fmt.Errorf("pin %s: %w", path, err)
	}

	return nil
}

// outdated is a map of another version of the state that programs of that version may still
// write.
type outdated struct {
	name     string
	from, to *ebpf.Map
	copied   map[uint64]uint64 // hashes of the keys that were copied, and of their values then
	full     int               // for how many there was no room when they were copied last
}

// findOutdated opens the hash maps of another version that this version does not share.
func (p *Pinned) findOutdated(inUse []ebpf.MapID) error {
	other, err := otherState(p.root, inUse)
	if err != nil || other == "" {
		return err
	}
	for _, name := range stateNames {
		from, err := ebpf.LoadPinnedMap(filepath.Join(other, name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			p.unfiltered = p.unfiltered || slices.Contains(filterNames, name)

			continue
		}
		if err != nil {
			return fmt.Errorf("map %s of %s: %w", name, other, err)
		}
		to := p.byName[name]
		hash := from.Type() == to.Type() && (to.Type() == ebpf.Hash || to.Type() == ebpf.LRUHash)
		same, err := sameMap(from, to)
		p.unfiltered = p.unfiltered || !same && slices.Contains(filterNames, name)
		if err != nil || same || !hash || from.KeySize() != to.KeySize() {
			if err := errors.Join(err, from.Close()); err != nil {
				return fmt.Errorf("map %s of %s: %w", name, other, err)
			}

			continue
		}
		p.outdated = append(p.outdated, &outdated{name: name, from: from, to: to})
	}

	return nil
}

func sameMap(a, b *ebpf.Map) (bool, error) {
	ofA, errA := a.Info()
	ofB, errB := b.Info()
	if err := errors.Join(errA, errB); err != nil {
		return false, err
	}
	idA, _ := ofA.ID()
	idB, _ := ofB.ID()

	return idA == idB, nil
}

// CopyState copies entries from maps of another version of the state, whose layout differs, into
// the maps of this one where they are missing: the start of each value, which both versions know;
// the rest is zero. As long as programs of the other version are attached, there can be more to
// copy. What is missing later has ended, and is copied again only if they have used it since. If they do not write the
// filters of this version, the filters are filled, so that everything passes them. Any goroutine may call it.
func (p *Pinned) CopyState() error {
	p.inheriting.Lock()
	defer p.inheriting.Unlock()
	var errs []error
	if p.unfiltered {
		p.PortFilter.fill()
	}
	if p.unfiltered || len(p.outdated) > 0 { // a sweep does not see flows that are yet to be copied
		p.SourceFilter.fill()
	}
	for _, o := range p.outdated {
		full, err := o.copyMissing()
		if err != nil {
			errs = append(errs, fmt.Errorf("map %s of another version: %w", o.name, err))
		}
		if full > o.full {
			p.leftBehind = append(p.leftBehind, fmt.Sprintf("map %s is full: %d entries of another version are left behind", o.name, full))
		}
		o.full = full
	}

	return errors.Join(errs...)
}

// LeftBehind returns what [Pinned.CopyState] had no room for since it was last called, where that has become more.
func (p *Pinned) LeftBehind() []string {
	p.inheriting.Lock()
	defer p.inheriting.Unlock()
	left := p.leftBehind
	p.leftBehind = nil

	return left
}

// EndInheriting is called when no program of another version is attached any more: it copies what
// is left, and removes the state of other versions.
func (p *Pinned) EndInheriting() error {
	if err := p.CopyState(); err != nil {
		return err
	}
	folders, err := filepath.Glob(filepath.Join(p.root, "state-v[0-9]*"))
	errs := []error{err, p.closeOutdated()}
	for _, folder := range folders {
		if filepath.Base(folder) != StateVersion {
			errs = append(errs, os.RemoveAll(folder))
		}
	}

	return errors.Join(errs...)
}

func (p *Pinned) closeOutdated() error {
	p.inheriting.Lock()
	defer p.inheriting.Unlock()
	var errs []error
	for _, o := range p.outdated {
		errs = append(errs, o.from.Close())
	}
	p.outdated, p.unfiltered = nil, false

	return errors.Join(errs...)
}

var copiedSeed = maphash.MakeSeed()

// copyMissing copies the entries that are missing in the map of this version, but for those that are as they were when
// they were copied, and returns for how many there was no room: counts and the like are no reason to attach nothing.
func (o *outdated) copyMissing() (full int, err error) {
	keys, keyBytes := rowsOf(o.from.KeySize())
	values, valueBytes := rowsOf(o.from.ValueSize())
	target := make([]byte, o.to.ValueSize())
	there := make(map[uint64]uint64)
	for cursor := (ebpf.MapBatchCursor{}); ; {
		n, err := o.from.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return full, fmt.Errorf("read: %w", err)
		}
		for i := range n {
			key, value := row(keyBytes, i, o.from.KeySize()), row(valueBytes, i, o.from.ValueSize())
			keyHash, valueHash := maphash.Bytes(copiedSeed, key), maphash.Bytes(copiedSeed, value)
			if was, known := o.copied[keyHash]; !known || was != valueHash {
				clear(target)
				copy(target, value)
				err := o.to.Update(key, target, ebpf.UpdateNoExist)
				if errors.Is(err, unix.E2BIG) {
					full++

					continue // there may be room later
				}
				if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
					return full, fmt.Errorf("write: %w", err)
				}
			}
			there[keyHash] = valueHash
		}
		if last {
			o.copied = there

			return full, nil
		}
	}
}

// rowsOf returns a slice of byte arrays for a system call to fill, and its memory.
func rowsOf(size uint32) (rows any, memory []byte) {
	slice := reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), batch, batch)

	return slice.Interface(), unsafe.Slice((*byte)(slice.UnsafePointer()), batch*int(size))
}

func row(memory []byte, i int, size uint32) []byte { return memory[i*int(size):][:size] }

// youngestFirst returns the folders below root that contain the pin of a map, the youngest first:
// of two folders, the younger was made from the older.
func youngestFirst(root, pattern, name string) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(root, pattern))
	if err != nil {
		return nil, fmt.Errorf("folders of maps: %w", err)
	}
	made := make(map[string]int64)
	var folders []string
	for _, folder := range found {
		info, err := os.Stat(filepath.Join(folder, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		made[folder] = info.ModTime().UnixNano()
		folders = append(folders, folder)
	}
	slices.SortFunc(folders, func(a, b string) int { return cmp.Compare(made[b], made[a]) })

	return folders, nil
}
