package scale

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"sync"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"

	"github.com/sluice-lb/sluice/test/lab"
)

// apiServer is an API server as far as an agent goes, for one agent: it
// streams the objects, encoded beforehand, so that it is the agent that is
// measured. It knows nothing of selectors.
type apiServer struct {
	kubeconfig string
	initial    map[string][]byte // by resource

	mu      sync.Mutex
	watches map[string]http.ResponseWriter // by resource, the newest
}

// mustServe starts an API server on the loopback device of a namespace.
func mustServe(t testing.TB, ns *lab.Namespace, initial map[string][]byte) *apiServer {
	t.Helper()
	listener, err := ns.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	s := &apiServer{
		initial: initial, watches: make(map[string]http.ResponseWriter), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"),
	}
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, users: [],
		contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: "http://%s"}}]}`, listener.Addr())
	lab.Must(t, os.WriteFile(s.kubeconfig, []byte(text), 0o600))
	server := &http.Server{Handler: s}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })

	return s
}

// ServeHTTP answers a watch that asks for the initial events, which is what
// agents try first, and stays until the agent goes.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	initial, ok := s.initial[resource]
	if !ok || r.URL.Query().Get("sendInitialEvents") != "true" {
		http.Error(w, r.URL.String(), http.StatusNotFound)

		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	s.mu.Lock()
	_, err := w.Write(initial)
	if err == nil {
		err = http.NewResponseController(w).Flush()
	}
	s.watches[resource] = w
	s.mu.Unlock()
	if err == nil {
		<-r.Context().Done()
	}
}

// mustSend sends an event, and returns when it is written to the connection.
func (s *apiServer) mustSend(t testing.TB, resource string, event []byte) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.watches[resource].Write(event)
	lab.Must(t, err, http.NewResponseController(s.watches[resource]).Flush())
}

// eventEncoder encodes events as they are on the wire.
type eventEncoder struct {
	*restwatch.Encoder
	out *bytes.Buffer
}

func newEventEncoder(version schema.GroupVersion) *eventEncoder {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	out := new(bytes.Buffer)
	// The event itself has the version of the API's own types.
	events := scheme.Codecs.EncoderForVersion(info.StreamSerializer.Serializer, version)
	objects := scheme.Codecs.EncoderForVersion(info.Serializer, version)
	frames := info.StreamSerializer.Framer.NewFrameWriter(out)

	return &eventEncoder{restwatch.NewEncoder(streaming.NewEncoder(frames, events), objects), out}
}

func (e *eventEncoder) mustEncode(t testing.TB, kind watch.EventType, object runtime.Object) {
	t.Helper()
	lab.Must(t, e.Encode(&watch.Event{Type: kind, Object: object}))
}

// mustEncodeAll encodes all objects of a resource, with the bookmark that ends
// it. Bookmark is an empty object.
func mustEncodeAll[T runtime.Object](t testing.TB, version schema.GroupVersion, objects []T, bookmark metav1.ObjectMetaAccessor) []byte {
	t.Helper()
	e := newEventEncoder(version)
	for _, object := range objects {
		e.mustEncode(t, watch.Added, object)
	}
	end := bookmark.GetObjectMeta()
	end.SetResourceVersion("1000000")
	end.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	e.mustEncode(t, watch.Bookmark, bookmark.(runtime.Object))

	return e.out.Bytes()
}

// mustEncodeSlice encodes one change.
func mustEncodeSlice(t testing.TB, slice *discoveryv1.EndpointSlice) []byte {
	t.Helper()
	e := newEventEncoder(discoveryv1.SchemeGroupVersion)
	e.mustEncode(t, watch.Modified, slice)

	return e.out.Bytes()
}
