package kube

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

var update = flag.Bool("update", false, "rewrite the scripts in testdata with what happens")

// The scripts change a directory of manifests. The command scan reads it and prints the
// calls of the sink.
func TestManifestScripts(t *testing.T) {
	type script struct{}
	type following struct {
		*Manifests
		sink *recorder
	}
	testscript.Run(t, testscript.Params{
		Dir:           "testdata",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			sink := newRecorder()
			m, err := NewManifests(ManifestsConfig{Dir: filepath.Join(env.WorkDir, "manifests"), NodeName: "node1", Sink: sink})
			env.Values[script{}] = following{m, sink}
			return err
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"scan": func(ts *testscript.TestScript, _ bool, _ []string) {
				m := ts.Value(script{}).(following)
				m.scan(true)
				out := ts.Stdout()
				for _, call := range m.sink.take() {
					fmt.Fprintln(out, call)
				}
			},
		},
	})
}

// A small manifest does not wait for large ones that change with it, and none of these waits for ever.
func TestLargeManifestsAreReadInTurns(t *testing.T) {
	dir := t.TempDir()
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	m.scan(true)
	write := func(name string, size int) {
		text := serviceYAML(name, "10.96.0.1")
		mustWrite(t, filepath.Join(dir, name+".yaml"), text+"# "+strings.Repeat("x", size)+"\n")
	}
	scan := func() map[string]bool {
		m.scan(false)
		set := make(map[string]bool)
		for _, call := range sink.take() {
			if name, is := strings.CutPrefix(strings.Fields(call)[2], "default/"); is && !strings.HasPrefix(name, "other") {
				set[name] = true
			}
		}

		return set
	}
	for i := range 4 {
		write(fmt.Sprintf("large-%d", i), 600<<10)
	}
	write("small", 0)
	if set := scan(); len(set) > 0 {
		t.Fatalf("%v are read while they are written", set)
	}
	if set := scan(); !set["small"] || len(set) != 2 {
		t.Fatalf("a scan reads %v, want the small one and a large one", set)
	}
	// Others take all that a scan reads, all the time.
	late := make(map[string]bool)
	for n := range 10 {
		for i := range 3 {
			write(fmt.Sprintf("other-%d", 3*(n%4)+i), 400<<10)
		}
		maps.Copy(late, scan())
	}
	if len(late) != 3 {
		t.Errorf("of the three that are left, %v were read", late)
	}
	if !m.unread {
		t.Error("those that are left are not known to be unread")
	}
}

// An object that moves to another file is never gone, however late that is read.
func TestObjectsMoveBetweenManifests(t *testing.T) {
	for name, move := range map[string]func(t *testing.T, from, to string){
		"renamed": mustRename,
		"from a removed file to a large one": func(t *testing.T, from, to string) {
			mustRemove(t, from)
			mustWrite(t, to, serviceYAML("web", "10.96.0.1")+"# "+strings.Repeat("x", scanBytes)+"\n")
		},
		"from a small file to a large one": func(t *testing.T, from, to string) {
			mustWrite(t, from, serviceYAML("stays", "10.96.0.2"))
			mustWrite(t, to, serviceYAML("web", "10.96.0.1")+"# "+strings.Repeat("x", scanBytes)+"\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, sink := t.TempDir(), newRecorder()
			m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
			lab.Must(t, err)
			from, to := filepath.Join(dir, "from.yaml"), filepath.Join(dir, "to.yaml")
			mustWrite(t, from, serviceYAML("web", "10.96.0.1")+"---\n"+serviceYAML("goes", "10.96.0.3"))
			mustWrite(t, filepath.Join(dir, "other.yaml"), serviceYAML("other", "10.96.0.4"))
			m.scan(true)
			sink.take()
			move(t, from, to)
			mustWrite(t, filepath.Join(dir, "other.yaml"), serviceYAML("other", "10.96.0.5"))
			calls := []string{}
			for range 5 {
				m.scan(false)
				calls = append(calls, sink.take()...)
			}
			text := strings.Join(calls, "\n")
			if strings.Contains(text, "delete Service default/web") {
				t.Errorf("the Service that moves is gone for a while:\n%s", text)
			}
			if gone := strings.Contains(text, "delete Service default/goes"); gone != (name != "renamed") {
				t.Errorf("the other Service of the file is gone: %t\n%s", gone, text)
			}
		})
	}
}

func TestManifestsFollow(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	mustMkdir(t, dir)
	mustWrite(t, a, serviceYAML("one", "10.96.0.1"))
	mustDate(t, a)
	sink := newRecorder()
	mustFollow(t, ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	mustHave(t, sink, "Service default/one")

	// In place, of the same length, and of the same time.
	mustWrite(t, a, serviceYAML("one", "10.96.0.2"))
	mustDate(t, a)
	mustBecome(t, sink, "Service default/one", "[10.96.0.2] [IPv4] [80/TCP]")

	mustWrite(t, b, serviceYAML("two", "10.96.0.3"))
	mustHave(t, sink, "Service default/one", "Service default/two")

	mustWrite(t, filepath.Join(dir, ".b.new"), serviceYAML("three", "10.96.0.3"))
	mustRename(t, filepath.Join(dir, ".b.new"), b)
	mustHave(t, sink, "Service default/one", "Service default/three")

	mustRemove(t, a)
	mustHave(t, sink, "Service default/three")
}

// A file that is being written is read when it has not changed between two scans, and
// again when its writer goes on later.
func TestManifestsWaitForTheWriter(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	m.scan(true)
	text := ""
	for i, steps := range []int{1, 1, 2, 2} { // scans after each write
		text += serviceYAML(fmt.Sprint("s", i), "10.96.0.1") + "---\n"
		mustWrite(t, path, text)
		for step := range steps {
			m.scan(false)
			if calls, want := len(sink.take()) > 0, step == 1; calls != want {
				t.Fatalf("write %d, scan %d: read is %v, want %v", i, step, calls, want)
			}
		}
	}
	mustHave(t, sink, "Service default/s0", "Service default/s1", "Service default/s2", "Service default/s3")
	m.scan(false)
	if calls := sink.take(); calls != nil {
		t.Errorf("a file that has not changed leads to %v", calls)
	}
}

// The target of a link is followed, too.
func TestManifestsBehindALink(t *testing.T) {
	dir, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "one")
	mustWrite(t, elsewhere, serviceYAML("one", "10.96.0.1"))
	mustLink(t, elsewhere, filepath.Join(dir, "a.yaml"))
	sink := newRecorder()
	mustFollow(t, ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	mustHave(t, sink, "Service default/one")
	mustWrite(t, elsewhere, serviceYAML("another", "10.96.0.1"))
	mustHave(t, sink, "Service default/another")
}

// The kubelet mounts a ConfigMap as links into a directory that it replaces.
func TestManifestsOfAConfigMap(t *testing.T) {
	dir := t.TempDir()
	mustMkdir(t, filepath.Join(dir, "..1"))
	mustWrite(t, filepath.Join(dir, "..1", "a.yaml"), serviceYAML("one", "10.96.0.1"))
	mustLink(t, "..1", filepath.Join(dir, "..data"))
	mustLink(t, filepath.Join("..data", "a.yaml"), filepath.Join(dir, "a.yaml"))
	sink := newRecorder()
	mustFollow(t, ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	mustBecome(t, sink, "Service default/one", "[10.96.0.1] [IPv4] [80/TCP]")

	mustMkdir(t, filepath.Join(dir, "..2"))
	mustWrite(t, filepath.Join(dir, "..2", "a.yaml"), serviceYAML("one", "10.96.0.2"))
	mustLink(t, "..2", filepath.Join(dir, "..data_tmp"))
	mustRename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
	mustRemove(t, filepath.Join(dir, "..1"))
	mustBecome(t, sink, "Service default/one", "[10.96.0.2] [IPv4] [80/TCP]")
}

// The objects of a directory that is removed stay in force, and another one in its place is
// followed.
func TestManifestsDirectoryReplaced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	mustMkdir(t, dir)
	mustWrite(t, filepath.Join(dir, "a.yaml"), serviceYAML("one", "10.96.0.1"))
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	m.scan(true)
	mustHave(t, sink, "Service default/one")

	mustRemove(t, dir)
	m.scan(true)
	mustHave(t, sink, "Service default/one")
	if got := sink.problems("manifests"); len(got) != 1 || !strings.Contains(got[0].String(), "no such file") {
		t.Errorf("reported is %v, want that the directory is missing", got)
	}

	mustMkdir(t, dir)
	mustWrite(t, filepath.Join(dir, "b.yaml"), serviceYAML("two", "10.96.0.2"))
	m.scan(true)
	mustHave(t, sink, "Service default/two")
	if got := sink.problems("manifests"); got != nil {
		t.Errorf("still reported: %v", got)
	}
}

func TestManifestsUnreadableFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	mustWrite(t, path, serviceYAML("one", "10.96.0.1"))
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	m.scan(true)

	// Not even root can read a link without a target.
	mustRemove(t, path)
	mustLink(t, "nowhere", path)
	m.scan(true)
	mustHave(t, sink, "Service default/one")
	if got := sink.problems("a.yaml"); len(got) != 1 {
		t.Errorf("reported is %v, want one problem", got)
	}

	mustRemove(t, path)
	m.scan(true)
	mustHave(t, sink)
	if got := sink.problems("a.yaml"); got != nil {
		t.Errorf("still reported: %v", got)
	}
}

func TestManifestsWithoutDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "nowhere")
	_, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: newRecorder()})
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("NewManifests returned %v, want an error that names the directory", err)
	}
}

func mustFollow(t *testing.T, cfg ManifestsConfig) {
	t.Helper()
	m, err := NewManifests(cfg)
	lab.Must(t, err)
	lab.MustRun(t, m.Run)
	mustClose(t, "the first scan", m.Synced())
}

func serviceYAML(name, clusterIP string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n", name, clusterIP)
}

func mustMkdir(t *testing.T, path string) { t.Helper(); lab.Must(t, os.Mkdir(path, 0o755)) }
func mustWrite(t *testing.T, path, text string) {
	t.Helper()
	lab.Must(t, os.WriteFile(path, []byte(text), 0o644))
}
func mustRename(t *testing.T, from, to string) { t.Helper(); lab.Must(t, os.Rename(from, to)) }
func mustDate(t *testing.T, path string) {
	t.Helper()
	lab.Must(t, os.Chtimes(path, time.Time{}, time.Unix(1e9, 0)))
}
func mustRemove(t *testing.T, path string)   { t.Helper(); lab.Must(t, os.RemoveAll(path)) }
func mustLink(t *testing.T, to, path string) { t.Helper(); lab.Must(t, os.Symlink(to, path)) }

// At rest the folder is not read: the kernel reports changes, of files that links lead to as well. A folder that is
// replaced is followed on.
func TestManifestsAtRest(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "manifests")
	mustMkdir(t, dir)
	mustWrite(t, filepath.Join(dir, "a.yaml"), serviceYAML("one", "10.96.0.1"))
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	lab.MustRun(t, m.Run)
	mustHave(t, sink, "Service default/one")
	time.Sleep(2 * activeTime)
	opened, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	lab.Must(t, err)
	defer unix.Close(opened)
	_, err = unix.InotifyAddWatch(opened, dir, unix.IN_OPEN)
	lab.Must(t, err)
	time.Sleep(2 * activeTime) // much less than restInterval
	var events [4096]byte
	if n, err := unix.Read(opened, events[:]); err != unix.EAGAIN {
		t.Errorf("the folder was read at rest: %d bytes of events, %v", n, err)
	}
	began := time.Now()
	mustWrite(t, filepath.Join(dir, "b.yaml"), serviceYAML("two", "10.96.0.2"))
	mustHave(t, sink, "Service default/one", "Service default/two")
	if took := time.Since(began); took > restInterval {
		t.Errorf("a change was read after %v", took)
	}
}

// Where there are thousands of files, a change of one decodes that one, and reports nothing of the others.
func TestManifestsDecodeWhatChanges(t *testing.T) {
	const files = 3000
	dir := t.TempDir()
	path := func(i int) string { return filepath.Join(dir, fmt.Sprintf("s%04d.yaml", i)) }
	for i := range files {
		mustWrite(t, path(i), serviceYAML(fmt.Sprint("s", i), fmt.Sprintf("10.%d.%d.1", 100+i/200, i%200)))
	}
	sink := newRecorder()
	m, err := NewManifests(ManifestsConfig{Dir: dir, NodeName: "node1", Sink: sink})
	lab.Must(t, err)
	m.scan(true)
	time.Sleep(2 * scanInterval)
	m.scan(false)
	m.scan(false)
	if calls := sink.take(); len(calls) < files {
		t.Fatalf("%d calls, want one for each of %d files", len(calls), files)
	}
	before := make(map[string]any)
	for name, file := range m.files {
		before[name] = file.objects[0].obj
	}
	mustWrite(t, path(7), serviceYAML("s7", "10.99.0.1"))
	m.scan(false)
	m.scan(false)
	if calls := sink.take(); len(calls) > 2 { // the Service, and the end of what was read
		t.Errorf("the change of one file leads to %d calls: %v", len(calls), calls[:3])
	}
	for name, file := range m.files {
		if same := file.objects[0].obj == before[name]; same != (name != "s0007.yaml") {
			t.Errorf("%s is as it was decoded before: %v", name, same)
		}
	}
}
