package connections

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// owners are the processes and pods of sockets.
type owners struct {
	processes map[uint64]Process // by the inode number of a socket
	pods      map[uint64]string  // UIDs, by the id of a cgroup
	names     map[string]string  // NAMESPACE/NAME, by UID
}

// findOwners looks for the owners of these connections.
func findOwners(all []Connection, cfg Config) (owners, error) {
	wanted := make(map[uint64]bool)
	for _, c := range all {
		if c.sock.Inode != 0 {
			wanted[c.sock.Inode] = true
		}
	}
	if len(all) == 0 {
		return owners{}, nil
	}
	processes, processesErr := findProcesses(wanted)
	pods, podsErr := podsByCgroup(cfg.CgroupRoot)
	names, namesErr := podNames(cfg.PodLogs)

	return owners{processes, pods, names}, errors.Join(processesErr, podsErr, namesErr)
}

// describe adds its owners to a connection.
func (o owners) describe(c *Connection) {
	if p, ok := o.processes[c.sock.Inode]; ok && c.sock.Inode != 0 {
		c.Process = &p
	}
	c.PodUID = o.pods[c.sock.Cgroup]
	c.Pod = o.names[c.PodUID]
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
				found[inode] = Process{PID: pid, Command: strings.TrimSpace(string(comm))}
			}
		}
		folder.Close()
	}

	return found, nil
}

// podsByCgroup returns the UIDs of pods by the ids of their cgroups below root, and of those below these.
func podsByCgroup(root string) (map[uint64]string, error) {
	pods := make(map[uint64]string)
	uids := make(map[string]string) // by path
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		if err != nil || !entry.IsDir() {
			return err
		}
		uid := podUID(entry.Name())
		if uid == "" {
			uid = uids[filepath.Dir(path)]
		}
		if uid == "" {
			return nil
		}
		uids[path] = uid
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil {
			pods[stat.Ino] = uid
		}

		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("cgroups of pods: %w", err)
	}

	return pods, nil
}

// The lengths of the UID of a pod, and of that of a static pod, which is a hash of its manifest.
const (
	uidLength       = 36
	staticUIDLength = 32
)

// podUID returns the UID in the name of a pod's cgroup, as the kubelet makes it, else "".
func podUID(cgroup string) string {
	name := strings.TrimSuffix(cgroup, ".slice")
	at := strings.LastIndex(name, "pod")
	if at < 0 {
		return ""
	}
	uid := strings.ReplaceAll(name[at+len("pod"):], "_", "-")
	if len(uid) != uidLength && len(uid) != staticUIDLength {
		return ""
	}

	return uid
}

// podNames returns NAMESPACE/NAME of the pods of this node by their UIDs, from the folders of their logs,
// which are NAMESPACE_NAME_UID. It is empty where there are none.
func podNames(logs string) (map[string]string, error) {
	names := make(map[string]string)
	entries, err := os.ReadDir(logs)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return names, nil
	}
	if err != nil {
		return nil, fmt.Errorf("folders of the pods' logs: %w", err)
	}
	for _, entry := range entries {
		if parts := strings.Split(entry.Name(), "_"); len(parts) == 3 {
			names[parts[2]] = parts[0] + "/" + parts[1]
		}
	}

	return names, nil
}
