package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
)

// ErrChanged ends [File.Follow]: the process has to be started again.
var ErrChanged = errors.New("the configuration has changed; this process has to be started again")

// File is a configuration file that was read and is watched.
type File struct {
	path    string
	text    []byte
	watcher *fsnotify.Watcher
}

// Open reads the file at path, and watches it from then on. The caller closes it.
func Open(path string) (*File, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch of %s: %w", path, err)
	}
	f := &File{path: path, watcher: watcher}
	if err := f.watch(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if f.text, err = os.ReadFile(path); err != nil {
		return nil, errors.Join(err, f.Close())
	}

	return f, nil
}

// Close ends the watch.
func (f *File) Close() error { return f.watcher.Close() }

// Decode is [Decode] of what the file had when it was opened.
func (f *File) Decode() (cfg *KubeProxy, unknown, err error) {
	if cfg, unknown, err = Decode(f.text); err != nil {
		err = fmt.Errorf("%s: %w", f.path, err)
	}

	return cfg, unknown, err
}

// Follow waits until the path leads to something else than when the file was
// opened, and returns an error wrapping [ErrChanged] then: the file was written,
// or another took its place, be it by a link on the way to it, as in a volume
// that shows a ConfigMap. It returns nil when ctx ends. A file that is gone may
// come back; nothing has changed until then.
func (f *File) Follow(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-f.watcher.Errors:
			return fmt.Errorf("watch of %s: %w", f.path, err)
		case <-f.watcher.Events:
		}
		// Links may lead elsewhere now: watch there before reading, so that no later write is missed.
		if err := f.watch(); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		text, err := os.ReadFile(f.path)
		if err == nil && !bytes.Equal(text, f.text) {
			return fmt.Errorf("%s: %w", f.path, ErrChanged)
		}
	}
}

// watch watches the file, which may be written by another path, and the folders
// of all links on the way to it.
func (f *File) watch() error {
	for _, path := range append(folders(f.path), f.path) {
		if err := f.watcher.Add(path); err != nil {
			return fmt.Errorf("watch of %s: %w", path, err)
		}
	}

	return nil
}

// mostLinks is the number of links that the kernel follows on one path.
const mostLinks = 40

// folders returns the folder of each link on the way to path, an absolute one,
// and that of what they lead to in the end.
func folders(path string) []string {
	var found []string
	for range mostLinks {
		link, rest := firstLink(path)
		if link == "" {
			break
		}
		target, err := os.Readlink(link)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(link), target)
		}
		found = append(found, filepath.Dir(link))
		path = filepath.Join(target, rest)
	}
	found = append(found, filepath.Dir(path))
	slices.Sort(found)

	return slices.Compact(found)
}

// firstLink returns the first part of path that is a link, and what follows
// after it. There may be none.
func firstLink(path string) (link, rest string) {
	at := "/"
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i, part := range parts {
		at = filepath.Join(at, part)
		if entry, err := os.Lstat(at); err == nil && entry.Mode()&os.ModeSymlink != 0 {
			return at, filepath.Join(parts[i+1:]...)
		}
	}

	return "", ""
}
