package connections

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
)

// The kubelet's names of a pod's cgroup, with cgroupfs, with systemd, and of a static pod.
func TestPodUID(t *testing.T) {
	const uid, static = "0e4f2b6e-6d0a-4c1f-9a57-93d1f0f0a001", "5f1a0c7d3e9b46f28a6d1b2c3d4e5f60"
	for name, want := range map[string]string{
		"pod" + uid: uid,
		"kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice": uid,
		"kubepods-pod" + static + ".slice":                                      static,
		"kubepods-besteffort.slice":                                             "",
		"podman-1234.scope":                                                     "",
		"cri-containerd-" + static + static + ".scope":                          "",
	} {
		if got := podUID(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// Containers have cgroups below that of their pod.
func TestPodsByCgroup(t *testing.T) {
	const uid = "0e4f2b6e-6d0a-4c1f-9a57-93d1f0f0a001"
	root := t.TempDir()
	ids := make(map[string]uint64)
	for _, path := range []string{"kubepods/pod" + uid, "kubepods/pod" + uid + "/container/child", "system.slice"} {
		if err := os.MkdirAll(filepath.Join(root, path), 0o755); err != nil {
			t.Fatal(err)
		}
		var stat unix.Stat_t
		if err := unix.Stat(filepath.Join(root, path), &stat); err != nil {
			t.Fatal(err)
		}
		ids[path] = stat.Ino
	}
	pods, err := podsByCgroup(root)
	if err != nil {
		t.Fatal(err)
	}
	for path, id := range ids {
		want := ""
		if strings.Contains(path, uid) {
			want = uid
		}
		if pods[id] != want {
			t.Errorf("%s: %q, want %q", path, pods[id], want)
		}
	}
	if _, err := podsByCgroup(filepath.Join(root, "nosuch")); err != nil {
		t.Errorf("a cgroup that was removed: %v", err)
	}
}

func TestPodNames(t *testing.T) {
	logs := t.TempDir()
	for _, name := range []string{"shop_web-0_0e4f2b6e", "kube-system_etcd-node-1_5f1a", "lost+found"} {
		if err := os.Mkdir(filepath.Join(logs, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got, err := podNames(logs)
	if diff := cmp.Diff(map[string]string{"0e4f2b6e": "shop/web-0", "5f1a": "kube-system/etcd-node-1"}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if got, err := podNames(filepath.Join(logs, "nosuch")); len(got) != 0 || err != nil {
		t.Errorf("without such a folder: %v, %v", got, err)
	}
}

// A socket of this process is found by its inode number, and others are not looked for.
func TestProcesses(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		t.Fatal(err)
	}
	got, err := findProcesses(map[uint64]bool{stat.Ino: true, 1: true})
	comm, _ := os.ReadFile("/proc/self/comm")
	want := map[uint64]Process{stat.Ino: {PID: os.Getpid(), Command: strings.TrimSpace(string(comm))}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// What is largest comes first, and what has no age last.
func TestSort(t *testing.T) {
	of := func(service string, sent, since uint64) Connection {
		return Connection{Service: service, sock: maps.TranslatedSock{BytesSent: sent, State: maps.SockState{Since: since}}}
	}
	all := []Connection{of("b", 1, 0), of("a", 2, 30), of("c", 2, 20)}
	for order, want := range map[string]string{"service": "abc", "sent": "acb", "age": "cab"} {
		if err := Sort(all, order); err != nil {
			t.Fatal(err)
		}
		if got := all[0].Service + all[1].Service + all[2].Service; got != want {
			t.Errorf("by %s: %s, want %s", order, got, want)
		}
	}
}

func TestStates(t *testing.T) {
	want := "established, syn-sent, fin-wait-1, fin-wait-2, close-wait, last-ack, closing, connected, unconnected"
	if got := joined(States()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
