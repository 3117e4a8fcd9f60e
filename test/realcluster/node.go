package realcluster

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// startTimeout limits how long a part of the cluster may take to start. It takes
// seconds, but the machine may be compiling.
const startTimeout = 4 * time.Minute

// Node is a node of the lab with a containerd and a kubelet: a process and its
// descendants, in namespaces of their own for mounts, processes, host name, IPC and
// cgroups. What they mount, pin or start goes with the first of them.
type Node struct {
	*lab.Node
	Files string // a folder with what the node writes: logs, images, volumes

	cgroup *lab.Cgroup
	first  *exec.Cmd
	ended  chan struct{} // closed when the first process has ended
}

//go:embed node
var nodeFiles embed.FS

// startNode starts a node. It may still fail to become ready.
func startNode(from *lab.Node, in inside) (*Node, error) {
	n := &Node{Node: from, Files: in.Files, ended: make(chan struct{})}
	for _, folder := range []string{"lib", "log"} {
		if err := os.MkdirAll(filepath.Join(n.Files, folder), 0o755); err != nil {
			return nil, err
		}
	}
	err := writeFiles(nodeFiles, "node", n.Files, map[string]string{
		"FILES": n.Files, "ADDRESS": n.IPv4.String(), "SANDBOX": podImage, "DNS": dnsAddress,
		"SUBNET4": n.PodCIDRs[0].String(), "SUBNET6": n.PodCIDRs[1].String(),
	})
	if err != nil {
		return nil, err
	}
	cgroup, err := lab.NewCgroup("realnode")
	if err != nil {
		return nil, err
	}
	n.cgroup = cgroup
	if in.Cgroups, err = cgroupRoot(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	in.Name, in.Cgroup = n.Name, cgroup.Path()
	in.Address = n.IPv4.String() + "," + n.IPv6.String()
	text, err := json.Marshal(in)
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	n.first = exec.Command("/proc/self/exe")
	n.first.Args[0] = "node"
	n.first.Env = append(os.Environ(), insideVariable+"="+string(text))
	n.first.Stderr = os.Stderr
	n.first.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Setsid:     true, // Ctrl-C is for us
	}
	if err := lab.Start(n.Namespace, n.cgroup, n.first); err != nil {
		n.first = nil
		return nil, errors.Join(err, n.Close())
	}
	go func() {
		_ = n.first.Wait() // it reports its error
		close(n.ended)
	}()

	return n, nil
}

// Close ends all processes of the node, and removes its cgroups. Its network is the
// lab's.
func (n *Node) Close() error {
	if n.first != nil {
		_ = n.first.Process.Kill() // or it has ended
		<-n.ended
	}

	return errors.Join(n.cgroup.Close(), removeV1(filepath.Base(n.cgroup.Path())))
}

// Processes returns the processes of the node with this name, as [unix.Kill] takes them.
func (n *Node) Processes(name string) (pids []int, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	for _, path := range all {
		comm, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(comm)) != name {
			continue // or it has ended
		}
		cgroups, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cgroup"))
		if err != nil || !strings.Contains(string(cgroups), "/"+filepath.Base(n.cgroup.Path())+"/") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(path, "/proc/%d/comm", &pid); err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}

	return pids, nil
}

// cgroupRoot returns where the machine mounts cgroups: v2, or all hierarchies of v1 and
// v2 beside them.
func cgroupRoot() (string, error) {
	root, err := lab.CgroupRoot()

	return strings.TrimSuffix(root, "/unified"), err
}

// hierarchies returns the names of the machine's hierarchies of cgroup v1 there.
func hierarchies(root string) (names []string) {
	files, _ := filepath.Glob(filepath.Join(root, "*", "release_agent")) // which only roots of v1 have
	for _, path := range files {
		names = append(names, filepath.Base(filepath.Dir(path)))
	}

	return names
}

// removeV1 removes the cgroups of v1 with a name, in which there are no processes any
// more. Removing absent ones is not an error.
func removeV1(name string) error {
	root, err := cgroupRoot()
	var all []string
	for _, hierarchy := range hierarchies(root) {
		err = errors.Join(err, filepath.WalkDir(filepath.Join(root, hierarchy, name), func(path string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && entry.IsDir() {
				all = append(all, path)
			}

			return err
		}))
	}
	for _, folder := range slices.Backward(all) {
		err = errors.Join(err, unix.Rmdir(folder))
	}

	return err
}

// writeFiles writes the files of an embedded folder, with the values of what they have
// as ${NAME}.
func writeFiles(from fs.FS, folder, to string, values map[string]string) error {
	return fs.WalkDir(from, folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(filepath.Join(to, relative), 0o755)
		}
		text, err := fs.ReadFile(from, path)
		if err != nil {
			return err
		}

		expanded := os.Expand(string(text), func(name string) string { return values[name] })

		return os.WriteFile(filepath.Join(to, relative), []byte(expanded), 0o644)
	})
}
