package bpf

import (
	"errors"
	"fmt"
	stdmaps "maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// Iterators are the programs that list translated sockets for operators. Each writes
// [maps.TranslatedSock]. The agent needs none of them.
type Iterators struct {
	Connected *ebpf.Program // over sock_state: TCP and connected UDP
	Dials     *ebpf.Program // over udp_dials: one for each destination of an unconnected UDP socket
}

// LoadIterators loads the programs that list sockets. They use no map, but read the one that they are
// attached to. The caller closes the result.
func LoadIterators() (*Iterators, error) {
	spec, err := iterSpec(iterProgSluiceConnected, iterProgSluiceDials)
	if err != nil {
		return nil, err
	}
	programs, err := newLoader(&maps.Pinned{}, nil).load(spec)
	if err != nil {
		return nil, fmt.Errorf("socket iterators: %w", err)
	}

	return &Iterators{Connected: programs[iterProgSluiceConnected], Dials: programs[iterProgSluiceDials]}, nil
}

// Close closes the programs.
func (i *Iterators) Close() error { return errors.Join(i.Connected.Close(), i.Dials.Close()) }

// iterSpec returns the iterators with these names.
func iterSpec(names ...string) (*ebpf.CollectionSpec, error) {
	spec, err := loadIter()
	if err != nil {
		return nil, err
	}
	stdmaps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(names, name) })

	return spec, nil
}
