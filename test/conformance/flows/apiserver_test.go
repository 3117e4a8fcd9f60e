package flows

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/test/lab"
)

// apiServer lists the objects of a scenario and watches nothing happen to them.
// It has them as an old cluster may: no validation, no defaults.
type apiServer struct {
	resources map[string][]runtime.Object

	// An agent is synced when it knows Services and slices; a scenario is about
	// one that knows its Node and ServiceCIDRs, too. So these are given out
	// first: a client that watches them has them already.
	given map[string]func() // by resource, closes a channel of first
	first []chan struct{}
}

// mustAPIServer returns a kubeconfig that leads to the objects of a scenario, for
// an agent in this namespace.
func mustAPIServer(t *testing.T, ns *lab.Namespace, s *scenario) string {
	t.Helper()

	return mustServeObjects(t, ns, "127.0.0.1:0", (*httptest.Server).Start, s.resources())
}

// mustServeObjects is mustAPIServer for these objects, at an address of the namespace, with or without TLS.
func mustServeObjects(t *testing.T, ns *lab.Namespace, address string, start func(*httptest.Server), resources map[string][]runtime.Object) string {
	t.Helper()
	a := &apiServer{resources: resources, given: map[string]func(){}}
	for _, resource := range []string{"nodes", "servicecidrs"} {
		watched := make(chan struct{})
		a.first = append(a.first, watched)
		a.given[resource] = sync.OnceFunc(func() { close(watched) })
	}
	listener, err := ns.Listen("tcp", address)
	lab.Must(t, err)
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: a}}
	start(server)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})

	path := filepath.Join(t.TempDir(), "kubeconfig")
	trust := ""
	if certificate := server.Certificate(); certificate != nil {
		block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw})
		trust = fmt.Sprintf(", tls-server-name: %q, certificate-authority-data: %q", certificate.DNSNames[0], base64.StdEncoding.EncodeToString(block))
	}
	text := fmt.Sprintf(kubeconfig, server.URL, trust)
	lab.Must(t, os.WriteFile(path, []byte(text), 0o600))

	return path
}

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: flows, cluster: {server: %q%s}}]
contexts: [{name: flows, context: {cluster: flows}}]
current-context: flows
`

// ServeHTTP implements [http.Handler].
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, query := filepath.Base(r.URL.Path), r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case query.Get("sendInitialEvents") != "":
		// No streamed lists here: the agent asks for plain ones then.
		status := apierrors.NewInvalid(metav1.Unversioned.WithKind("ListOptions").GroupKind(), "", nil).Status()
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		w.WriteHeader(int(status.Code))
		_ = json.NewEncoder(w).Encode(status) // a reader that is gone
	case query.Get("watch") != "":
		if given := a.given[resource]; given != nil {
			given()
		}
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case a.resources[resource] == nil:
		http.NotFound(w, r)
	default:
		a.list(w, r, resource)
	}
}

func (a *apiServer) list(w http.ResponseWriter, r *http.Request, resource string) {
	for i := 0; a.given[resource] == nil && i < len(a.first); i++ {
		select {
		case <-a.first[i]:
		case <-r.Context().Done():
			return
		}
	}
	kind := listKinds[resource]
	_ = json.NewEncoder(w).Encode(map[string]any{ // a reader that is gone
		"apiVersion": kind[0],
		"kind":       kind[1],
		"metadata":   map[string]string{"resourceVersion": "1"},
		"items":      a.resources[resource],
	})
}

var listKinds = map[string][2]string{
	"services":       {"v1", "ServiceList"},
	"endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"},
	"nodes":          {"v1", "NodeList"},
	"servicecidrs":   {"networking.k8s.io/v1", "ServiceCIDRList"},
}
