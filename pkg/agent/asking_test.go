package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// BenchmarkAsking asks an agent that has 100,000 Services of two endpoints what the verbs ask, and reports for how long a
// change had to wait for its turn meanwhile, and how much memory was in use at most beside what was before.
func BenchmarkAsking(b *testing.B) {
	const services = 100_000
	p := mustRunWithServices(b, services)
	ask := askerOf(b, p)
	for _, verb := range []struct {
		name string
		ask  func(ctx context.Context) error
	}{
		{"nothing", func(context.Context) error {
			time.Sleep(300 * time.Millisecond)

			return nil
		}},
		{"status", func(ctx context.Context) error {
			_, err := p.status(ctx)

			return err
		}},
		{"services", ask("/services")},
		{"verify", ask("/desired")},
		{"metrics", func(ctx context.Context) error {
			_, err := queue.Ask(ctx, p.queue, p.modelStats)

			return err
		}},
		{"report", func(ctx context.Context) error {
			_, err := p.statuses(ctx)

			return err
		}},
	} {
		b.Run(verb.name, func(b *testing.B) {
			debug.FreeOSMemory()
			begin := inUse()
			ctx, stop := context.WithCancel(b.Context())
			var longest time.Duration
			var most uint64
			var watching sync.WaitGroup
			watching.Go(func() {
				for ctx.Err() == nil {
					most = max(most, inUse())
					time.Sleep(time.Millisecond)
				}
			})
			watching.Go(func() {
				for ctx.Err() == nil {
					asked := time.Now()
					_ = p.queue.InTurn(func() error { return nil })
					longest = max(longest, time.Since(asked))
					time.Sleep(100 * time.Microsecond)
				}
			})
			for range b.N {
				lab.Must(b, verb.ask(ctx))
			}
			stop()
			watching.Wait()
			b.ReportMetric(float64(longest)/float64(time.Millisecond), "ms-longest-wait")
			b.ReportMetric(float64(most-min(most, begin))/1e6, "MB-at-most")
		})
	}
}

// Answers about Services are made part by part, in memory that is used again and again: beside 100,000 Services they leave
// less than 50 MB of garbage, so that they make the agent neither larger nor busy collecting.
func TestAnswersTakeLittleMemory(t *testing.T) {
	const services, most = 20_000, 500 // bytes for each
	if build, _ := debug.ReadBuildInfo(); slices.Contains(build.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("the race detector has pools forget what they hold: encoding/json allocates it again and again")
	}
	p := mustRunWithServices(t, services)
	ask := askerOf(t, p)
	for _, path := range []string{"/services", "/desired", "/services?name=ns/light-7"} {
		lab.Must(t, ask(path)(t.Context())) // the first one makes the connection
		before := sampled("/gc/heap/allocs:bytes")
		lab.Must(t, ask(path)(t.Context()))
		taken := sampled("/gc/heap/allocs:bytes") - before
		t.Logf("%s: %d bytes for each of %d Services", path, taken/services, services)
		if taken > most*services {
			t.Errorf("%s takes %d bytes for each of %d Services, more than %d", path, taken/services, services, most)
		}
	}
}

// mustRunWithServices runs an agent, on fakes, with many Services of two endpoints.
func mustRunWithServices(t testing.TB, services int) *loopScene {
	t.Helper()
	p := mustRunLoopOn(t, maps.NewFakes(4*services), 0, realLimits)
	sink := sinkOf(p.agent)
	for i := range services {
		svc := light()
		svc.Name.Name = fmt.Sprintf("light-%d", i)
		svc.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 100 + byte(i>>16), byte(i >> 8), byte(i)})}
		sink.SetService(svc, nil)
		slice := lightSlice(i)
		slice.Name.Name, slice.Service = svc.Name.Name+"-1", svc.Name
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 201, byte(i >> 8), byte(i)}), Ready: true, Serving: true})
		sink.SetSlice(kube.Slice{EndpointSlice: slice.EndpointSlice}, nil)
		if i%1000 == 0 {
			sink.Flush()
		}
	}
	sink.Flush()
	p.mustFinish(t)
	collectBySize(usualGC)
	last := lb.ServiceName{Namespace: "ns", Name: fmt.Sprintf("light-%d", services-1)}
	lab.Eventually(t, "all is programmed", func() bool {
		done, err := queue.Ask(t.Context(), p.queue, func() bool { return p.isProgrammed(last) && !p.writer.Due() })

		return err == nil && done
	})

	return p
}

// askerOf returns what asks the agent as verbs do, and reads the answer without keeping it.
func askerOf(t testing.TB, p *loopScene) func(path string) func(context.Context) error {
	t.Helper()
	server := status.Server{
		Socket: filepath.Join(t.TempDir(), "agent.sock"), Log: slog.New(slog.DiscardHandler), Tables: p.tables, Model: p.services,
	}
	lab.MustRun(t, server.Run)
	lab.Eventually(t, "the agent listens", func() bool {
		_, err := os.Stat(server.Socket)

		return err == nil
	})
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", server.Socket)
	}}}

	return func(path string) func(context.Context) error {
		return func(ctx context.Context) error {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
			if err != nil {
				return err
			}
			request.Header.Set("Accept", "application/x-ndjson")
			response, err := client.Do(request)
			if err != nil {
				return err
			}
			defer response.Body.Close()
			end := &tail{}
			if _, err = io.Copy(end, response.Body); err == nil && !strings.HasSuffix(string(*end), "\n{\"end\":true}\n") {
				err = fmt.Errorf("%s: the answer ends with %q", path, *end)
			}

			return err
		}
	}
}

// tail keeps the end of what is written to it.
type tail []byte

func (t *tail) Write(data []byte) (int, error) {
	*t = append(*t, data[max(0, len(data)-64):]...)
	*t = append((*t)[:0], (*t)[max(0, len(*t)-64):]...)

	return len(data), nil
}

// inUse returns the bytes of objects on the heap, garbage included.
func inUse() uint64 { return sampled("/memory/classes/heap/objects:bytes") }

func sampled(name string) uint64 {
	sample := []metrics.Sample{{Name: name}}
	metrics.Read(sample)

	return sample[0].Value.Uint64()
}

// Maps are compared with what was written to them in many turns: changes are in force meanwhile.
func TestChangesDuringADriftCheck(t *testing.T) {
	p := mustRunWithServices(t, 20_000)
	compares := func() bool {
		is, err := queue.Ask(t.Context(), p.queue, func() bool { return p.drift.compares })
		lab.Must(t, err)

		return is
	}
	lab.Must(t, p.queue.InTurn(func() error { p.compare(t.Context()); return nil }))
	inForce := 0
	for n := 0; compares(); n++ {
		sink := sinkOf(p.agent)
		sink.SetSlice(lightSlice(n), nil)
		sink.Flush()
		done, err := queue.Ask(t.Context(), p.queue, func() bool { return p.isProgrammed(light().Name) && p.drift.compares })
		lab.Must(t, err)
		if done {
			inForce++
		}
	}
	if inForce < 3 {
		t.Errorf("%d changes were in force before it ended", inForce)
	}
	if rest := time.Until(p.drift.rests); rest <= 0 {
		t.Errorf("the next one may begin at once")
	}
}
