package kube

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/test/lab"
)

// The results must be the same with servers that stream lists and servers that do not.
var allWays = []struct {
	name     string
	streams  bool // the server
	protobuf bool
}{
	{"streamed", true, true},
	{"listed", false, true},
	{"streamed as JSON", true, false},
	{"listed as JSON", false, false},
}

func TestWatch(t *testing.T) {
	for _, test := range allWays {
		t.Run(test.name, func(t *testing.T) {
			api, sink := newFakeAPI(t), newRecorder()
			api.streams, api.protobuf = test.streams, test.protobuf
			api.set(service("web", "10.96.0.1"), slice("web-1", "web", "10.0.1.7"), node("node1", "z1"), cidr("10.96.0.0/16"))
			w := mustWatch(t, api.config(t, sink))
			mustClose(t, "Synced", w.Synced())
			mustClose(t, "NodeSynced", w.NodeSynced())
			mustHave(t, sink, "Service default/web", "EndpointSlice default/web-1", "Node node1", "ServiceCIDRs")
			sink.mu.Lock()
			dialed := sink.dialed
			sink.mu.Unlock()
			if "http://"+dialed.String() != api.server.URL {
				t.Errorf("the API server was dialed at %v, want %s", dialed, api.server.URL)
			}

			api.set(service("web", "10.96.0.2"), slice("web-2", "web", "10.0.1.8"), node("node1", "z2"))
			mustBecome(t, sink, "Service default/web", "[10.96.0.2] [] [80/TCP]")
			mustBecome(t, sink, "EndpointSlice default/web-2", "default/web [8080/TCP] [10.0.1.8]")
			mustBecome(t, sink, "Node node1", `exists=true zone="z2" []`)

			// A label that a selector excludes is a deletion, its removal an addition.
			api.delete(service("web", "10.96.0.2"))
			api.delete(slice("web-1", "web", "10.0.1.7"))
			api.delete(node("node1", "z2"))
			api.delete(cidr("10.96.0.0/16"))
			mustHave(t, sink, "EndpointSlice default/web-2", "Node node1", "ServiceCIDRs")
			mustBecome(t, sink, "Node node1", `exists=false zone="" []`)
			mustBecome(t, sink, "ServiceCIDRs", "[]")
			api.set(service("web", "10.96.0.3"))
			mustBecome(t, sink, "Service default/web", "[10.96.0.3] [] [80/TCP]")
			other := service("web", "10.96.0.3")
			other.Labels = map[string]string{labelServiceProxyName: "other"}
			api.set(other)
			mustBecome(t, sink, "Service default/web", "[10.96.0.3] [] [] of another proxy")
			api.set(service("web", "10.96.0.3"))
			mustBecome(t, sink, "Service default/web", "[10.96.0.3] [] [80/TCP]")
		})
	}
}

// The requests must be those of kube-proxy, so that RBAC rules and the load of the API server
// are the same. Services of other proxies are requested, too: what has their addresses is not dropped.
func TestWatchRequests(t *testing.T) {
	for _, test := range []struct {
		resource, labels, fields string
	}{
		{"services", "", "spec.clusterIP!=None"},
		{"endpointslices", "!service.kubernetes.io/headless", ""},
		{"nodes", "", "metadata.name=node1"},
		{"servicecidrs", "", ""},
	} {
		t.Run("for "+test.resource, func(t *testing.T) {
			api, sink := newFakeAPI(t), newRecorder()
			mustClose(t, "Synced", mustWatch(t, api.config(t, sink)).Synced())
			mustAsk(t, api, test.resource, 3)
			for i, query := range api.asked(test.resource)[:3] {
				if got := query.Get("labelSelector"); got != test.labels {
					t.Errorf("request %d has label selector %q, want %q", i, got, test.labels)
				}
				if got := query.Get("fieldSelector"); got != test.fields {
					t.Errorf("request %d has field selector %q, want %q", i, got, test.fields)
				}
			}
			if first := api.asked(test.resource)[0]; first.Get("sendInitialEvents") != "true" {
				t.Errorf("the first request is %v, want a streamed list", first)
			}
		})
	}
}

// The list that follows 410 Gone shows the objects that were deleted while the API server
// could not be watched. The Node stays as it was: an API server that lists none must not make all nodes leave their
// load balancers.
func TestWatchOutage(t *testing.T) {
	for _, test := range allWays {
		t.Run(test.name, func(t *testing.T) {
			api, sink := newFakeAPI(t), newRecorder()
			api.streams, api.protobuf = test.streams, test.protobuf
			api.set(service("stays", "10.96.0.1"), service("goes", "10.96.0.2"), slice("goes-1", "goes", "10.0.1.7"))
			api.set(node("node1", "z1"), cidr("10.96.0.0/16"))
			mustClose(t, "Synced", mustWatch(t, api.config(t, sink)).Synced())
			mustHave(t, sink, "Service default/stays", "Service default/goes", "EndpointSlice default/goes-1", "Node node1", "ServiceCIDRs")

			api.outage(func() {
				api.delete(service("goes", "10.96.0.2"))
				api.delete(slice("goes-1", "goes", "10.0.1.7"))
				api.delete(node("node1", ""))
				api.delete(cidr("10.96.0.0/16"))
				api.set(service("new", "10.96.0.3"))
			})
			mustHave(t, sink, "Service default/stays", "Service default/new", "Node node1", "ServiceCIDRs")
			mustBecome(t, sink, "ServiceCIDRs", "[]")
			mustReport(t, sink, "Node node1", true)
			mustBecome(t, sink, "Node node1", `exists=true zone="z1" []`)

			// It is listed again, and then a watch shows that it is deleted.
			api.set(node("node1", "z2"))
			mustBecome(t, sink, "Node node1", `exists=true zone="z2" []`)
			api.delete(node("node1", "z2"))
			mustBecome(t, sink, "Node node1", `exists=false zone="" []`)
		})
	}
}

// A server that does not answer is reported until it does, and all objects stay in force.
func TestWatchFailing(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	api.set(service("web", "10.96.0.1"))
	mustClose(t, "Synced", mustWatch(t, api.config(t, sink)).Synced())

	api.mu.Lock()
	api.failures = 1 << 30
	api.mu.Unlock()
	api.cut()
	mustReport(t, sink, "services", true)
	mustAsk(t, api, "services", len(api.asked("services"))+5)
	mustHave(t, sink, "Service default/web")

	api.mu.Lock()
	api.failures = 0
	api.mu.Unlock()
	mustReport(t, sink, "services", false)
	times := 0
	for _, call := range sink.take() {
		if call == "report services: 1" {
			times++
		}
	}
	if times != 1 {
		t.Errorf("the failure was reported %d times, want once", times)
	}
}

// ServiceCIDRs are new in Kubernetes 1.33: without them everything else must work.
func TestWatchWithoutServiceCIDRs(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	api.absent["servicecidrs"] = true
	api.set(service("web", "10.96.0.1"))
	mustClose(t, "Synced", mustWatch(t, api.config(t, sink)).Synced())
	mustReport(t, sink, "servicecidrs", true)
	mustHave(t, sink, "Service default/web")

	time.Sleep(100 * time.Millisecond) // ten times the backoff
	if n := len(api.asked("servicecidrs")); n != 2 {
		t.Errorf("asked %d times, want once for a stream and once for a list", n)
	}
}

func TestWatchSyncedIsBoth(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	api.held["endpointslices"] = true
	api.streams = true
	api.set(service("web", "10.96.0.1"))
	w := mustWatch(t, api.config(t, sink))
	mustHave(t, sink, "Service default/web")
	mustClose(t, "NodeSynced", w.NodeSynced())
	select {
	case <-w.Synced():
		t.Error("synced without EndpointSlices")
	case <-time.After(50 * time.Millisecond):
	}
}

// A Reflector that backs off does not look at its context.
func TestWatchEndsDuringBackoff(t *testing.T) {
	api := newFakeAPI(t)
	cfg := api.config(t, newRecorder())
	cfg.backoff = wait.Backoff{Duration: time.Hour, Steps: 1}
	api.server.Close()
	w, err := NewWatcher(cfg)
	lab.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	begin := time.Now()
	if err := w.Run(ctx); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("Run took %v to end", took)
	}
}

// client-go's own fake cannot stream, but tests of the agent may use it.
func TestWatchFakeClientset(t *testing.T) {
	sink := newRecorder()
	client := fake.NewClientset(service("web", "10.96.0.1"), slice("web-1", "web", "10.0.1.7"), node("node1", "z1"))
	w := mustWatch(t, Config{Client: client, NodeName: "node1", Sink: sink})
	mustClose(t, "Synced", w.Synced())
	mustClose(t, "NodeSynced", w.NodeSynced())
	mustHave(t, sink, "Service default/web", "EndpointSlice default/web-1", "Node node1")
}

func TestConfigValidate(t *testing.T) {
	full := Config{Client: fake.NewClientset(), NodeName: "node1", Sink: newRecorder()}
	for _, test := range []struct {
		name string
		edit func(*Config)
		want string
	}{
		{"valid", func(*Config) {}, ""},
		{"without a client", func(c *Config) { c.Client = nil }, "Client"},
		{"without a node name", func(c *Config) { c.NodeName = "" }, "NodeName"},
		{"without a sink", func(c *Config) { c.Sink = nil }, "Sink"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := full
			test.edit(&cfg)
			_, err := NewWatcher(cfg)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("NewWatcher returned %v, want an error with %q", err, test.want)
			}
		})
	}
}

// mustAsk waits until a resource was asked for n times.
func mustAsk(t *testing.T, api *fakeAPI, resource string, n int) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("%s was asked for %d times", resource, n), func() bool { return len(api.asked(resource)) >= n })
}

// mustReport waits until a source has problems, or none.
func mustReport(t *testing.T, sink *recorder, source string, want bool) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("%s has problems is %v", source, want), func() bool { return len(sink.problems(source)) > 0 == want })
}

func service(name, clusterIP string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			ClusterIP: clusterIP,
			Ports:     []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
}

func slice(name, service string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default",
			Name:      name,
			Labels:    map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(8080))}},
	}
	for _, addr := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr}})
	}
	return s
}

func node(name, zone string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone}}}
}

func cidr(prefixes ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: prefixes},
	}
}
