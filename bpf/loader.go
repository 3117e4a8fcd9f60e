package bpf

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/maps"
)

// loader loads programs.
type loader struct {
	maps *maps.Pinned
	// kernel has the types of the kernel, which are slow to read, for all programs. Programs that call functions of
	// kernel modules, those of devices, must not share it, because it is not safe to search the types of a module
	// while others search those of the kernel: nil.
	kernel *btf.Cache
}

// loadKept returns the programs with these names: those in the cache, or else those of spec,
// which it adds to the cache. The second error is that of the cache; the programs work
// nevertheless.
func (l loader) loadKept(keep programCache, names []string, spec func() (*ebpf.CollectionSpec, error)) (programs map[string]*ebpf.Program, err, notKept error) {
	if programs = keep.open(names); programs != nil {
		return programs, nil, nil
	}
	collection, err := spec()
	if err != nil {
		return nil, err, nil
	}
	if programs, err = l.load(collection); err != nil {
		return nil, err, nil
	}

	return programs, nil, keep.keep(programs)
}

// load loads all programs of spec concurrently, because verification takes a while. The caller
// closes them.
func (l loader) load(spec *ebpf.CollectionSpec) (map[string]*ebpf.Program, error) {
	programs := make(map[string]*ebpf.Program, len(spec.Programs))
	var errs []error
	var mu sync.Mutex
	var loading sync.WaitGroup
	for name := range spec.Programs {
		own := l.single(spec, name)
		loading.Go(func() {
			program, err := l.loadOne(own, name)
			mu.Lock()
			defer mu.Unlock()
			programs[name] = program
			errs = append(errs, err)
		})
	}
	loading.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, closePrograms(programs))
	}

	return programs, nil
}

// single returns what one program of spec needs, without sharing anything with spec. The
// capacities are those of the existing maps.
func (l loader) single(spec *ebpf.CollectionSpec, name string) *ebpf.CollectionSpec {
	own := *spec
	own.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
	single := own.Copy()
	for name, m := range l.maps.Replacements() {
		if spec := single.Maps[name]; spec != nil {
			spec.MaxEntries = m.MaxEntries()
		}
	}

	return single
}

func (l loader) loadOne(spec *ebpf.CollectionSpec, name string) (*ebpf.Program, error) {
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: l.maps.Replacements(), Cache: l.kernel,
	})
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", name, err)
	}
	defer collection.Close()

	return collection.DetachProgram(name), nil
}

func closePrograms(programs map[string]*ebpf.Program) error {
	var errs []error
	for _, program := range programs {
		errs = append(errs, program.Close()) // nil can be closed as well
	}

	return errors.Join(errs...)
}
