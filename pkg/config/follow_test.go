package config

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// timeout is how long a test waits for an end that must come.
const timeout = time.Minute

func mustOpen(t *testing.T, path string) *File {
	t.Helper()
	f, err := Open(path)
	lab.Must(t, err)
	f.interval = time.Millisecond

	return f
}

func mustRename(t *testing.T, from, to string) {
	t.Helper()
	lab.Must(t, os.Rename(from, to))
}

func mustLink(t *testing.T, target, path string) {
	t.Helper()
	lab.Must(t, os.Symlink(target, path))
}

func mustMkdir(t *testing.T, path string) {
	t.Helper()
	lab.Must(t, os.MkdirAll(path, 0o755))
}

// mounted lays dir out as the volume of a ConfigMap. Swap replaces its content as
// the kubelet does.
func mounted(t *testing.T, dir, text string) (swap func(text string)) {
	t.Helper()
	generation := 0
	swap = func(text string) {
		generation++
		name := filepath.Join(dir, "..generation"+string(rune('0'+generation)))
		mustMkdir(t, name)
		mustWrite(t, filepath.Join(name, "config.conf"), text)
		mustLink(t, filepath.Base(name), filepath.Join(dir, "..data_tmp"))
		mustRename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
	}
	swap(text)
	mustLink(t, "..data/config.conf", filepath.Join(dir, "config.conf"))

	return swap
}

const before, after = header, header + "oomScoreAdj: 1"

// changes are the ways in which the text that a path leads to may change. Each
// makes a file in dir, and returns its path and a function that changes it.
var changes = []struct {
	name   string
	change func(t *testing.T, dir string) (path string, change func())
}{
	{"a write", func(t *testing.T, dir string) (string, func()) {
		path := filepath.Join(dir, "config.conf")
		mustWrite(t, path, before)

		return path, func() { mustWrite(t, path, after) }
	}},
	{"a file that takes its place", func(t *testing.T, dir string) (string, func()) {
		path := filepath.Join(dir, "config.conf")
		mustWrite(t, path, before)

		return path, func() {
			mustWrite(t, path+".new", after)
			mustRename(t, path+".new", path)
		}
	}},
	{"a file that comes after it went", func(t *testing.T, dir string) (string, func()) {
		path := filepath.Join(dir, "config.conf")
		mustWrite(t, path, before)

		return path, func() {
			mustRename(t, path, path+".old")
			mustWrite(t, path, after)
		}
	}},
	{"a swap of the mounted folder", func(t *testing.T, dir string) (string, func()) {
		swap := mounted(t, dir, before)

		return filepath.Join(dir, "config.conf"), func() { swap(after) }
	}},
	{"the second swap, if the first changes nothing", func(t *testing.T, dir string) (string, func()) {
		swap := mounted(t, dir, before)

		return filepath.Join(dir, "config.conf"), func() { swap(before); swap(before); swap(after) }
	}},
	{"a link on the way that leads elsewhere", func(t *testing.T, dir string) (string, func()) {
		mustMkdir(t, filepath.Join(dir, "a", "in"))
		mustMkdir(t, filepath.Join(dir, "b", "in"))
		mustWrite(t, filepath.Join(dir, "a/in/config.conf"), before)
		mustWrite(t, filepath.Join(dir, "b/in/config.conf"), after)
		mustLink(t, filepath.Join(dir, "a"), filepath.Join(dir, "now"))

		return filepath.Join(dir, "now/in/config.conf"), func() {
			mustLink(t, filepath.Join(dir, "b"), filepath.Join(dir, "next"))
			mustRename(t, filepath.Join(dir, "next"), filepath.Join(dir, "now"))
		}
	}},
	{"a write where the link leads after it was swapped", func(t *testing.T, dir string) (string, func()) {
		mustMkdir(t, filepath.Join(dir, "links"))
		mustMkdir(t, filepath.Join(dir, "a"))
		mustMkdir(t, filepath.Join(dir, "b"))
		mustWrite(t, filepath.Join(dir, "a/config.conf"), before)
		mustWrite(t, filepath.Join(dir, "b/config.conf"), before)
		link := filepath.Join(dir, "links", "config.conf")
		mustLink(t, filepath.Join(dir, "a/config.conf"), link)

		return link, func() {
			mustLink(t, filepath.Join(dir, "b/config.conf"), link+".next")
			mustRename(t, link+".next", link)
			time.Sleep(100 * time.Millisecond) // so that Follow reads in between
			mustWrite(t, filepath.Join(dir, "b/config.conf"), after)
		}
	}},
	{"a write by another name of the file", func(t *testing.T, dir string) (string, func()) {
		mustMkdir(t, filepath.Join(dir, "other"))
		path, other := filepath.Join(dir, "config.conf"), filepath.Join(dir, "other/config.conf")
		mustWrite(t, other, before)
		lab.Must(t, os.Link(other, path))

		return path, func() { mustWrite(t, other, after) }
	}},
}

// Every change of the text that the path leads to ends the process.
func TestFollow(t *testing.T) {
	for _, test := range changes {
		t.Run(test.name, func(t *testing.T) {
			path, change := test.change(t, t.TempDir())
			f := mustOpen(t, path)
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- f.Follow(ctx) }()
			change()
			if err := <-ended; !errors.Is(err, ErrChanged) {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// A change between the read and Follow ends it, too.
func TestFollowSeesEarlierChange(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	mustWrite(t, path, header)
	f := mustOpen(t, path)
	mustWrite(t, path, header+"oomScoreAdj: 1")
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if err := f.Follow(ctx); !errors.Is(err, ErrChanged) {
		t.Errorf("it ended with %v", err)
	}
}

// Other files, a file that is gone, and one that is written with the same text do
// not end it: of all the events here, only the last one does.
func TestFollowIgnoresOtherEvents(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.conf")
	mustWrite(t, path, header)
	f := mustOpen(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- f.Follow(ctx) }()

	mustWrite(t, filepath.Join(dir, "other"), "x")
	lab.Must(t, os.Chmod(path, 0o600))
	lab.Must(t, os.Remove(path))
	mustWrite(t, path+".new", header)
	mustRename(t, path+".new", path)
	select {
	case err := <-ended:
		t.Fatalf("it ended with %v", err)
	case <-time.After(100 * time.Millisecond): // for an end that must not come
	}
	mustWrite(t, path, header+"oomScoreAdj: 1")
	if err := <-ended; !errors.Is(err, ErrChanged) {
		t.Errorf("it ended with %v", err)
	}
}

func TestFollowEndsWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	mustWrite(t, path, header)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := mustOpen(t, path).Follow(ctx); err != nil {
		t.Error(err)
	}
}

func TestOpenWithoutFile(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "nosuch")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error is %v", err)
	}
}
