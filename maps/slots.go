package maps

import (
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"
)

// slotStride is the distance of two slots in memory: the kernel rounds the
// values of a memory-mapped array up to eight bytes.
const slotStride = 8

// Slots is the array of backend ids. [MappedSlots] is the kernel's,
// [FakeSlots] is a test's.
type Slots interface {
	// Len returns the number of slots.
	Len() int
	// Set makes slot i hold backend id.
	Set(i, id uint32) error
	// Get returns the backend id in slot i.
	Get(i uint32) (uint32, error)
}

// MappedSlots are the slots map in this process' memory: a write costs no
// system call.
type MappedSlots struct {
	*windows
}

func mapSlots(m *ebpf.Map) *MappedSlots {
	return &MappedSlots{newWindows(NameSlots, m, slotStride)}
}

// Len implements [Slots].
func (s *MappedSlots) Len() int { return int(s.m.MaxEntries()) }

// Set implements [Slots].
func (s *MappedSlots) Set(i, id uint32) error {
	word, err := s.word(i)
	if err == nil {
		atomic.StoreUint32(word, id)
	}

	return err
}

// Get implements [Slots].
func (s *MappedSlots) Get(i uint32) (uint32, error) {
	word, err := s.word(i)
	if err != nil {
		return 0, err
	}

	return atomic.LoadUint32(word), nil
}

func (s *MappedSlots) word(i uint32) (*uint32, error) {
	at, err := s.at(int(i) * slotStride)
	if err != nil {
		return nil, fmt.Errorf("slot %d: %w", i, err)
	}

	return (*uint32)(at), nil
}
