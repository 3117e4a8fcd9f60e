package maps

import (
	"encoding/binary"
	"fmt"

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
	m      *ebpf.Map
	memory *ebpf.Memory
}

func mapSlots(m *ebpf.Map) (*MappedSlots, error) {
	memory, err := m.Memory()
	if err != nil {
		return nil, fmt.Errorf("map slots: memory: %w", err)
	}

	return &MappedSlots{m: m, memory: memory}, nil
}

// Len implements [Slots].
func (s *MappedSlots) Len() int { return int(s.m.MaxEntries()) }

// Set implements [Slots].
func (s *MappedSlots) Set(i, id uint32) error {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], id)
	if _, err := s.memory.WriteAt(b[:], int64(i)*slotStride); err != nil {
		return fmt.Errorf("slot %d: %w", i, err)
	}

	return nil
}

// Get implements [Slots].
func (s *MappedSlots) Get(i uint32) (uint32, error) {
	var b [4]byte
	if _, err := s.memory.ReadAt(b[:], int64(i)*slotStride); err != nil {
		return 0, fmt.Errorf("slot %d: %w", i, err)
	}

	return binary.NativeEndian.Uint32(b[:]), nil
}
