package bpf

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// keeper keeps verified programs for the next agent, pinned in a folder: the verifier
// takes longer than all else of a start together. A pin is named after the program and a
// hash of all that the program was made of: its object, its configuration and its maps.
type keeper struct {
	dir  string // empty: nothing is kept
	hash string
}

// newKeeper returns what keeps the programs of an object that are configured so.
func newKeeper(dir string, object []byte, cfg any, m *maps.Pinned) (keeper, error) {
	if dir == "" {
		return keeper{}, nil
	}
	h := sha256.New()
	h.Write(object)
	fmt.Fprintf(h, "%+v", cfg)
	replacements := m.Replacements()
	for _, name := range slices.Sorted(stdmaps.Keys(replacements)) {
		info, err := replacements[name].Info()
		if err != nil {
			return keeper{}, fmt.Errorf("map %s: %w", name, err)
		}
		id, _ := info.ID()
		fmt.Fprintf(h, "%s=%d\n", name, id)
	}

	return keeper{dir, fmt.Sprintf("%x", h.Sum(nil)[:8])}, nil
}

func (k keeper) pin(program string) string { return filepath.Join(k.dir, program+"-"+k.hash) }

// pins returns where programs are kept.
func (k keeper) pins(programs map[string]*ebpf.Program) []string {
	var pins []string
	for name := range programs {
		if k.dir != "" {
			pins = append(pins, k.pin(name))
		}
	}

	return pins
}

// open returns the programs with these names, or nil unless all of them were kept.
func (k keeper) open(names []string) (map[string]*ebpf.Program, error) {
	if k.dir == "" {
		return nil, nil
	}
	programs := make(map[string]*ebpf.Program, len(names))
	for _, name := range names {
		program, err := ebpf.LoadPinnedProgram(k.pin(name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, closePrograms(programs)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("kept program %s: %w", name, err), closePrograms(programs))
		}
		programs[name] = program
	}

	return programs, nil
}

// keep pins programs. One that is pinned already, by an agent that was ended before it
// had kept all, is pinned anew.
func (k keeper) keep(programs map[string]*ebpf.Program) error {
	if k.dir == "" {
		return nil
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
