package scale

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"sync"
	"testing"

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
// streams the objects by HTTP/2, encoded beforehand, so that it is the agent that is
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
		contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]}`, listener.Addr())
	lab.Must(t, os.WriteFile(s.kubeconfig, []byte(text), 0o600))
	server := httptest.NewUnstartedServer(s)
	server.Listener.Close()
	server.Listener, server.EnableHTTP2 = listener, true
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})

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

// mustEncode encodes events as they are on the wire.
func mustEncode(t testing.TB, version schema.GroupVersion, events ...watch.Event) []byte {
	t.Helper()
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	var out bytes.Buffer
	// The event itself has the version of the API's own types.
	types := scheme.Codecs.EncoderForVersion(info.StreamSerializer.Serializer, version)
	objects := scheme.Codecs.EncoderForVersion(info.Serializer, version)
	encoder := restwatch.NewEncoder(streaming.NewEncoder(info.StreamSerializer.Framer.NewFrameWriter(&out), types), objects)
	for _, event := range events {
		lab.Must(t, encoder.Encode(&event))
	}

	return out.Bytes()
}

// mustEncodeAll encodes all objects of a resource, with the bookmark that ends
// it. Bookmark is an empty object.
func mustEncodeAll[T runtime.Object](t testing.TB, version schema.GroupVersion, objects []T, bookmark metav1.ObjectMetaAccessor) []byte {
	t.Helper()
	var events []watch.Event
	for _, object := range objects {
		events = append(events, watch.Event{Type: watch.Added, Object: object})
	}
	end := bookmark.GetObjectMeta()
	end.SetResourceVersion("1000000")
	end.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})

	return mustEncode(t, version, append(events, watch.Event{Type: watch.Bookmark, Object: bookmark.(runtime.Object)})...)
}
