package pods

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

const (
	web    = "0f6c2d5e-6b0b-4b1f-9f0e-1d2c3b4a5968"
	dns    = "7a1b2c3d-0000-4e4e-8f8f-a1b2c3d4e5f6"
	static = "1234567890abcdef1234567890abcdef"
)

// mustTree writes files, and links that begin with "-> ".
func mustTree(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		lab.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		var err error
		if len(content) > 3 && content[:3] == "-> " {
			err = os.Symlink(content[3:], path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		lab.Must(t, err)
	}

	return root
}

// Pods are found by the cgroups that systemd and cgroupfs make, also by those of their containers, and
// by the addresses of their own network namespaces.
func TestRead(t *testing.T) {
	systemd := "cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f6c2d5e_6b0b_4b1f_9f0e_1d2c3b4a5968.slice"
	cgroupfs := "cgroup/kubepods/besteffort/pod" + dns
	root := mustTree(t, map[string]string{
		systemd + "/cgroup.procs":                          "",
		systemd + "/cri-containerd-1.scope/cgroup.procs":   "11\n12\n",
		cgroupfs + "/container/cgroup.procs":               "13\n",
		"cgroup/kubepods/pod" + static + "/cgroup.procs":   "14\n",
		"cgroup/system.slice/kubelet.service/cgroup.procs": "15\n",
		"cgroup/podman/cgroup.procs":                       "16\n",
		"logs/shop_web-1_" + web + "/app/0.log":            "",
		"logs/kube-system_proxy_" + static + "/app/0.log":  "",
		"proc/self/ns/net":                                 "-> net:[1]",
		"proc/11/ns/net":                                   "-> net:[2]",
		"proc/11/net/fib_trie":                             "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.244.1.0\n        /24 link UNICAST\n     |-- 10.244.1.2\n        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.244.1.255\n        /32 link BROADCAST\n",
		"proc/11/net/if_inet6":                             "fd000010024400010000000000000002 02 40 00 80 eth0\nfe800000000000000000000000000001 02 40 20 80 eth0\n00000000000000000000000000000001 01 80 10 80 lo\n",
		"proc/13/ns/net":                                   "-> net:[3]",
		"proc/13/net/fib_trie":                             "     |-- 10.244.1.3\n        /32 host LOCAL\n",
		"proc/14/ns/net":                                   "-> net:[1]",
		"proc/14/net/fib_trie":                             "     |-- 192.168.50.1\n        /32 host LOCAL\n",
	})
	all, err := Read(Config{CgroupRoot: filepath.Join(root, "cgroup"), Logs: filepath.Join(root, "logs"), Proc: filepath.Join(root, "proc")})
	lab.Must(t, err)
	for folder, want := range map[string]Pod{
		systemd: {web, "shop/web-1"}, systemd + "/cri-containerd-1.scope": {web, "shop/web-1"},
		cgroupfs: {UID: dns}, cgroupfs + "/container": {UID: dns},
		"cgroup/kubepods/pod" + static:        {static, "kube-system/proxy"},
		"cgroup/system.slice/kubelet.service": {}, "cgroup/podman": {}, "cgroup": {},
	} {
		var stat unix.Stat_t
		lab.Must(t, unix.Stat(filepath.Join(root, folder), &stat))
		if got := all.ByCgroup(stat.Ino); got != want {
			t.Errorf("%s is of %v, want %v", folder, got, want)
		}
	}
	wantAddrs := map[netip.Addr]Pod{
		netip.MustParseAddr("10.244.1.2"): {web, "shop/web-1"}, netip.MustParseAddr("fd00:10:244:1::2"): {web, "shop/web-1"},
		netip.MustParseAddr("10.244.1.3"): {UID: dns},
	}
	sameAddr := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if diff := cmp.Diff(wantAddrs, all.byAddr, sameAddr); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	named := []Place{{Pod: Pod{web, "shop/web-1"}, Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("fd00:10:244:1::2")}}}
	for text, want := range map[string][]Place{
		"web-1": named, "shop/web-1": named, web: named,
		dns:     {{Pod: Pod{UID: dns}, Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.3")}}},
		"proxy": {{Pod: Pod{static, "kube-system/proxy"}, Host: true}},
	} {
		got, err := all.Find(text)
		if diff := cmp.Diff(want, got, sameAddr); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", text, err, diff)
		}
	}
	for _, text := range []string{"web", "other/web-1", "shop/", ""} {
		if _, err := all.Find(text); !errors.Is(err, ErrNoPod) {
			t.Errorf("%q, which no pod is called: %v", text, err)
		}
	}
}

// The pod of a process is that of its cgroup, whichever driver made it.
func TestUIDIn(t *testing.T) {
	for cgroups, want := range map[string]string{
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f6c2d5e_6b0b_4b1f_9f0e_1d2c3b4a5968.slice/cri-containerd-1.scope\n": web,
		"4:memory:/user.slice\n0::/kubepods/besteffort/pod" + dns + "/1a2b\n":                                                                   dns,
		"0::/kubepods/pod" + static + "\n":                static,
		"0::/system.slice/podman-restart.service\n0::/\n": "",
	} {
		if got := UIDIn(cgroups); got != want {
			t.Errorf("%q is of pod %q, want %q", cgroups, got, want)
		}
	}
}

// A pod can be found by its name only where names are known, and by its UID anywhere. One that is not there is an error,
// or a list of what it does would be taken for that of a pod that does nothing.
func TestCheck(t *testing.T) {
	unnamed := Pods{byCgroup: map[uint64]Pod{1: {UID: web}, 2: {UID: dns}}}
	named := Pods{byCgroup: map[uint64]Pod{1: {UID: web, Name: "shop/web-1"}, 2: {UID: dns}}}
	for _, test := range []struct {
		node string
		pods Pods
		pod  string
		want error
	}{
		{"without names", unnamed, "shop/web-1", ErrNoNames},
		{"without names", unnamed, "web-1", ErrNoNames},
		{"without names", unnamed, web, nil},
		{"without names", unnamed, static, ErrNoPod},
		{"with a name", named, "shop/web-1", nil},
		{"with a name", named, "shop/web-2", ErrNoPod},
		{"without pods", Pods{}, "web-1", ErrNoPod},
	} {
		if err := test.pods.Check(test.pod); !errors.Is(err, test.want) || (err == nil) != (test.want == nil) {
			t.Errorf("%q on a node %s: %v, want %v", test.pod, test.node, err, test.want)
		}
	}
}

// A process can give itself any name, also one that a terminal would obey.
func TestCommand(t *testing.T) {
	for comm, want := range map[string]string{
		"curl\x00\x00junk": "curl", "nginx: worker\n": "nginx: worker", "\x1b[2J\tx": "?[2J?x", "b\xc3\xa4r": "bär", "\xff\u202eo": "??o",
	} {
		if got := Command([]byte(comm)); got != want {
			t.Errorf("%q is shown as %q, want %q", comm, got, want)
		}
	}
}

// A pod that starts later is found, but not by reading everything for each unknown address.
func TestCacheReadsAgain(t *testing.T) {
	root := mustTree(t, map[string]string{"cgroup/kubepods/cgroup.procs": "", "logs/none": ""})
	c := NewCache(Config{CgroupRoot: filepath.Join(root, "cgroup"), Logs: filepath.Join(root, "logs")})
	if pod, err := c.Pod(1, netip.Addr{}); err != nil || pod != (Pod{}) {
		t.Fatalf("%v, %v", pod, err)
	}
	started := filepath.Join(root, "cgroup/kubepods/pod"+web)
	lab.Must(t, os.Mkdir(started, 0o755))
	var stat unix.Stat_t
	lab.Must(t, unix.Stat(started, &stat))
	if pod, err := c.Pod(stat.Ino, netip.Addr{}); err != nil || pod != (Pod{}) {
		t.Errorf("everything was read again at once: %v, %v", pod, err)
	}
	c.read = c.read.Add(-readAgain)
	if pod, err := c.Pod(stat.Ino, netip.Addr{}); err != nil || pod.UID != web {
		t.Errorf("%v, %v", pod, err)
	}
	lab.Must(t, os.RemoveAll(filepath.Join(root, "cgroup")))
	if pod, err := c.Pod(stat.Ino, netip.Addr{}); err != nil || pod.UID != web {
		t.Errorf("a known pod is read again: %v, %v", pod, err)
	}
}
