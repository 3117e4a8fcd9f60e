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
	// kernel returns the kernel's own types, which are slow to read, for all programs.
	kernel func() (*btf.Spec, error)
}

// newLoader returns a loader of programs that have the maps m.
func newLoader(m *maps.Pinned) loader {
	return loader{m, sync.OnceValues(btf.LoadKernelSpec)}
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

// loadOne loads a program of spec. The fields that it reads are looked up in the kernel's own types.
// The library would look them up in those of each loaded module as well, which takes long, and is
// not safe beside another goroutine that does so. A function of a module is looked up in types that
// this program does not share.
func (l loader) loadOne(spec *ebpf.CollectionSpec, name string) (*ebpf.Program, error) {
	kernel, err := l.kernel()
	if err != nil {
		return nil, fmt.Errorf("types of the kernel: %w", err)
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: l.maps.Replacements(), Programs: ebpf.ProgramOptions{KernelTypes: kernel},
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
