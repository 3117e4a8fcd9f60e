package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"reflect"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// manifest is one file of a directory of manifests.
type manifest struct {
	name string
	stat fs.FileInfo // as of the last read; nil: to be read again

	// objects are the last good versions of the file's objects, in its order.
	// problems are the parts of the file that are not in force.
	objects  []*declared
	problems []lb.Problem
}

// declared is an object as a manifest has it. It is kept, so that it can come
// into force when a file before it no longer has it. Manifests are few.
type declared struct {
	key key
	obj runtime.Object
}

// note adds a problem of the file, or of an object in it.
func (m *manifest) note(object, field, format string, args ...any) {
	m.problems = append(m.problems, m.problem(object, field, fmt.Sprintf(format, args...)))
}

func (m *manifest) problem(object, field, message string) lb.Problem {
	title := "manifest " + m.name
	if object != "" {
		title += ", " + object
	}
	return lb.Problem{Object: title, Field: field, Message: message}
}

// reading is one reading of a manifest.
type reading struct {
	nodeName string
	old      map[key]*declared // what was good last
	seen     map[key]bool
	now      *manifest
}

// readManifest returns the manifest that old has become. Of what is bad in the
// file now, old's version stays.
func readManifest(path string, stat fs.FileInfo, old *manifest, nodeName string) *manifest {
	content, err := os.ReadFile(path)
	if err != nil {
		return unreadable(old, err)
	}
	r := reading{
		nodeName: nodeName,
		old:      make(map[key]*declared, len(old.objects)),
		seen:     make(map[key]bool, len(old.objects)),
		now:      &manifest{name: old.name, stat: stat},
	}
	for _, d := range old.objects {
		r.old[d.key] = d
	}
	docs, err := documents(old.name, content)
	if err != nil {
		field, message := splitError(err)
		r.now.objects = old.objects
		r.now.note("", field, "%s; %s", message, fallback(old))
		return r.now
	}
	for _, doc := range docs {
		r.add(doc)
	}
	return r.now
}

// unreadable returns what old has become if nothing can be read. It is tried
// again at the next scan.
func unreadable(old *manifest, err error) *manifest {
	now := &manifest{name: old.name, objects: old.objects}
	now.note("", "content", "%v; %s", err, fallback(old))
	return now
}

// fallback describes what is in force in place of a bad file.
func fallback(old *manifest) string {
	if len(old.objects) == 0 {
		return "nothing of the file is in force"
	}
	return "the last good version of the file stays in force"
}

// add adds the object that doc is, or all that it lists.
func (r *reading) add(doc json.RawMessage) {
	var h head
	if !bytes.HasPrefix(doc, []byte("{")) {
		r.now.note("", "content", "a document is no object but %.20s", doc)
		return
	}
	if err := json.Unmarshal(doc, &h); err != nil {
		m := mistakeOf(err)
		r.now.note(h.Kind, m.field, "%s", m.message)
		return
	}
	if h.isList() {
		for _, item := range h.Items {
			r.add(item)
		}
		return
	}
	obj, k := h.newObject()
	switch {
	case obj == nil:
		r.now.note(h.title(), "kind", "%q of apiVersion %q is not read here", h.Kind, h.APIVersion)
	case k.name == "":
		r.now.note(h.title(), "metadata.name", "missing")
	case r.seen[k]:
		r.now.note(k.String(), "metadata.name", "the file has it twice; the first one counts")
	default:
		r.seen[k] = true
		r.addObject(doc, obj, k)
	}
}

// addObject adds the object that doc is. If it is bad, it adds the last good
// version.
func (r *reading) addObject(doc json.RawMessage, obj runtime.Object, k key) {
	known := r.old[k]
	if wrong := decodeStrict(doc, obj); len(wrong) > 0 {
		instead := "the object is left out"
		if known != nil {
			instead = "its last good version stays in force"
			r.now.objects = append(r.now.objects, known)
		}
		for _, w := range wrong {
			r.now.note(k.String(), w.field, "%s; %s", w.message, instead)
		}
		return
	}
	missing := complete(obj, k)
	if !selected(obj, r.nodeName) {
		return
	}
	for _, m := range missing {
		r.now.note(k.String(), m.Field, "%s", m.Message)
	}
	if known == nil || !reflect.DeepEqual(known.obj, obj) {
		known = &declared{key: k, obj: obj}
	}
	r.now.objects = append(r.now.objects, known)
}
