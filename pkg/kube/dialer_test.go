package kube

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/lab"
)

// resourcesOf returns the names of resources, sorted.
func resourcesOf(silence map[string]time.Duration) []string {
	names := []string{}
	for name := range silence {
		names = append(names, name)
	}
	slices.Sort(names)

	return names
}

// The answer to a ping is heard: no watch has had an event for longer. The connection is found through those of TLS and
// of a client whose certificate may change.
func TestSilenceEndsByPings(t *testing.T) {
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "1")
	api, sink := newSecureAPI(t), newRecorder()
	api.set(service("web", "10.96.0.1"))
	w := mustWatch(t, api.config(t, sink))
	mustClose(t, "Synced", w.Synced())
	mustClose(t, "NodeSynced", w.NodeSynced())
	lab.Eventually(t, "all watches are open", func() bool {
		api.mu.Lock()
		defer api.mu.Unlock()

		return len(api.watches) == 4
	})
	began := time.Now()
	for time.Since(began) < 4*time.Second {
		silence := w.Silence()
		if diff := cmp.Diff([]string{"endpointslices", "nodes", "servicecidrs", "services"}, resourcesOf(silence)); diff != "" {
			t.Fatalf("resources, -want +got:\n%s", diff)
		}
		for resource, lasts := range silence {
			if lasts > 3*time.Second {
				t.Fatalf("nothing was heard of %s for %v, although pings are answered", resource, lasts)
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// A watch that is not open hears nothing, however often the server answers on its connection that it refuses it.
func TestSilenceOfARefusedWatch(t *testing.T) {
	api, sink := newSecureAPI(t), newRecorder()
	api.absent["servicecidrs"] = true
	w := mustWatch(t, api.config(t, sink))
	mustClose(t, "Synced", w.Synced())
	lab.Eventually(t, "a resource that the server does not have is missing", func() bool {
		return slices.Equal(resourcesOf(w.Silence()), []string{"endpointslices", "nodes", "services"})
	})
	api.mu.Lock()
	api.failures = 1 << 30
	api.mu.Unlock()
	api.cut()
	lab.Eventually(t, "no watch hears anything", func() bool { return w.Silence()["services"] > 300*time.Millisecond })
	api.mu.Lock()
	api.failures = 0
	api.mu.Unlock()
	lab.Eventually(t, "the watch hears again", func() bool { return w.Silence()["services"] < 100*time.Millisecond })
}

// An optional resource that the credentials may not read is none of which nothing is heard. Others are.
func TestSilenceOfAForbiddenWatch(t *testing.T) {
	api, sink := newSecureAPI(t), newRecorder()
	api.denied["servicecidrs"], api.denied["nodes"] = true, true
	w := mustWatch(t, api.config(t, sink))
	mustClose(t, "Synced", w.Synced())
	lab.Eventually(t, "an optional resource that is forbidden is missing", func() bool {
		return slices.Equal(resourcesOf(w.Silence()), []string{"endpointslices", "nodes", "services"})
	})
	mustReport(t, sink, "servicecidrs", true)
	time.Sleep(100 * time.Millisecond) // ten times the backoff
	if n := len(api.asked("servicecidrs")); n != 2 {
		t.Errorf("asked %d times, want once for a stream and once for a list", n)
	}
}

// Without HTTP/2 there are no pings. A watch that hears nothing for too long begins again where it was.
func TestSilentWatchBeginsAgain(t *testing.T) {
	api, sink := newFakeAPI(t), newRecorder()
	api.set(service("web", "10.96.0.1"))
	cfg := api.config(t, sink)
	cfg.Dialer.silence = 100 * time.Millisecond
	mustClose(t, "Synced", mustWatch(t, cfg).Synced())
	mustAsk(t, api, "services", len(api.asked("services"))+3)
	mustHave(t, sink, "Service default/web")
	mustReport(t, sink, "services", false)
}

func TestConnGivesUp(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	defer listener.Close()
	dialer := NewDialer(nil)
	dialer.silence = 50 * time.Millisecond
	c, err := dialer.DialContext(t.Context(), "tcp", listener.Addr().String())
	lab.Must(t, err)
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection that brings nothing is read with %v, want a timeout", err)
	}
}

// After a connection that failed, the next one is set apart from Services, or again is not. One that has worked is followed
// by one of the same way.
func TestConnectionsTakeTurnsBesideServices(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	defer listener.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err, closed.Close())
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()

	for name, test := range map[string]struct {
		to                net.Listener
		ctx               context.Context
		minLife, maxQuiet time.Duration
		turns             bool
	}{
		"refused":                  {closed, t.Context(), 0, time.Hour, true},
		"ended at once":            {listener, t.Context(), time.Hour, time.Hour, true},
		"quiet until its end":      {listener, t.Context(), 0, 0, true},
		"ended after it has lived": {listener, t.Context(), 0, time.Hour, false},
		"not wanted any more":      {closed, cancelled, time.Hour, 0, false},
	} {
		t.Run("it is "+name, func(t *testing.T) {
			apart, marked := false, false
			dialer := NewDialer(func(_ syscall.RawConn, begins bool) error {
				apart, marked = true, begins

				return nil
			})
			dialer.minLife, dialer.maxQuiet = test.minLife, test.maxQuiet
			want := false
			for try := range 5 {
				apart = false
				c, err := dialer.DialContext(test.ctx, "tcp", test.to.Addr().String())
				if err == nil {
					lab.Must(t, c.Close())
					if marked {
						t.Errorf("connection %d is set apart once it has begun", try)
					}
				}
				if apart != want {
					t.Errorf("connection %d is set apart: %t, want %t", try, apart, want)
				}
				want = want != test.turns
			}
		})
	}
}

// The resources of a Watcher dial at once, and HTTP/2 closes all connections but the one that it uses: none has failed.
func TestConnectionsThatAreNotNeededHaveNotFailed(t *testing.T) {
	api, sink := newSecureAPI(t), newRecorder()
	cfg := api.config(t, sink)
	var dials atomic.Int32
	several := make(chan struct{})
	client := api.access(t, cfg.Dialer)
	client.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials.Add(1) == 2 {
			close(several)
		}
		<-several

		return cfg.Dialer.DialContext(ctx, network, address)
	}
	var err error
	cfg.Client, err = kubernetes.NewForConfig(client)
	lab.Must(t, err)
	w := mustWatch(t, cfg)
	mustClose(t, "Synced", w.Synced())
	mustClose(t, "NodeSynced", w.NodeSynced())
	lab.Eventually(t, "all connections but one are closed", func() bool { return cfg.Dialer.count(false, 0) == 1 })
	if cfg.Dialer.apart.Load() {
		t.Errorf("after %d connections at once, of which one works, the next one is set apart", dials.Load())
	}
}
