package kube

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/test/lab"
)

// fakeAPI is the part of an API server that serves list and watch. It ignores selectors and
// sends all objects: a test of selectors checks the requests.
type fakeAPI struct {
	server *httptest.Server

	mu       sync.Mutex
	version  int
	oldest   int // watches from before it are answered 410 Gone
	objects  map[string]map[string]apiObject
	watches  map[chan apiEvent]string // to the resource
	history  []pastEvent
	requests []request

	streams  bool            // whether it supports sendInitialEvents
	protobuf bool            // watches are answered with protobuf and not with JSON
	absent   map[string]bool // resources that it does not have
	denied   map[string]bool // resources that must not be read
	held     map[string]bool // resources whose lists are never answered
	failures int             // requests yet to be answered 503
}

type apiObject interface {
	runtime.Object
	metav1.Object
}

type apiEvent struct {
	Type   watch.EventType `json:"type"`
	Object any             `json:"object"`
}

type pastEvent struct {
	version  int
	resource string
	event    apiEvent
}

type request struct {
	resource string
	query    url.Values
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{
		version: 1,
		objects: map[string]map[string]apiObject{"services": {}, "endpointslices": {}, "nodes": {}, "servicecidrs": {}, "pods": {}, "namespaces": {}},
		watches: map[chan apiEvent]string{},
		absent:  map[string]bool{},
		denied:  map[string]bool{},
		held:    map[string]bool{},
	}
	f.server = httptest.NewServer(f)
	f.stop(t)
	return f
}

// newSecureAPI returns one that speaks HTTP/2, as API servers do.
func newSecureAPI(t *testing.T) *fakeAPI {
	f := newFakeAPI(t)
	f.server = httptest.NewUnstartedServer(f)
	f.server.EnableHTTP2 = true
	f.server.StartTLS()
	f.stop(t)
	return f
}

// stop stops the server at the end of the test.
func (f *fakeAPI) stop(t *testing.T) {
	server := f.server
	t.Cleanup(func() {
		f.cut()
		server.CloseClientConnections()
		server.Close()
	})
}

func (f *fakeAPI) config(t *testing.T, sink Sink) Config {
	t.Helper()
	dialer := NewDialer(func(syscall.RawConn, bool) error { return nil })
	client, err := kubernetes.NewForConfig(f.access(t, dialer))
	lab.Must(t, err)
	return Config{
		Client:   client,
		Dialer:   dialer,
		NodeName: "node1",
		Sink:     sink,
		Log:      slog.New(slog.NewTextHandler(t.Output(), nil)),
		backoff:  wait.Backoff{Duration: 10 * time.Millisecond, Steps: 1},
	}
}

// access returns how clients get at the server. If it speaks TLS, they have a certificate of their own, whose file they
// look at again and again, as clients in a cluster do.
func (f *fakeAPI) access(t *testing.T, dialer *Dialer) *rest.Config {
	t.Helper()
	cfg := &rest.Config{Host: f.server.URL, QPS: -1, Dial: dialer.DialContext}
	if f.server.TLS == nil {
		return cfg
	}
	pair, folder := f.server.TLS.Certificates[0], t.TempDir()
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	lab.Must(t, err)
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]})
	cfg.CAData, cfg.CertFile, cfg.KeyFile = certificate, filepath.Join(folder, "crt"), filepath.Join(folder, "key")
	lab.Must(t, os.WriteFile(cfg.CertFile, certificate, 0o600))
	lab.Must(t, os.WriteFile(cfg.KeyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))

	return cfg
}

// mustWatch runs a Watcher until the test ends.
func mustWatch(t *testing.T, cfg Config) *Watcher {
	t.Helper()
	w, err := NewWatcher(cfg)
	lab.Must(t, err)
	lab.MustRun(t, w.Run)
	return w
}

// set creates or changes an object, and sends it to the watches.
func (f *fakeAPI) set(objects ...apiObject) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, obj := range objects {
		resource, name := resourceOf(obj), obj.GetNamespace()+"/"+obj.GetName()
		event := apiEvent{watch.Added, obj}
		if f.objects[resource][name] != nil {
			event.Type = watch.Modified
		}
		f.version++
		obj.SetResourceVersion(strconv.Itoa(f.version))
		f.objects[resource][name] = obj
		f.send(resource, event)
	}
}

// delete deletes an object, or changes it so that the selectors do not match any more.
func (f *fakeAPI) delete(obj apiObject) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	obj = obj.DeepCopyObject().(apiObject)
	obj.SetResourceVersion(strconv.Itoa(f.version))
	delete(f.objects[resourceOf(obj)], obj.GetNamespace()+"/"+obj.GetName())
	f.send(resourceOf(obj), apiEvent{watch.Deleted, obj})
}

func (f *fakeAPI) send(resource string, event apiEvent) {
	f.history = append(f.history, pastEvent{f.version, resource, event})
	for events, of := range f.watches {
		if of == resource {
			events <- event
		}
	}
}

// cut ends all watches.
func (f *fakeAPI) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for events := range f.watches {
		close(events)
	}
	clear(f.watches)
}

// outage ends all watches, makes changes meanwhile, and does not keep their events.
func (f *fakeAPI) outage(change func()) {
	f.mu.Lock()
	f.failures = 1 << 30
	f.mu.Unlock()
	f.cut()
	change()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	f.oldest = f.version
	f.failures = 0
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, query := path.Base(r.URL.Path), r.URL.Query()
	f.mu.Lock()
	f.requests = append(f.requests, request{resource, query})
	fails, absent, denied, held := f.failures > 0, f.absent[resource], f.denied[resource], f.held[resource]
	if fails {
		f.failures--
	}
	f.mu.Unlock()
	switch {
	case fails:
		refuse(w, apierrors.NewServiceUnavailable("not now"))
	case absent:
		http.NotFound(w, r)
	case denied:
		refuse(w, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no rule")))
	case held:
		<-r.Context().Done()
	case query.Get("watch") == "":
		f.list(w, resource)
	case query.Get("sendInitialEvents") != "" && !f.streams:
		refuse(w, apierrors.NewInvalid(metav1.Unversioned.WithKind("ListOptions").GroupKind(), "", nil))
	default:
		f.watch(w, r, resource)
	}
}

func (f *fakeAPI) list(w http.ResponseWriter, resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	reply(w, map[string]any{
		"apiVersion": apiKinds[resource][0],
		"kind":       apiKinds[resource][1] + "List",
		"metadata":   map[string]string{"resourceVersion": strconv.Itoa(f.version)},
		"items":      slices.Collect(maps.Values(f.objects[resource])),
	})
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string) {
	query := r.URL.Query()
	events := make(chan apiEvent, 100)
	f.mu.Lock()
	from, _ := strconv.Atoi(query.Get("resourceVersion"))
	if from < f.oldest && query.Get("sendInitialEvents") == "" {
		f.mu.Unlock()
		expired := apierrors.NewResourceExpired("too old").Status()
		expired.Kind, expired.APIVersion = "Status", "v1"
		if f.protobuf {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
			_, _ = w.Write(protobufFrame(apiEvent{watch.Error, &expired}))
		} else {
			reply(w, apiEvent{watch.Error, expired})
		}
		return
	}
	if query.Get("sendInitialEvents") != "" {
		for _, obj := range f.objects[resource] {
			events <- apiEvent{watch.Added, obj}
		}
		events <- apiEvent{watch.Bookmark, f.bookmark(resource)}
		from = f.version
	}
	for _, past := range f.history {
		if past.version > from && past.resource == resource {
			events <- past.event
		}
	}
	f.watches[events] = resource
	f.mu.Unlock()

	w.Header().Set("Content-Type", "application/json")
	encode := func(e apiEvent) { _ = json.NewEncoder(w).Encode(e) }
	if f.protobuf {
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		encode = func(e apiEvent) { _, _ = w.Write(protobufFrame(e)) }
	}
	w.WriteHeader(http.StatusOK)
	for {
		_ = http.NewResponseController(w).Flush()
		select {
		case event, ok := <-events:
			if !ok {
				return
			}
			encode(event)
		case <-r.Context().Done():
			return
		}
	}
}

// bookmark returns the bookmark that ends the initial events.
func (f *fakeAPI) bookmark(resource string) apiObject {
	obj := map[string]apiObject{
		"services": &corev1.Service{}, "endpointslices": &discoveryv1.EndpointSlice{},
		"nodes": &corev1.Node{}, "servicecidrs": &networkingv1.ServiceCIDR{},
		"pods": &corev1.Pod{}, "namespaces": &corev1.Namespace{},
	}[resource]
	resourceOf(obj)
	obj.SetResourceVersion(strconv.Itoa(f.version))
	obj.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	return obj
}

// protobufFrame returns an event as API servers send it.
func protobufFrame(e apiEvent) []byte {
	var object bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(e.Object.(runtime.Object), &object); err != nil {
		panic(err)
	}
	event := metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: object.Bytes()}}
	encoded, err := event.Marshal()
	if err != nil {
		panic(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(encoded))), encoded...)
}

// asked returns the queries for a resource so far.
func (f *fakeAPI) asked(resource string) []url.Values {
	f.mu.Lock()
	defer f.mu.Unlock()
	var queries []url.Values
	for _, r := range f.requests {
		if r.resource == resource {
			queries = append(queries, r.query)
		}
	}
	return queries
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, err *apierrors.StatusError) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(err.ErrStatus.Code))
	status := err.Status()
	status.Kind, status.APIVersion = "Status", "v1"
	_ = json.NewEncoder(w).Encode(status)
}

// apiKinds is the API version and kind of each resource.
var apiKinds = map[string][2]string{
	"services":       {"v1", "Service"},
	"endpointslices": {"discovery.k8s.io/v1", "EndpointSlice"},
	"nodes":          {"v1", "Node"},
	"servicecidrs":   {"networking.k8s.io/v1", "ServiceCIDR"},
	"pods":           {"v1", "Pod"},
	"namespaces":     {"v1", "Namespace"},
}

// resourceOf returns the resource of an object, and sets the object's kind.
func resourceOf(obj apiObject) string {
	var resource string
	var is *metav1.TypeMeta
	switch obj := obj.(type) {
	case *corev1.Service:
		resource, is = "services", &obj.TypeMeta
	case *discoveryv1.EndpointSlice:
		resource, is = "endpointslices", &obj.TypeMeta
	case *corev1.Node:
		resource, is = "nodes", &obj.TypeMeta
	case *networkingv1.ServiceCIDR:
		resource, is = "servicecidrs", &obj.TypeMeta
	case *corev1.Pod:
		resource, is = "pods", &obj.TypeMeta
	case *corev1.Namespace:
		resource, is = "namespaces", &obj.TypeMeta
	default:
		panic(fmt.Sprintf("no resource has %T", obj))
	}
	is.APIVersion, is.Kind = apiKinds[resource][0], apiKinds[resource][1]
	return resource
}
