package kube

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// eventAPI is the part of an API server that serves Events, with a Service ns/web and a
// Node node1.
type eventAPI struct {
	server *httptest.Server

	mu      sync.Mutex
	events  map[string]*eventsv1.Event // by namespace/name
	creates int
	patches int
	lists   int
	refuse  func(r *http.Request) *apierrors.StatusError // nil: none
}

func newEventAPI(t *testing.T) *eventAPI {
	f := &eventAPI{events: map[string]*eventsv1.Event{}}
	f.server = httptest.NewServer(f)
	t.Cleanup(f.server.Close)

	return f
}

func (f *eventAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		if err := f.refuse(r); err != nil {
			sendJSON(w, int(err.ErrStatus.Code), &err.ErrStatus)

			return
		}
	}
	switch r.Method {
	case http.MethodGet:
		f.lists++
		sendJSON(w, http.StatusOK, list(r))
	case http.MethodPost:
		f.create(w, r)
	case http.MethodPatch:
		f.patch(w, r)
	}
}

func list(r *http.Request) any {
	name := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	switch {
	case strings.HasSuffix(r.URL.Path, "/nodes"):
		nodes := &corev1.NodeList{}
		if name == "node1" {
			nodes.Items = append(nodes.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-of-node1"}})
		}

		return nodes
	case r.URL.Path == "/api/v1/namespaces/ns/pods" && name == "a":
		return &corev1.PodList{Items: []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-of-a"}}}}
	case r.URL.Path == "/api/v1/namespaces" && name == "mesh":
		return &corev1.NamespaceList{Items: []corev1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-of-mesh"}}}}
	case r.URL.Path == "/api/v1/namespaces/ns/services" && name == "web":
		return &corev1.ServiceList{Items: []corev1.Service{{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-of-web"}}}}
	}

	return &corev1.ServiceList{}
}

func (f *eventAPI) create(w http.ResponseWriter, r *http.Request) {
	var event eventsv1.Event
	if err := json.NewDecoder(r.Body).Decode(&event); err != nil {
		panic(err)
	}
	f.creates++
	key := event.Namespace + "/" + event.Name
	if f.events[key] != nil {
		known := apierrors.NewAlreadyExists(schema.GroupResource{Resource: "events"}, event.Name)
		sendJSON(w, http.StatusConflict, &known.ErrStatus)

		return
	}
	f.events[key] = &event
	sendJSON(w, http.StatusCreated, &event)
}

func (f *eventAPI) patch(w http.ResponseWriter, r *http.Request) {
	f.patches++
	parts := strings.Split(r.URL.Path, "/")
	event := f.events[parts[len(parts)-3]+"/"+path.Base(r.URL.Path)]
	if event == nil {
		absent := apierrors.NewNotFound(schema.GroupResource{Resource: "events"}, path.Base(r.URL.Path))
		sendJSON(w, http.StatusNotFound, &absent.ErrStatus)

		return
	}
	if err := json.NewDecoder(r.Body).Decode(event); err != nil {
		panic(err)
	}
	sendJSON(w, http.StatusOK, event)
}

func sendJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

// stored returns all Events.
func (f *eventAPI) stored() []eventsv1.Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []eventsv1.Event
	for _, e := range f.events {
		all = append(all, *e)
	}

	return all
}

func (f *eventAPI) counts() (creates, patches, lists int) {
	f.mu.Lock()
	defer f.mu.Unlock()

	return f.creates, f.patches, f.lists
}

func (f *eventAPI) client(t *testing.T) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: f.server.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	})
	if err != nil {
		t.Fatal(err)
	}

	return client
}
