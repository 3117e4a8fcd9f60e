package conformance

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// probe is how a cloud's load balancer asks node-1 for a Service.
//
//	outside ── node-1:healthCheckNodePort
type probe struct {
	*balanced
	port int32
}

// checked is the answer that it gets: 0 endpoints and no status without an answer.
type checked struct {
	status  int
	weight  string
	kind    string
	sniff   string
	message string
}

func mustProbe(t *testing.T) *probe {
	t.Helper()
	p := &probe{balanced: mustBalance(t, scene.ExternalLocal)}
	p.port = p.service.Spec.HealthCheckNodePort

	return p
}

// ask asks at an address.
func (p *probe) ask(method string, ip netip.Addr, path string) (checked, error) {
	client := http.Client{Timeout: lab.Timeout / 4, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return p.Lab.Client.Dial(network, address, lab.Timeout/4)
		},
	}}
	request, err := http.NewRequest(method, "http://"+scene.At(ip.String(), p.port)+path, nil)
	if err != nil {
		return checked{}, err
	}
	response, err := client.Do(request)
	if err != nil {
		return checked{}, err
	}
	defer response.Body.Close()
	message, err := io.ReadAll(response.Body)

	return checked{
		status:  response.StatusCode,
		weight:  response.Header.Get("X-Load-Balancing-Endpoint-Weight"),
		kind:    response.Header.Get("Content-Type"),
		sniff:   response.Header.Get("X-Content-Type-Options"),
		message: string(message),
	}, err
}

// expected returns kube-proxy's answer for a number of endpoints.
func (p *probe) expected(endpoints int) checked {
	status := http.StatusOK
	if endpoints == 0 {
		status = http.StatusServiceUnavailable
	}

	return checked{status, fmt.Sprint(endpoints), "application/json", "nosniff", fmt.Sprintf(
		"{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": true\n}",
		p.Objects.Namespace, endpoints)}
}

// mustReport waits until the probe gets a number of endpoints, by each family.
func (p *probe) mustReport(t *testing.T, v4, v6 int) {
	t.Helper()
	self := p.Lab.Nodes[0]
	for i, ip := range []netip.Addr{self.IPv4, self.IPv6} {
		want := p.expected([]int{v4, v6}[i])
		lab.Eventually(t, fmt.Sprintf("%s answers %+v", ip, want), func() bool {
			got, err := p.ask(http.MethodGet, ip, "/healthz")

			return err == nil && got == want
		})
	}
}

// mustBeSilent waits until no process answers at a port.
func (p *probe) mustBeSilent(t *testing.T, port int32) {
	t.Helper()
	self := p.Lab.Nodes[0]
	for _, ip := range []netip.Addr{self.IPv4, self.IPv6} {
		scene.MustFail(t, p.Outside.To("tcp", scene.At(ip.String(), port)), scene.Rejected) // by the node
	}
}

// A load balancer learns how many endpoints of a Service are ready on the node:
// terminating ones do not count, although they still serve.
func TestHealthCheckNodePort(t *testing.T) {
	t.Parallel()
	p := mustProbe(t)
	second := p.Local()[1]
	p.mustReport(t, 1, 1)
	p.SetEndpoints(t, "web", scene.ReadyAll(p.here, second, p.there)...)
	p.mustReport(t, 2, 2)
	self := p.Lab.Nodes[0]
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		if got, err := p.ask(method, self.IPv4, "/any/path?at=all"); err != nil || got != p.expected(2) {
			t.Errorf("%s: %+v, %v", method, got, err)
		}
	}

	// An address counts once, whatever its ports.
	more := p.Slice("web", discoveryv1.AddressTypeIPv4, scene.ReadyAll(p.here)...)
	more.Name, more.Ports[0].Port = "web-more", new(int32(8081))
	p.PutSlice(t, more)
	p.SetEndpoints(t, "web", scene.Endpoint{Pod: p.here, Is: scene.Ready}, scene.Endpoint{Pod: second, Is: scene.Starting},
		scene.Endpoint{Pod: p.there, Is: scene.Ready})
	p.mustReport(t, 1, 1)
	p.DeleteSlice(t, more.Name)

	// Families are each for themselves.
	p.PutSlice(t, p.Slice("web", discoveryv1.AddressTypeIPv6, scene.ReadyAll(p.there)...))
	p.mustReport(t, 1, 0)

	p.SetEndpoints(t, "web", scene.Endpoint{Pod: p.here, Is: scene.Draining}, scene.Endpoint{Pod: p.there, Is: scene.Ready})
	p.mustReport(t, 0, 0)
	scene.MustReach(t, p.Outside.To("tcp", p.nodePort()), p.here.Name) // still
}

// The port is there as long as the Service is of type LoadBalancer and keeps its
// traffic on the node, and at the addresses of node ports only.
func TestHealthCheckNodePortComesAndGoes(t *testing.T) {
	t.Parallel()
	p := mustProbe(t)
	p.mustReport(t, 1, 1)
	bridge := netip.MustParseAddr("10.244.1.1") // no address for node ports
	for _, c := range []*scene.Client{p.Node, p.Pod} {
		scene.MustFail(t, c.To("tcp", scene.At(bridge.String(), p.port)), scene.Rejected)
	}
	open, err := p.Lab.Client.Dial("tcp", scene.At(p.Lab.Nodes[0].IPv4.String(), p.port), lab.Timeout/4)
	lab.Must(t, err)
	defer open.Close()
	old := p.port
	p.ChangeService(t, "web", scene.ExternalCluster)
	p.mustBeSilent(t, old)
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection was not cut")
	}
	p.port = p.ChangeService(t, "web", scene.ExternalLocal).Spec.HealthCheckNodePort
	p.mustReport(t, 1, 1)
	p.ChangeService(t, "web", scene.NodePort)
	p.mustBeSilent(t, p.port)
	p.port = p.ChangeService(t, "web", scene.LoadBalancer).Spec.HealthCheckNodePort
	p.mustReport(t, 1, 1)
	p.DeleteService(t, "web")
	p.mustBeSilent(t, p.port)
}

// A port that another process of the node has is reported, and the agent listens there
// when it is free.
func TestHealthCheckNodePortIsTaken(t *testing.T) {
	t.Parallel()
	p := mustProbe(t)
	p.mustReport(t, 1, 1)
	p.port = p.ChangeService(t, "web", scene.ExternalCluster).Spec.HealthCheckNodePort
	const port = 30001 // in the part of the range that the API server does not give out
	squatter := lab.MustServe(t, p.Lab.Nodes[0].Namespace, "squatter", "tcp/"+scene.At(p.Lab.Nodes[0].IPv4.String(), port))
	p.ChangeService(t, "web", scene.ExternalLocal, func(svc *corev1.Service) { svc.Spec.HealthCheckNodePort = port })
	p.port = port
	lab.Eventually(t, "an event reports that the port is taken", func() bool {
		events, err := p.Scene.Objects.Client.EventsV1().Events(p.Objects.Namespace).List(t.Context(), metav1.ListOptions{})
		lab.Must(t, err)
		for _, event := range events.Items {
			if event.Reason == "FailedToStartServiceHealthcheck" && event.Regarding.Name == "web" && event.Type == corev1.EventTypeWarning {
				return true
			}
		}

		return false
	})
	lab.Must(t, squatter.Stop())
	p.mustReport(t, 1, 1)
}
