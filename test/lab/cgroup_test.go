package lab

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestCgroupCloseEndsWhatIsInside(t *testing.T) {
	cgroup := MustCgroup(t, "close")
	child, err := cgroup.Child("child")
	Must(t, err)
	sleep := exec.Command("sleep", "60")
	Must(t, Start(nil, child, sleep))
	if pids, err := child.Processes(); len(pids) != 1 || err != nil {
		t.Errorf("processes are %v, %v, want one", pids, err)
	}

	Must(t, cgroup.Close())
	if err := sleep.Wait(); err == nil {
		t.Error("sleep ended by itself, want it killed")
	}
	if _, err := os.Stat(cgroup.Path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v, want no such file", cgroup.Path(), err)
	}
	if err := child.Close(); err != nil {
		t.Errorf("close of a child that went with its parent: %v", err)
	}
}

func TestCgroupHasTheKernelsNumber(t *testing.T) {
	one, other := MustCgroup(t, "one"), MustCgroup(t, "other")
	first, err := one.ID()
	Must(t, err)
	second, err := other.ID()
	Must(t, err)
	if first == 0 || first == second {
		t.Errorf("ids are %d and %d", first, second)
	}
}

func TestOutputComesFromNamespaceAndCgroup(t *testing.T) {
	ns, cgroup := MustNamespace(t, "output"), MustCgroup(t, "output")

	out, err := Output(ns, cgroup, "sh", "-c", "readlink /proc/self/ns/net; cat /proc/self/cgroup")
	Must(t, err)
	var inside string
	MustDo(t, ns, func() error {
		inside = currentNetns(t)
		return nil
	})
	if want := inside + "\n"; !strings.HasPrefix(out, want) {
		t.Errorf("namespace is not %s: %s", want, out)
	}
	if want := "0::/" + strings.TrimPrefix(cgroup.Path(), mustCgroupRoot(t)+"/") + "\n"; !strings.Contains(out, want) {
		t.Errorf("cgroup is not %s: %s", want, out)
	}
	if _, err := Output(ns, nil, "sh", "-c", "echo why >&2; false"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("error is %v, want it to say why", err)
	}
}

func mustCgroupRoot(t testing.TB) string {
	t.Helper()
	root, err := CgroupRoot()
	Must(t, err)

	return root
}
