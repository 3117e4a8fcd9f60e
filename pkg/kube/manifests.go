package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/pkg/lb"
)

const (
	// scanInterval is how often the directory is scanned while it changes, and always where the kernel does not report
	// changes. A file must not have changed for one interval before it is read, because most files are not written at once.
	scanInterval = 200 * time.Millisecond
	// scanBytes is how much one scan reads, unless a single file has more: some 100 ms of work.
	scanBytes = 1 << 20
	// activeTime is how long after a change the directory is scanned.
	activeTime = 3 * scanInterval
	// restInterval is how often it is scanned otherwise: file systems of a network report no changes of other hosts.
	restInterval = 10 * time.Second
)

// ManifestsConfig is the configuration of a [Manifests].
type ManifestsConfig struct {
	// Dir is the directory of the manifests: files called *.yaml, *.yml or *.json with
	// Services, EndpointSlices, Nodes, ServiceCIDRs, Pods, Namespaces and Lists of them.
	// Names that begin with a dot and subdirectories are ignored.
	Dir string

	// NodeName is the name of this node, in lower case; other Nodes are ignored.
	NodeName string

	Sink Sink

	// Log is [slog.Default] if nil.
	Log *slog.Logger
}

// Manifests follows a directory of manifests, in place of an API server. It sets the
// defaults that an API server sets, and ignores objects that an API server would not send
// to a Service proxy. A file with an object that an API server would refuse is reported,
// and its last good version stays in force, with all of its objects. So does that of a file that
// has no object any more: those of a file that is removed go.
//
// If two files have the same object, the one whose name sorts first decides.
type Manifests struct {
	cfg    ManifestsConfig
	synced chan struct{}

	tracker  *tracker
	files    map[string]*manifest // by name in Dir
	inForce  map[key]runtime.Object
	reported map[string][]lb.Problem // by path; those that the sink knows
	unread   bool                    // a file has changed and was not read yet
	watcher  *fsnotify.Watcher       // nil: changes are not reported
}

// manifest is one file.
type manifest struct {
	version fileVersion // as of the last scan
	read    bool        // this version has been read
	late    int         // how many scans have left it to the next one

	// objects are those of the last good version, in the order of the file, without
	// those that no Watcher would select.
	objects  []declared
	problems []lb.Problem
}

// declared is an object of a manifest. It is kept, because it comes into force when a file
// before it no longer has it.
type declared struct {
	key key
	obj runtime.Object
}

// fileVersion changes with every write of a file, also with one that sets its modification
// time. The zero value is a file that does not exist.
type fileVersion struct {
	dev, ino         uint64
	size             int64
	modified, status syscall.Timespec
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
	return &Manifests{
		cfg:      cfg,
		synced:   make(chan struct{}),
		tracker:  newTracker(cfg.Sink, cfg.Log),
		files:    map[string]*manifest{},
		inForce:  map[key]runtime.Object{},
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
	changes, failures := m.watch()
	if m.watcher != nil {
		defer m.watcher.Close()
	}
	m.scan(true)
	close(m.synced)
	scanned, active := time.Now(), time.Now().Add(activeTime)
	for ticker := time.Tick(scanInterval); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
			active = time.Now().Add(activeTime)
		case <-failures: // changes may be lost
			active = time.Now().Add(activeTime)
		case now := <-ticker:
			if m.watcher == nil || m.unread || now.Before(active) || now.Sub(scanned) >= restInterval {
				m.scan(false)
				scanned = now
			}
		}
	}
}

// watch has the kernel report changes of the directory. Where it cannot, for lack of inotify or by a limit of it, the
// directory is scanned all the time, and both channels are nil.
func (m *Manifests) watch() (<-chan fsnotify.Event, <-chan error) {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watcher.Add(m.cfg.Dir); err != nil {
			watcher.Close()
		}
	}
	if err != nil {
		m.cfg.Log.Info("changes of manifests are not reported by the kernel; they are looked for", "interval", scanInterval, "error", err)
		return nil, nil
	}
	m.watcher = watcher
	return watcher.Events, watcher.Errors
}

// follow has changes reported of the folder in which a link ends, and of the directory again if it was replaced.
func (m *Manifests) follow(path string) {
	if m.watcher == nil {
		return
	}
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return
	}
	// If that fails, the next scan at rest finds the change.
	_ = m.watcher.Add(filepath.Dir(target))
}

// PodsSynced returns a channel that is closed when the Pods and Namespaces have been reported.
func (m *Manifests) PodsSynced() <-chan struct{} { return m.synced }

// Silence returns nil: a directory has no watches.
func (m *Manifests) Silence() map[string]time.Duration { return nil }

// scan reads the files that have changed, and applies the changes. A file whose version is
// not that of the last scan may still be written to, or renamed: it is read at the next scan, unless
// now is set. So are files that are too much for one scan: the smaller ones come first, as nothing is in force before all
// of them are read, and the one that was left to the most scans always has its turn. No object goes meanwhile: it may
// have moved to a file that is left.
func (m *Manifests) scan(now bool) {
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil {
		m.report(m.cfg.Dir, []lb.Problem{{Object: "manifests", Field: m.cfg.Dir, Message: err.Error() + "; their last versions stay in force", Effect: lb.Degraded}})
		return
	}
	if m.watcher != nil {
		_ = m.watcher.Add(m.cfg.Dir) // it may be another than before
	}

	found := map[string]bool{}
	var due []string
	m.unread = false
	for _, entry := range entries {
		name := entry.Name()
		path := filepath.Join(m.cfg.Dir, name)
		if strings.HasPrefix(name, ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name)) {
			continue
		}
		var version fileVersion
		stat, err := os.Stat(path)
		if err == nil {
			s := stat.Sys().(*syscall.Stat_t)
			version = fileVersion{uint64(s.Dev), s.Ino, s.Size, s.Mtim, s.Ctim}
		} else if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			continue // it was deleted meanwhile, and is no link without a target
		}
		if err == nil && !stat.Mode().IsRegular() {
			continue
		}
		found[name] = true
		if entry.Type()&fs.ModeSymlink != 0 {
			m.follow(path)
		}
		file := m.files[name]
		if file == nil {
			file = &manifest{}
			m.files[name] = file
		}
		if file.version != version {
			file.version, file.read = version, false
			if !now {
				m.unread = true
				continue
			}
		}
		if !file.read {
			due = append(due, name)
		}
	}
	complete := m.read(due, now)
	if m.forget(found, now) || len(due) > 0 {
		m.apply(complete)
	}
	m.report(m.cfg.Dir, m.folderProblems(entries))
}

// read reads these files, but for those that are too much for one scan. It returns false if there are such.
func (m *Manifests) read(due []string, now bool) bool {
	slices.SortStableFunc(due, func(a, b string) int { return cmp.Compare(m.files[a].version.size, m.files[b].version.size) })
	latest := ""
	for _, name := range due {
		if n := m.files[name].late; n > 0 && (latest == "" || n > m.files[latest].late) {
			latest = name
		}
	}
	left, complete := int64(scanBytes), true
	for i, name := range due {
		file := m.files[name]
		if left -= file.version.size; left < 0 && i > 0 && !now && name != latest {
			file.late++
			complete, m.unread = false, true
			continue
		}
		file.late = 0
		content, err := os.ReadFile(filepath.Join(m.cfg.Dir, name))
		if err == nil {
			// The clock of files is coarse: one that has just been written may change again
			// and keep its version.
			file.read = !now || time.Since(time.Unix(file.version.status.Unix())) > scanInterval
			m.unread = m.unread || !file.read
		}
		file.parse(name, content, err, m.cfg.NodeName)
	}
	return complete
}

// forget forgets the files that were not found, and reports whether there are such.
func (m *Manifests) forget(found map[string]bool, now bool) bool {
	gone := false
	for name, file := range m.files {
		switch {
		case found[name]:
		case !now && file.version != fileVersion{}: // it may be renamed to one that is read at the next scan
			file.version, file.read, m.unread = fileVersion{}, false, true
		default:
			delete(m.files, name)
			m.report(filepath.Join(m.cfg.Dir, name), nil)
			gone = true
		}
	}
	return gone
}

// folderProblems returns a problem if the directory has other files and no manifest.
func (m *Manifests) folderProblems(entries []fs.DirEntry) []lb.Problem {
	visible := func(e fs.DirEntry) bool { return !strings.HasPrefix(e.Name(), ".") }
	if len(m.files) > 0 || !slices.ContainsFunc(entries, visible) {
		return nil
	}
	return []lb.Problem{{
		Object: lb.Configuration, Field: "--manifests", Value: m.cfg.Dir, Message: "no file in it is called *.yaml, *.yml or *.json, so no Service is known",
		Remedy: "Put manifests there, in no folder below it, or name another folder", Effect: lb.Degraded,
	}}
}

// apply reports the differences between the objects of the files and those in force. Unless the files are complete, those
// that no file has stay in force.
func (m *Manifests) apply(complete bool) {
	next := make(map[key]runtime.Object, len(m.inForce))
	owner := make(map[key]string, len(m.inForce))
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		file := m.files[name]
		problems := slices.Clone(file.problems)
		for _, d := range file.objects {
			if first, taken := owner[d.key]; taken {
				problems = append(problems, lb.Problem{Object: "manifest " + name + ", " + d.key.String(), Field: "metadata.name",
					Message: first + " has it too, and is in force because its name sorts first"})
				continue
			}
			owner[d.key], next[d.key] = name, d.obj
			if !reflect.DeepEqual(m.inForce[d.key], d.obj) {
				m.tracker.put(translate(d.obj))
			}
		}
		m.report(filepath.Join(m.cfg.Dir, name), problems)
	}
	for _, k := range slices.SortedFunc(maps.Keys(m.inForce), key.compare) {
		switch {
		case next[k] != nil:
		case complete:
			m.tracker.remove(k)
		default:
			next[k] = m.inForce[k]
		}
	}
	m.tracker.flush()
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
