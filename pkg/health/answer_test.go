package health

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"testing"
)

// answers asks a handler, and returns code, body and content type.
func answers(t *testing.T, h http.Handler, method, path string) (int, string, http.Header) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))

	return w.Code, w.Body.String(), w.Header()
}

// The bodies are kube-proxy's, byte by byte.
func TestHealthz(t *testing.T) {
	for _, test := range []struct {
		name           string
		life           string // see live
		eligible       bool
		healthz, livez int
		healthzBody    string
		livezBody      string
	}{
		{
			name: "healthy before it starts", eligible: true, healthz: 200, livez: 200,
			healthzBody: `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:00:00Z","nodeEligible":true,"healthy":true}`,
			livezBody:   `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:00:00Z","healthy":true}`,
		}, {
			name: "healthy, with a last update of now", life: "STA..", eligible: true, healthz: 200, livez: 200,
			healthzBody: `{"lastUpdated":"2026-03-01T12:01:00Z","currentTime":"2026-03-01T12:01:00Z","nodeEligible":true,"healthy":true,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
			livezBody: `{"lastUpdated":"2026-03-01T12:01:00Z","currentTime":"2026-03-01T12:01:00Z","healthy":true,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
		}, {
			name: "drained, but alive, on a node that is not eligible", life: "STA..", healthz: 503, livez: 200,
			healthzBody: `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:01:00Z","nodeEligible":false,"healthy":true,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
			livezBody: `{"lastUpdated":"2026-03-01T12:01:00Z","currentTime":"2026-03-01T12:01:00Z","healthy":true,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
		}, {
			name: "out of load balancers, but alive, when programs have no effect", life: "STA-..", eligible: true, healthz: 503, livez: 200,
			healthzBody: `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:01:00Z","nodeEligible":true,"healthy":false,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false}}}`,
			livezBody: `{"lastUpdated":"2026-03-01T12:01:00Z","currentTime":"2026-03-01T12:01:00Z","healthy":true,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
		}, {
			name: "unhealthy, with the true last update", life: "STA.Q..", eligible: true, healthz: 503, livez: 503,
			healthzBody: `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:01:30Z","nodeEligible":true,"healthy":false,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false}}}`,
			livezBody: `{"lastUpdated":"2026-03-01T12:00:00Z","currentTime":"2026-03-01T12:01:30Z","healthy":false,` +
				`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":false}}}`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, clock := newTestProxy()
			live(p, clock, test.life)
			var observed []string
			h := Handler(Config{
				Proxy:    p,
				Eligible: func() bool { return test.eligible },
				Observe:  func(path string, code int) { observed = append(observed, fmt.Sprint(path, " ", code)) },
			})
			mustAnswer(t, h, "/healthz", test.healthz, test.healthzBody)
			mustAnswer(t, h, "/livez", test.livez, test.livezBody)
			want := []string{fmt.Sprint("/healthz ", test.healthz), fmt.Sprint("/livez ", test.livez)}
			if !slices.Equal(observed, want) {
				t.Errorf("observed %v, want %v", observed, want)
			}
		})
	}
}

func mustAnswer(t *testing.T, h http.Handler, path string, code int, body string) {
	t.Helper()
	gotCode, gotBody, header := answers(t, h, "GET", path)
	if gotCode != code || gotBody != body {
		t.Errorf("%s is %d\n%s\nwant %d\n%s", path, gotCode, gotBody, code, body)
	}
	if got := header.Get("Content-Type"); got != "application/json" {
		t.Errorf("%s: Content-Type is %q", path, got)
	}
	if got := header.Get("X-Content-Type-Options"); got != "nosniff" {
		t.Errorf("%s: X-Content-Type-Options is %q", path, got)
	}
}

func TestReadyz(t *testing.T) {
	p, _ := newTestProxy()
	var reasons []string
	h := Handler(Config{Proxy: p, Ready: func() []string { return reasons }})
	mustAnswer(t, h, "/readyz", 200, `{"ready":true}`)
	reasons = []string{"not all Services are known", `device "eth0": gone`}
	for _, test := range []struct{ client, local, body string }{
		{"127.0.0.1:4711", "127.0.0.1:10256", `{"ready":false,"reasons":["not all Services are known","device \"eth0\": gone"]}`},
		{"192.168.50.1:4711", "192.168.50.1:10256", `{"ready":false,"reasons":["not all Services are known","device \"eth0\": gone"]}`},
		{"10.244.1.2:4711", "192.168.50.1:10256", `{"ready":false}`},
		{"", "192.168.50.1:10256", `{"ready":false}`},
	} {
		request := httptest.NewRequest("GET", "/readyz", nil)
		request.RemoteAddr = test.client
		local := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(test.local))
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, request.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, local)))
		if answer.Code != 503 || answer.Body.String() != test.body {
			t.Errorf("a client at %q reads %d %s, want %s", test.client, answer.Code, answer.Body, test.body)
		}
	}
}

func TestNothingElseIsFound(t *testing.T) {
	p, _ := newTestProxy()
	observed := 0
	h := Handler(Config{
		Proxy: p, Eligible: func() bool { return true }, Ready: func() []string { return nil },
		Observe: func(string, int) { observed++ },
	})
	for _, path := range []string{"/", "/healthz/", "/healthz/x", "/livez/x", "/metrics", "/statusz", "/Healthz"} {
		if code, body, _ := answers(t, h, "GET", path); code != 404 {
			t.Errorf("%s is %d: %s", path, code, body)
		}
	}
	if observed != 0 {
		t.Errorf("%d answers were observed that are none", observed)
	}
	for _, method := range []string{"HEAD", "POST", "DELETE"} {
		if code, _, _ := answers(t, h, method, "/livez"); code != 200 {
			t.Errorf("%s /livez is %d, want 200", method, code)
		}
	}
}
