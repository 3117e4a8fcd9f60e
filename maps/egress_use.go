package maps

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// What a device leads to: the indices of [EgressUse].
const (
	DevicePods       = uint32(abiDeviceClassDEVICE_PODS)
	DeviceUplink     = uint32(abiDeviceClassDEVICE_UPLINK)
	DeviceClassCount = uint32(abiDeviceClassDEVICE_CLASS_COUNT)
)

// EgressUse tells the egress programs of a device class whether any flow needs
// them. It is the egress_use map in this process' memory: programs write the
// time (nanoseconds since boot) at which they put or saw such a flow.
type EgressUse struct {
	memory []byte
}

func mapEgressUse(m *ebpf.Map) (*EgressUse, error) {
	memory, err := unix.Mmap(m.FD(), 0, int(DeviceClassCount)*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: memory: %w", NameEgressUse, err)
	}

	return &EgressUse{memory: memory}, nil
}

func (u *EgressUse) word(class uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&u.memory[class*8]))
}

// Load returns when a class was last used, or zero if it is not in use.
func (u *EgressUse) Load(class uint32) uint64 { return atomic.LoadUint64(u.word(class)) }

// Mark says that a flow needs the class, as programs do.
func (u *EgressUse) Mark(class uint32, now uint64) { atomic.StoreUint64(u.word(class), now) }

// Clear says that no flow needs the class, unless a program has seen one since
// Load returned seen.
func (u *EgressUse) Clear(class uint32, seen uint64) bool {
	return atomic.CompareAndSwapUint64(u.word(class), seen, 0)
}

func (u *EgressUse) close() error {
	if u == nil || u.memory == nil {
		return nil
	}
	err := unix.Munmap(u.memory)
	u.memory = nil

	return err
}
