package kube

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/sluice-lb/sluice/pkg/lb"
)

const (
	// quietTime is how long a directory must not change before it is read, because
	// most files are not written at once.
	quietTime = 50 * time.Millisecond

	// rescanTime is how often the directory is read without a notification: some get
	// lost, and there is none of a change of a link's target.
	rescanTime = 5 * time.Second
)

// ManifestsConfig is the configuration of a [Manifests].
type ManifestsConfig struct {
	// Dir is the directory of the manifests: files called *.yaml, *.yml or *.json with
	// Services, EndpointSlices, Nodes, ServiceCIDRs and Lists of them. Names that begin
	// with a dot and subdirectories are ignored.
	Dir string

	// NodeName is the name of this node, in lower case; other Nodes are ignored.
	NodeName string

	Sink Sink

	// Log is [slog.Default] if nil.
	Log *slog.Logger

	// rescan is how often the directory is looked at without notice, if not
	// every rescanTime.
	rescan time.Duration
}

// Manifests follows a directory of manifests, in place of an API server. What
// an API server fills in is filled in; what it would not send to a Service
// proxy is passed over; what it would refuse is reported and changes nothing:
// the last good version of the object, or of a whole file that is no YAML,
// stays in force.
//
// Of an object that two files have, the file whose name sorts first decides.
// Files are best replaced by renaming: one that is written in place is read as
// it is when its writer pauses.
type Manifests struct {
	cfg    ManifestsConfig
	synced chan struct{}

	tracker  *tracker
	files    map[string]*manifest // by name in Dir
	inForce  map[key]*declared
	reported map[string][]lb.Problem // by path; as the sink knows them
}

// NewManifests returns an error if a field of cfg is missing, or one that names
// the directory if that cannot be read.
func NewManifests(cfg ManifestsConfig) (*Manifests, error) {
	switch {
	case cfg.NodeName == "":
		return nil, errors.New("kube.ManifestsConfig: no NodeName")
	case cfg.Sink == nil:
		return nil, errors.New("kube.ManifestsConfig: no Sink")
	}
	if _, err := os.ReadDir(cfg.Dir); err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.rescan == 0 {
		cfg.rescan = rescanTime
	}
	return &Manifests{
		cfg:      cfg,
		synced:   make(chan struct{}),
		tracker:  newTracker(cfg.Sink, cfg.Log),
		files:    map[string]*manifest{},
		inForce:  map[key]*declared{},
		reported: map[string][]lb.Problem{},
	}, nil
}

// Synced returns a channel that is closed when all manifests have been reported once.
func (m *Manifests) Synced() <-chan struct{} { return m.synced }

// NodeSynced returns a channel that is closed when the Node has been reported, if there is a
// manifest of it.
func (m *Manifests) NodeSynced() <-chan struct{} { return m.synced }

// Run follows the directory until ctx ends, then returns nil. It may be called once.
func (m *Manifests) Run(ctx context.Context) error {
	var events chan fsnotify.Event
	var lost chan error
	notices := m.notify()
	if notices != nil {
		defer notices.Close()
		events, lost = notices.Events, notices.Errors
	}
	m.scan()
	close(m.synced)

	quiet := time.NewTimer(quietTime)
	quiet.Stop() // until the first notification
	rescan := time.NewTicker(m.cfg.rescan)
	defer rescan.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-events:
			m.markStale(filepath.Base(event.Name))
			quiet.Reset(quietTime)
		case err := <-lost:
			m.cfg.Log.Warn("a change of the manifests may be seen late", "dir", m.cfg.Dir, "err", err)
		case <-quiet.C:
			m.scan()
		case <-rescan.C:
			if notices != nil {
				// Notices are about a directory, not about its name, and end
				// when another one takes its place. The scan reports errors.
				_ = notices.Add(m.cfg.Dir)
			}
			m.scan()
		}
	}
}

// notify returns notices of changes in the directory, nil if the kernel has no
// more to give.
func (m *Manifests) notify() *fsnotify.Watcher {
	notices, err := fsnotify.NewWatcher()
	if err != nil {
		m.cfg.Log.Warn("changes of the manifests are seen late", "dir", m.cfg.Dir, "within", m.cfg.rescan, "err", err)
		return nil
	}
	if err := notices.Add(m.cfg.Dir); err != nil {
		m.cfg.Log.Warn("changes of the manifests are seen late", "dir", m.cfg.Dir, "within", m.cfg.rescan, "err", err)
	}
	return notices
}

// scan reads the files that have changed and reports the changes.
func (m *Manifests) scan() {
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil {
		m.report(m.cfg.Dir, []lb.Problem{{Object: "manifests", Field: m.cfg.Dir, Message: err.Error() + "; their last versions stay in force"}})
		return
	}
	m.report(m.cfg.Dir, nil)

	found := map[string]bool{}
	changed := false
	for _, entry := range entries {
		if isManifest(entry.Name()) {
			here, read := m.look(entry.Name())
			found[entry.Name()] = here
			changed = changed || read
		}
	}
	for name := range m.files {
		if !found[name] {
			delete(m.files, name)
			m.report(filepath.Join(m.cfg.Dir, name), nil)
			changed = true
		}
	}
	if changed {
		m.apply()
	}
}

func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// look reads a file if it has changed. It reports whether there is one, and whether it was
// read.
func (m *Manifests) look(name string) (here, read bool) {
	path := filepath.Join(m.cfg.Dir, name)
	old := m.files[name]
	if old == nil {
		old = &manifest{name: name}
	}
	stat, err := os.Stat(path)
	switch {
	case err != nil && !exists(path):
		return false, false
	case err != nil:
		m.files[name] = unreadable(old, err)
		return true, true
	case !stat.Mode().IsRegular():
		return false, false
	case old.stat != nil && same(old.stat, stat):
		return true, false
	}
	m.files[name] = readManifest(path, stat, old, m.cfg.NodeName)
	return true, true
}

// exists reports whether there is something at path, which may be a link without a target.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func same(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// markStale makes the next scan read a file that looks unchanged.
func (m *Manifests) markStale(name string) {
	if file := m.files[name]; file != nil {
		file.stat = nil
	}
}

// apply reports the differences between the objects of the files and those in force.
func (m *Manifests) apply() {
	next := make(map[key]*declared, len(m.inForce))
	owner := make(map[key]string, len(m.inForce))
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		file := m.files[name]
		problems := slices.Clone(file.problems)
		for _, d := range file.objects {
			if first, taken := owner[d.key]; taken {
				problems = append(problems, file.problem(d.key.String(), "metadata.name",
					fmt.Sprintf("%s has it too, and is in force because its name sorts first", first)))
				continue
			}
			owner[d.key], next[d.key] = name, d
			if m.inForce[d.key] != d {
				m.tracker.put(translate(d.obj))
			}
		}
		m.report(filepath.Join(m.cfg.Dir, name), problems)
	}
	for _, k := range slices.SortedFunc(maps.Keys(m.inForce), key.compare) {
		if next[k] == nil {
			m.tracker.remove(k)
		}
	}
	m.tracker.flushCIDRs()
	m.cfg.Sink.Flush()
	m.inForce = next
}

// report reports the problems of a file if they have changed.
func (m *Manifests) report(path string, problems []lb.Problem) {
	if slices.Equal(m.reported[path], problems) {
		return
	}
	m.reported[path] = problems
	if len(problems) == 0 {
		delete(m.reported, path)
	}
	m.cfg.Sink.Report(path, problems)
}
