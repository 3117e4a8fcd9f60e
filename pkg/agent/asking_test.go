package agent

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/test/lab"
)

// BenchmarkAsking asks an agent that has 100,000 Services of two endpoints what the verbs ask, and reports for how long a
// change had to wait for its turn meanwhile, and how much memory was in use at most beside what was before.
func BenchmarkAsking(b *testing.B) {
	const services = 100_000
	p := mustRunLoopOn(b, maps.NewFakes(4*services), 0, realLimits)
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
	p.mustFinish(b)
	collectBySize(usualGC)
	last := lb.ServiceName{Namespace: "ns", Name: fmt.Sprintf("light-%d", services-1)}
	lab.Eventually(b, "all is programmed", func() bool {
		done, err := queue.Ask(b.Context(), p.queue, func() bool { return p.isProgrammed(last) && !p.writer.Due() })

		return err == nil && done
	})
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
		{"services", func(ctx context.Context) error {
			m, err := p.services(ctx)
			n := 0
			for range m.Services() {
				n++
			}
			if n != services {
				b.Errorf("%d Services", n)
			}

			return err
		}},
		{"verify", func(ctx context.Context) error {
			m, err := p.services(ctx)
			for range m.Desired() {
			}

			return err
		}},
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

// inUse returns the bytes of objects on the heap, garbage included.
func inUse() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)

	return sample[0].Value.Uint64()
}
