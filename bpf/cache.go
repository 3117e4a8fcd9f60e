package bpf

import (
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// programCache keeps verified programs for the next agent, pinned in a folder: verification takes
// longer than the rest of a start. The name of a pin contains that of the program and a hash of
// all inputs: this build, its configuration and its maps.
type programCache struct {
	dir  string // empty: nothing is kept
	hash string
	why  error // why nothing can be kept, or nil
}

// buildID returns the build id that the linker has written.
var buildID = sync.OnceValues(func() ([]byte, error) {
	own, err := elf.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer own.Close()
	const empty = 16 // bytes: a note without content
	section := own.Section(".note.go.buildid")
	if section == nil || section.Size <= empty {
		return nil, errors.New("the executable has no build id: it was linked with -buildid=")
	}

	return section.Data()
})

// newProgramCache returns the cache of programs with this configuration and these maps.
func newProgramCache(dir string, cfg any, m *maps.Pinned) (programCache, error) {
	if dir == "" {
		return programCache{}, nil
	}
	build, err := buildID()
	if err != nil {
		return programCache{why: fmt.Errorf("build: %w", err)}, nil
	}
	h := sha256.New()
	h.Write(build)
	fmt.Fprintf(h, "%+v", cfg)
	replacements := m.Replacements()
	for _, name := range slices.Sorted(stdmaps.Keys(replacements)) {
		info, err := replacements[name].Info()
		if err != nil {
			return programCache{}, fmt.Errorf("map %s: %w", name, err)
		}
		id, _ := info.ID()
		fmt.Fprintf(h, "%s=%d\n", name, id)
	}

	return programCache{dir: dir, hash: fmt.Sprintf("%x", h.Sum(nil)[:8])}, nil
}

func (k programCache) pin(program string) string { return filepath.Join(k.dir, program+"-"+k.hash) }

// pins returns the pins of programs.
func (k programCache) pins(programs map[string]*ebpf.Program) []string {
	var pins []string
	for name := range programs {
		if k.dir != "" {
			pins = append(pins, k.pin(name))
		}
	}

	return pins
}

// open returns the programs with these names, or nil unless all of them can be opened.
func (k programCache) open(names []string) map[string]*ebpf.Program {
	if k.dir == "" {
		return nil
	}
	programs := make(map[string]*ebpf.Program, len(names))
	for _, name := range names {
		program, err := ebpf.LoadPinnedProgram(k.pin(name), nil)
		if err != nil {
			_ = closePrograms(programs) // an error of close is of no consequence here
			return nil
		}
		programs[name] = program
	}

	return programs
}

// keep pins programs. It replaces pins that an agent has left which was ended before it had
// pinned all. After an error the programs work, but are not kept.
func (k programCache) keep(programs map[string]*ebpf.Program) error {
	if k.dir == "" {
		return k.why
	}
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return fmt.Errorf("folder of programs: %w", err)
	}
	var errs []error
	for name, program := range programs {
		err := os.Remove(k.pin(name))
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = program.Pin(k.pin(name))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("keep program %s: %w", name, err))
		}
	}

	return errors.Join(errs...)
}
