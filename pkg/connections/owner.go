package connections

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/pods"
)

// describeOwners adds the pods and processes to connections. If a pod is wanted that this node does not have, the error
// is that of [pods.Pods.Check].
func describeOwners(all []Connection, cfg pods.Config, wantedPod string) error {
	if len(all) == 0 && wantedPod == "" {
		return nil
	}
	known, err := pods.Read(cfg)
	if err == nil && wantedPod != "" {
		err = known.Check(wantedPod)
	}
	if err != nil {
		return err
	}
	wanted := make(map[uint64]bool)
	for _, c := range all {
		if c.sock.Inode != 0 {
			wanted[c.sock.Inode] = true
		}
	}
	processes, err := findProcesses(wanted)
	if err != nil {
		return err
	}
	for i := range all {
		c := &all[i]
		if p, ok := processes[c.sock.Inode]; ok {
			c.Process = &p
		}
		pod := known.ByCgroup(c.sock.Cgroup)
		c.Pod, c.PodUID = pod.Name, pod.UID
	}

	return nil
}

// findProcesses returns the processes that have sockets with these inode numbers open, as far as this
// process may see them: that takes the node's /proc and CAP_SYS_PTRACE.
func findProcesses(wanted map[uint64]bool) (map[uint64]Process, error) {
	found := make(map[uint64]Process)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("processes: %w", err)
	}
	var pids []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	target := make([]byte, len("socket:[]")+len("18446744073709551615"))
	for _, pid := range pids {
		if len(found) == len(wanted) {
			break
		}
		// A process may have ended, and those of other users may be out of reach.
		folder, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
		if err != nil {
			continue
		}
		files, _ := folder.Readdirnames(-1)
		for _, file := range files {
			n, err := unix.Readlinkat(int(folder.Fd()), file, target)
			if err != nil {
				continue
			}
			text, isSocket := strings.CutPrefix(string(target[:n]), "socket:[")
			if !isSocket {
				continue
			}
			inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64)
			if _, known := found[inode]; err == nil && wanted[inode] && !known {
				comm, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
				found[inode] = Process{PID: pid, Command: pods.Command(comm)}
			}
		}
		folder.Close()
	}

	return found, nil
}
