package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
)

// Foreign is a program of another owner at a hook that Sluice uses, or before one.
type Foreign struct {
	// Hook is where it is, as "connect4" or "eth0 ingress".
	Hook string
	// Program is its name, or its number.
	Program string
	// Excludes is set if it was attached so that no other program can be attached there.
	Excludes bool
	// Ahead is set if it is at a device and runs before the program of Sluice, or would if that
	// were attached now.
	Ahead bool
}

// ForeignInCgroup returns the programs of others that run for sockets in a cgroup, at the hooks of
// Sluice, in the order in which they run.
func ForeignInCgroup(path string) ([]Foreign, error) {
	cgroup, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()
	var all []Foreign
	for _, hook := range bpf.SockHooks() {
		result, err := link.QueryPrograms(link.QueryOptions{
			Target: int(cgroup.Fd()), Attach: hook.Attach, QueryFlags: unix.BPF_F_QUERY_EFFECTIVE,
		})
		if errors.Is(err, unix.EINVAL) {
			continue // an older kernel does not have the hook
		}
		if err != nil {
			return nil, fmt.Errorf("hook %s: %w", hook.Name, err)
		}
		var theirs []Foreign
		for _, program := range result.Programs {
			if name := programName(program.ID); !strings.HasPrefix(name, programPrefix) {
				theirs = append(theirs, Foreign{Hook: hook.Name, Program: name})
			}
		}
		if len(theirs) > 0 {
			excluded, err := excludesOthers(path, hook.Attach)
			if err != nil {
				return nil, fmt.Errorf("hook %s: %w", hook.Name, err)
			}
			for i := range theirs {
				theirs[i].Excludes = excluded
			}
		}
		all = append(all, theirs...)
	}

	return all, nil
}

// excludesOthers reports whether a program in a cgroup, or in one above it, was attached so that
// the kernel refuses others in the cgroup.
func excludesOthers(path string, attach ebpf.AttachType) (bool, error) {
	for own := true; ; own = false {
		count, flags, err := attachedWith(path, attach)
		if err != nil {
			return false, err
		}
		switch {
		case flags&unix.BPF_F_ALLOW_MULTI != 0:
			return false, nil
		case count > 0:
			return own || flags&unix.BPF_F_ALLOW_OVERRIDE == 0, nil
		}
		if path = filepath.Dir(path); checkCgroup2(path) != nil {
			return false, nil
		}
	}
}

// attachedWith returns how many programs are attached to a cgroup itself, and with which flags.
func attachedWith(path string, attach ebpf.AttachType) (count, flags uint32, err error) {
	cgroup, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer cgroup.Close()
	query := struct { // of union bpf_attr; package link does not return the flags
		target, attach, queryFlags, attachFlags uint32
		ids                                     uint64
		count, _                                uint32
	}{target: uint32(cgroup.Fd()), attach: uint32(attach)}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&query)), unsafe.Sizeof(query))
	runtime.KeepAlive(cgroup)
	if errno != 0 {
		return 0, 0, fmt.Errorf("query of %s: %w", path, errno)
	}

	return query.count, query.attachFlags, nil
}

// ForeignAtDevices returns the programs and filters of others at these devices of the calling
// thread's network namespace, in the order in which they run. XDP programs, which run before all
// hooks of Sluice, are among them.
func ForeignAtDevices(indices []int) ([]Foreign, error) {
	qdiscs, err := listQdiscs()
	if err != nil {
		return nil, err
	}
	var all []Foreign
	for _, index := range indices {
		device, err := netlink.LinkByIndex(index)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("device %d: %w", index, err)
		}
		name := device.Attrs().Name
		if xdp := device.Attrs().Xdp; xdp != nil && xdp.Attached {
			all = append(all, Foreign{Hook: name + " xdp", Program: programName(ebpf.ProgramID(xdp.ProgId)), Ahead: true})
		}
		if kind := qdiscs[index]; kind != "" && kind != "clsact" {
			all = append(all, Foreign{Hook: name + " ingress", Program: "qdisc " + kind, Excludes: true})
		}
		for _, hook := range slices.Backward(deviceHooks()) {
			chain, err := chainAt(index, hook, qdiscs[index])
			if err != nil {
				return nil, fmt.Errorf("device %s: %s: %w", name, hook.name, err)
			}
			at := slices.IndexFunc(chain, attached.isOurs)
			for i, a := range chain {
				if !a.isOurs() {
					ahead := i < at || at < 0 && !hook.isFirst()
					all = append(all, Foreign{Hook: name + " " + hook.name, Program: a.String(), Ahead: ahead})
				}
			}
		}
	}

	return all, nil
}
