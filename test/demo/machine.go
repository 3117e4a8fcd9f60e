package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

const bpffs = "/sys/fs/bpf"

// checkMachine returns an error that names what the machine lacks. `make demo` sees to
// most of it.
func checkMachine(binary string) error {
	if os.Geteuid() != 0 {
		return errors.New("only root may make network namespaces and load BPF programs: run it as root (sudo make demo)")
	}
	if info, err := os.Stat(binary); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("there is no program %s to show: `make demo` builds it, and -sluice takes another one", binary)
	}
	if _, err := lab.CgroupRoot(); err != nil {
		return fmt.Errorf("cgroup v2 is mounted nowhere, and its sockets are what Sluice attaches to: `make demo` mounts it, as does `mount -t cgroup2 none /sys/fs/cgroup` (%w)", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(bpffs, &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("there is no BPF file system at %s, and Sluice keeps its maps there: `make demo` mounts it, as does `mount -t bpf bpf %s`", bpffs, bpffs)
	}

	return nil
}
