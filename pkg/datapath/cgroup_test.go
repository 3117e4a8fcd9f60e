package datapath

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestContains(t *testing.T) {
	for _, test := range []struct {
		name          string
		cgroup, other string
		want          bool
	}{
		{"itself", "/", "/", true},
		{"itself, below", "/a/b", "/a/b", true},
		{"a child of the namespace's root", "/", "/a", true},
		{"a child", "/a", "/a/b", true},
		{"not its parent", "/a", "/", false},
		{"not a sibling", "/a", "/b", false},
		{"not one with the same prefix in its name", "/a", "/ab", false},
		{"from above the namespace, its root", "/..", "/", true},
		{"from far above, what is below the namespace's root", "/../../..", "/a/b", true},
		{"from far above, a neighbour", "/../../..", "/../a", true},
		{"from above, itself", "/../..", "/../..", true},
		{"from above, not what is further above", "/..", "/../..", false},
		{"from above, not what is beside that", "/..", "/../../a", false},
		{"of a neighbour, a child", "/../a", "/../a/b", true},
		{"of a neighbour, not the namespace's root", "/../a", "/", false},
		{"of a neighbour far above, not the parent of the namespace's root", "/../../a", "/..", false},
		{"of the namespace's root, not a neighbour", "/", "/../a", false},
	} {
		if got := contains(test.cgroup, test.other); got != test.want {
			t.Errorf("%s: %q contains %q: got %t", test.name, test.cgroup, test.other, got)
		}
	}
}

func TestWidestCgroup(t *testing.T) {
	for _, test := range []struct {
		name   string
		mounts string // relative paths in the order of mountinfo; ! is the root of cgroup2
		want   string
	}{
		{"the only one", "/", "/"},
		{"a pod on a node with systemd's unified layout", "/ !/../../..", "!/../../.."},
		{"a pod of the node's namespace on a hybrid layout", "!/", "!/"},
		{"a pod on kind", "/ /../../../..", "/../../../.."},
		{"a pod on kind, the mounts the other way round", "/../../../.. /", "/../../../.."},
		{"a privileged container on kind, which has the node's namespace", "/ /", "/"},
		{"the root of cgroup2 rather than what goes further up", "/../../.. !/..", "!/.."},
		{"a container's own cgroup in the node's namespace, and the node's", "/kubepods/a /", "/"},
		{"what is above the namespace rather than a neighbour", "/../a /b /..", "/.."},
		{"the namespace rather than a neighbour", "/../a /b /", "/"},
		{"parents rather than children", "/a/b /a", "/a"},
		{"the first of what has nothing in common", "/a /b", "/a"},
	} {
		var all []Cgroup
		for _, text := range strings.Fields(test.mounts) {
			relative, root := strings.CutPrefix(text, "!")
			all = append(all, Cgroup{Path: text, Relative: relative, WholeMachine: root})
		}
		if got := widest(all); got.Path != test.want {
			t.Errorf("%s: of %q got %q, want %q", test.name, test.mounts, got.Path, test.want)
		}
	}
}

func TestNotCovered(t *testing.T) {
	for _, test := range []struct {
		cgroup Cgroup
		want   string // the end; "" is nothing
	}{
		{Cgroup{Relative: "/../..", WholeMachine: true}, ""},
		{Cgroup{Relative: "/../.."}, "those of the machine's other containers"},
		{Cgroup{Relative: "/"}, "of the node, which are not translated"},
		{Cgroup{Relative: "/a"}, "what processes of the node send over TCP is not"},
		{Cgroup{Relative: "/../a"}, "what processes of the node send over TCP is not"},
	} {
		got := test.cgroup.NotCovered()
		if (got == "") != (test.want == "") || !strings.HasSuffix(got, test.want) {
			t.Errorf("%+v: got %q, want %q", test.cgroup, got, test.want)
		}
	}
}

func TestParseOwnCgroup(t *testing.T) {
	for _, test := range []struct {
		name, text, want string
		ok               bool
	}{
		{"of a unified layout", "0::/a/b\n", "/a/b", true},
		{"of a hybrid layout", "9:name=systemd:/c\n4:memory:/d\n0::/../a\n", "/../a", true},
		{"that is removed", "0::/a (deleted)\n", "/a", true},
		{"without cgroup2", "4:memory:/d\n", "", false},
	} {
		if got, ok := parseOwnCgroup(test.text); got != test.want || ok != test.ok {
			t.Errorf("%s: got %q, %t, want %q, %t", test.name, got, ok, test.want, test.ok)
		}
	}
}

func TestFindCgroupRoot(t *testing.T) {
	root, err := FindCgroupRoot()
	lab.Must(t, err)
	if err := checkCgroup2(root.Path); err != nil {
		t.Errorf("%+v: %v", root, err)
	}
	if again, err := LookupCgroup(root.Path); again != root {
		t.Errorf("looked up, it is %+v, %v, want %+v", again, err, root)
	}
}

func TestLookupCgroup(t *testing.T) {
	root, err := FindCgroupRoot()
	lab.Must(t, err)
	path := lab.MustCgroup(t, "lookup").Path()
	got, err := LookupCgroup(path)
	lab.Must(t, err)
	name := strings.TrimPrefix(path, root.Path)
	if want := strings.TrimSuffix(root.Relative, "/") + name; got.Path != path || got.Relative != want || got.WholeMachine {
		t.Errorf("got %+v, want %s", got, want)
	}
	if !holdsThisProcess(root.Path) || holdsThisProcess(path) {
		t.Errorf("this process is in %s: %t, and in %s: %t, want the first alone",
			root.Path, holdsThisProcess(root.Path), path, holdsThisProcess(path))
	}
	if got, err := LookupCgroup(path + "/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a cgroup that does not exist, got %+v, %v", got, err)
	}
	if got, err := LookupCgroup("/proc"); err == nil || !strings.Contains(err.Error(), "not on a cgroup2") {
		t.Errorf("of another file system, got %+v, %v", got, err)
	}
}
