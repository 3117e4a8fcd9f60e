package lab

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offload is what a device may leave to others: to the hardware of a real one,
// to the receiver of a virtual one.
type Offload int

// Each is a feature of ethtool(8). What is off for a device is done by the kernel before
// the packet gets there, and checked after it has come.
const (
	Checksums       Offload = iota // tx: without, packets have their checksums
	Segmentation                   // tso: TCP, by the device
	LateSplitting                  // gso: of anything, at last before the device
	EarlyCoalescing                // gro: packets that came are joined
)

// ethtool's numbers for setting each.
var offloadCommands = map[Offload]uint32{
	Checksums:       unix.ETHTOOL_STXCSUM,
	Segmentation:    unix.ETHTOOL_STSO,
	LateSplitting:   unix.ETHTOOL_SGSO,
	EarlyCoalescing: unix.ETHTOOL_SGRO,
}

// SetOffload switches an offload of a device on or off. Without Checksums there
// is no Segmentation either.
func (ns *Namespace) SetOffload(device string, offload Offload, on bool) error {
	value := struct{ command, data uint32 }{command: offloadCommands[offload]}
	if on {
		value.data = 1
	}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], device)

	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(fd)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		if errno != 0 {
			return os.NewSyscallError("ioctl", errno)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("offload of %s in %s: %w", device, ns.name, err)
	}

	return nil
}
