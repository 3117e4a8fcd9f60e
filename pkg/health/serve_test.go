package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// timeout is long enough for a busy machine.
const timeout = time.Minute

// testAddress is where servers of tests listen.
const testAddress = "127.0.0.1:10256"

// mustServe runs a server that says hello, and returns its network namespace.
func mustServe(t testing.TB) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, "health")
	lab.MustRun(t, Server{
		Name: "test", Address: netip.MustParseAddrPort(testAddress), Handler: hello(),
		Listen: ns.Listen, Log: slog.New(slog.DiscardHandler),
	}.Run)
	mustSayHello(t, ns, testAddress)

	return ns
}

// mustSayHello waits until a server says hello.
func mustSayHello(t testing.TB, ns *lab.Namespace, address string) {
	t.Helper()
	lab.Eventually(t, address+" says hello", func() error {
		_, body, _, err := get(ns, "GET", address, "/")
		if err == nil && body != "hello" {
			err = fmt.Errorf("it answers %q", body)
		}

		return err
	})
}

// get asks for a page from a network namespace.
func get(ns *lab.Namespace, method, address, path string) (int, string, http.Header, error) {
	client := &http.Client{Timeout: timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return ns.Dial(network, address, 5*time.Second)
		},
	}}
	request, err := http.NewRequest(method, "http://"+address+path, nil)
	if err != nil {
		return 0, "", nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)

	return response.StatusCode, string(body), response.Header, err
}

func hello() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
}

// The unspecified address of either family is all addresses of both, also where
// IPv6 is switched off.
func TestServerListens(t *testing.T) {
	for _, test := range []struct {
		name      string
		address   string
		noIPv6    bool
		reached   []string
		unreached []string
	}{
		{"on both families by 0.0.0.0", "0.0.0.0:10256", false, []string{testAddress, "10.9.8.7:10256", "[::1]:10256"}, nil},
		{"on both families by ::", "[::]:10256", false, []string{testAddress, "10.9.8.7:10256", "[::1]:10256"}, nil},
		{"on one address", testAddress, false, []string{testAddress}, []string{"10.9.8.7:10256", "[::1]:10256"}},
		{"on one IPv6 address", "[::1]:10256", false, []string{"[::1]:10256"}, []string{testAddress}},
		{"on IPv4 without IPv6", "0.0.0.0:10256", true, []string{testAddress}, []string{"[::1]:10256"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "health")
			if test.noIPv6 {
				lab.Must(t, ns.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
			}
			lab.Must(t, ns.AddAddress("lo", netip.MustParsePrefix("10.9.8.7/32")))
			lab.MustRun(t, Server{
				Name: "test", Address: netip.MustParseAddrPort(test.address), Handler: hello(),
				Listen: ns.Listen, Log: slog.New(slog.DiscardHandler),
			}.Run)
			for _, address := range test.reached {
				mustSayHello(t, ns, address)
			}
			for _, address := range test.unreached {
				if _, body, _, err := get(ns, "GET", address, "/"); err == nil {
					t.Errorf("%s answers %q, and should not", address, body)
				}
			}
		})
	}
}

// An address that another program has is listened on as soon as it is free. It is logged
// once, not once a try; each try is reported, since another program may have it by then.
func TestServerTriesAgain(t *testing.T) {
	ns := lab.MustNamespace(t, "health")
	other, err := ns.Listen("tcp", testAddress)
	lab.Must(t, err)
	tries, reported := make(chan struct{}, 1000), make(chan error, 1000)
	var log lab.Log
	lab.MustRun(t, Server{
		Name: "test", Address: netip.MustParseAddrPort(testAddress), Handler: hello(),
		Listen: func(network, address string) (net.Listener, error) {
			tries <- struct{}{}

			return ns.Listen(network, address)
		},
		Listening: func(err error) {
			if err != nil {
				reported <- err
			}
		},
		Log: slog.New(slog.NewTextHandler(&log, nil)), retry: time.Millisecond,
	}.Run)
	for range 3 {
		<-tries
		if err := <-reported; !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a try is reported as %v", err)
		}
	}
	other.Close()
	mustSayHello(t, ns, testAddress)
	if n := strings.Count(log.String(), "address already in use"); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
}

func TestServerFailsHard(t *testing.T) {
	ns := lab.MustNamespace(t, "health")
	other, err := ns.Listen("tcp", testAddress)
	lab.Must(t, err)
	defer other.Close()
	err = Server{
		Name: "test", Address: netip.MustParseAddrPort(testAddress), Handler: hello(), HardFail: true,
		Listen: ns.Listen, Log: slog.New(slog.DiscardHandler),
	}.Run(t.Context())
	if !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("the error is %v, want one that wraps %v", err, syscall.EADDRINUSE)
	}
}

// The end of a server, hard failing or not, is no error.
func TestServerEnds(t *testing.T) {
	ns := lab.MustNamespace(t, "health")
	end := lab.MustRun(t, Server{
		Name: "test", Address: netip.MustParseAddrPort(testAddress), Handler: hello(), HardFail: true,
		Listen: ns.Listen, Log: slog.New(slog.DiscardHandler),
	}.Run)
	mustSayHello(t, ns, testAddress)
	end()
	if _, _, _, err := get(ns, "GET", testAddress, "/"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("afterwards: %v, want %v", err, syscall.ECONNREFUSED)
	}
}

// What handlers use may be closed when a server has ended, also beside one that goes on although its answer was cut off.
func TestServeUntilHandled(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	asked, handled := make(chan struct{}), new(atomic.Bool)
	server := NewHTTPServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(asked)
		time.Sleep(shutdownTimeout + 500*time.Millisecond)
		handled.Store(true)
	}), new(Connections))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		if response, err := http.Get("http://" + listener.Addr().String()); err == nil {
			response.Body.Close()
		}
	}()
	go func() {
		<-asked
		stop()
	}()
	if err := ServeUntil(ctx, server, listener); err != nil || !handled.Load() {
		t.Errorf("it ended with %v while a request was handled: %v", err, !handled.Load())
	}
	late := httptest.NewRecorder()
	server.Handler.ServeHTTP(late, httptest.NewRequest(http.MethodGet, "/", nil))
	if late.Code != http.StatusServiceUnavailable {
		t.Errorf("a request that comes too late is answered with %d, want %d", late.Code, http.StatusServiceUnavailable)
	}
}

// A server that ends waits for its open requests, and cancels their contexts.
func TestServeUntilAnswered(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	asked, canceled := make(chan struct{}), false
	server := NewHTTPServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(asked)
		<-r.Context().Done()
		time.Sleep(50 * time.Millisecond) // it is not that quick
		canceled = true
	}), new(Connections))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- ServeUntil(ctx, server, listener) }()
	go func() {
		if response, err := http.Get("http://" + listener.Addr().String()); err == nil {
			response.Body.Close()
		}
	}()
	<-asked
	stop()
	if err := <-ended; err != nil || !canceled {
		t.Errorf("it ended with %v while it was being asked: %v", err, !canceled)
	}
}
