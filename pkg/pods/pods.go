// Package pods knows the pods of this node by what the node itself has of them: their cgroups, the
// kubelet's folders of their logs, and the addresses in their network namespaces. It takes neither an
// agent nor the API server.
package pods

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// DefaultLogs is the kubelet's folder of logs as the host has it, also for a container that shares the
// process namespace of the node.
const DefaultLogs = "/proc/1/root/var/log/pods"

// Config is where [Read] looks.
type Config struct {
	CgroupRoot string // a folder of cgroup2 that has the cgroups of pods below it
	Logs       string // has a folder for each pod, NAMESPACE_NAME_UID; only [DefaultLogs] may be missing, and empty is none
	Proc       string // has the node's processes; empty: /proc
}

// Pod is a pod of this node.
type Pod struct {
	UID  string
	Name string // NAMESPACE/NAME; empty if it is not known
}

// Is reports whether a text names the pod: as NAMESPACE/NAME, NAME or UID.
func (p Pod) Is(text string) bool {
	_, short, _ := strings.Cut(p.Name, "/")

	return text != "" && (text == p.UID || text == p.Name || text == short)
}

// Pods are the pods of this node at one moment.
type Pods struct {
	byCgroup map[uint64]Pod
	byAddr   map[netip.Addr]Pod
	onHost   map[Pod]bool // those with the network of the node
}

// ByCgroup returns the pod that has a cgroup, the zero Pod for a process of the node.
func (p Pods) ByCgroup(id uint64) Pod { return p.byCgroup[id] }

// ByAddr returns the pod that has an address of its own, the zero Pod for any other address.
func (p Pods) ByAddr(addr netip.Addr) Pod { return p.byAddr[addr] }

// Place is a pod, and where its sockets are.
type Place struct {
	Pod
	Addrs []netip.Addr // its own; none if it has not begun, or if this process may not see them
	Host  bool         // it has the network of the node
}

// Find returns the pods that a text names, see [Pod.Is], at least one. The error is that of [Pods.Check].
func (p Pods) Find(text string) ([]Place, error) {
	if err := p.Check(text); err != nil {
		return nil, err
	}
	found := make(map[Pod]*Place)
	for _, pod := range p.byCgroup {
		if pod.Is(text) {
			found[pod] = &Place{Pod: pod, Host: p.onHost[pod]}
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(p.byAddr), netip.Addr.Compare) {
		if place := found[p.byAddr[addr]]; place != nil {
			place.Addrs = append(place.Addrs, addr)
		}
	}
	var places []Place
	for _, place := range found {
		places = append(places, *place)
	}

	return places, nil
}

// ErrNoNames is the error of a search for a pod by its name on a node of whose pods only the UIDs are known.
var ErrNoNames = errors.New("this node does not know the names of pods: use the UID, or hostProcesses of the chart")

// ErrNoPod is the error of a search for a pod that is not on this node.
var ErrNoPod = errors.New("this node has no such pod")

// Check returns nil if this node has a pod that is given as NAMESPACE/NAME, NAME or UID. If it has none, the error
// wraps [ErrNoPod], or [ErrNoNames] if that cannot be known.
func (p Pods) Check(text string) error {
	named := len(p.byCgroup) == 0 || IsUID(text)
	for _, pod := range p.byCgroup {
		if pod.Is(text) {
			return nil
		}
		named = named || pod.Name != ""
	}
	if !named {
		return fmt.Errorf("pod %q: %w", text, ErrNoNames)
	}

	return fmt.Errorf("pod %q: %w", text, ErrNoPod)
}

// Read reads the pods of this node. What this process may not see is left out: without the node's
// processes and CAP_SYS_PTRACE there are neither names nor addresses.
func Read(cfg Config) (Pods, error) {
	if cfg.Proc == "" {
		cfg.Proc = "/proc"
	}
	names, err := Names(cfg.Logs)
	if err != nil {
		return Pods{}, err
	}
	all := Pods{byCgroup: make(map[uint64]Pod), byAddr: make(map[netip.Addr]Pod), onHost: make(map[Pod]bool)}
	owners := make(map[string]string) // the UID of the pod that has a folder
	err = filepath.WalkDir(cfg.CgroupRoot, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		if err != nil || !entry.IsDir() {
			return err
		}
		uid := uidOf(entry.Name())
		if uid == "" {
			uid = owners[filepath.Dir(path)] // a container of the pod
		}
		var stat unix.Stat_t
		if uid == "" || unix.Stat(path, &stat) != nil {
			return nil
		}
		owners[path] = uid
		pod := Pod{UID: uid, Name: names[uid]}
		all.byCgroup[stat.Ino] = pod
		addrs, onHost := addrsIn(cfg.Proc, path)
		for _, addr := range addrs {
			all.byAddr[addr] = pod
		}
		if onHost {
			all.onHost[pod] = true
		}

		return nil
	})
	if err != nil {
		return Pods{}, fmt.Errorf("cgroups of pods: %w", err)
	}

	return all, nil
}

// IsUID reports whether a text is the UID of a pod: hexadecimal digits, 32 of a static pod, whose UID is a
// hash, and those with four hyphens of any other.
func IsUID(text string) bool {
	hyphens := strings.Count(text, "-")
	digits, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))

	return err == nil && len(digits) == 16 && (hyphens == 0 || hyphens == 4)
}

// uidOf returns the UID of the pod whose cgroup a folder is, empty if it is none. Systemd makes it
// "kubepods-burstable-podUID.slice", with underscores, and cgroupfs "podUID".
func uidOf(folder string) string {
	name := strings.TrimSuffix(folder, ".slice")
	at := strings.LastIndex(name, "pod")
	if at < 0 {
		return ""
	}
	uid := strings.ReplaceAll(name[at+len("pod"):], "_", "-")
	if !IsUID(uid) {
		return ""
	}

	return uid
}

// UIDIn returns the UID of the pod of a process by /proc/PID/cgroup, which lists the paths of its cgroups; empty
// if it is of none.
func UIDIn(cgroups string) string {
	for folder := range strings.FieldsFuncSeq(cgroups, func(r rune) bool { return r == '/' || r == '\n' }) {
		if uid := uidOf(folder); uid != "" {
			return uid
		}
	}

	return ""
}

// Names returns the names of pods, as NAMESPACE/NAME, by their UIDs. There are none where this process may not look.
func Names(logs string) (map[string]string, error) {
	names := make(map[string]string)
	folders, err := os.ReadDir(logs)
	if errors.Is(err, fs.ErrNotExist) && (logs == "" || logs == DefaultLogs) || errors.Is(err, fs.ErrPermission) {
		return names, nil
	}
	if err != nil {
		return nil, fmt.Errorf("logs of pods: %w", err)
	}
	for _, folder := range folders {
		if parts := strings.Split(folder.Name(), "_"); len(parts) == 3 {
			names[parts[2]] = parts[0] + "/" + parts[1]
		}
	}

	return names, nil
}

// Cache are the pods of this node, which are read again when an unknown one is asked for. One
// goroutine may use it.
type Cache struct {
	cfg  Config
	pods Pods
	read time.Time
}

// NewCache returns a cache that has read nothing yet.
func NewCache(cfg Config) *Cache { return &Cache{cfg: cfg} }

// Pods are read again at most each readAgain, if one is unknown, and at the latest after trusted,
// because another pod may have its address by then.
const (
	readAgain = 5 * time.Second
	trusted   = time.Minute
)

// Pod returns the pod that has a cgroup, or else the one that has an address.
func (c *Cache) Pod(cgroup uint64, addr netip.Addr) (Pod, error) {
	known := func() Pod {
		if pod := c.pods.ByCgroup(cgroup); pod != (Pod{}) {
			return pod
		}

		return c.pods.ByAddr(addr)
	}
	age := time.Since(c.read)
	if pod := known(); age < readAgain || pod != (Pod{}) && age < trusted {
		return pod, nil
	}
	if err := c.readPods(); err != nil {
		return Pod{}, err
	}

	return known(), nil
}

// Check is [Pods.Check] of the pods of this moment.
func (c *Cache) Check(pod string) error {
	if err := c.readPods(); err != nil {
		return err
	}

	return c.pods.Check(pod)
}

func (c *Cache) readPods() error {
	pods, err := Read(c.cfg)
	if err == nil {
		c.pods, c.read = pods, time.Now()
	}

	return err
}

// Command returns the name of a process, as the kernel has it, for terminals and lists: the process chooses its
// bytes, and those that are not printable are replaced by question marks.
func Command(comm []byte) string {
	text, _, _ := strings.Cut(strings.TrimSpace(string(comm)), "\x00")

	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}

		return r
	}, text)
}

// addrsIn returns the addresses in the network namespace of the first process of a cgroup, or that it is the
// namespace of this process: then the pod has the network of the node.
func addrsIn(proc, cgroup string) (addrs []netip.Addr, onHost bool) {
	processes, err := os.ReadFile(filepath.Join(cgroup, "cgroup.procs"))
	first, _, ok := bytes.Cut(processes, []byte("\n"))
	if err != nil || !ok {
		return nil, false
	}
	of := filepath.Join(proc, string(first))
	own, errOwn := os.Readlink(filepath.Join(proc, "self/ns/net"))
	its, errIts := os.Readlink(filepath.Join(of, "ns/net"))
	if errOwn != nil || errIts != nil {
		return nil, false // it has ended, or is not for this process to see
	}
	if own == its {
		return nil, true
	}

	return append(addrs4(filepath.Join(of, "net/fib_trie")), addrs6(filepath.Join(of, "net/if_inet6"))...), false
}

// addrs4 returns the local addresses of a table of routes: a line with the address, then one that
// says what it is.
func addrs4(path string) (addrs []netip.Addr) {
	table, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var last netip.Addr
	for line := range strings.Lines(string(table)) {
		line = strings.TrimSpace(line)
		if text, ok := strings.CutPrefix(line, "|-- "); ok {
			last, _ = netip.ParseAddr(text)
		} else if line == "/32 host LOCAL" && last.IsValid() && !last.IsLoopback() {
			addrs = append(addrs, last)
		}
	}

	return addrs
}

// addrs6 returns the global addresses of a list: in hexadecimal digits, index, prefix length, scope.
func addrs6(path string) (addrs []netip.Addr) {
	const global = "00"
	list, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(list)) {
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[3] != global {
			continue
		}
		if b, err := hex.DecodeString(fields[0]); err == nil && len(b) == 16 {
			addrs = append(addrs, netip.AddrFrom16([16]byte(b)))
		}
	}

	return addrs
}
