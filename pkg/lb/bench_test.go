package lb

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"unique"
)

// cluster yields slices of ten endpoints, one per Service, on 1,000 nodes in
// three zones. Each brings its own strings, as decoded objects do.
func cluster(services int, yield func(Service, EndpointSlice)) {
	for i := range services {
		svc := service(fmt.Sprintf("web-%d", i))
		svc.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		svc.Ports[0].NodePort = uint16(i%2768 + 30000)
		endpoints := make([]Endpoint, 10)
		for j := range endpoints {
			n := i*10 + j
			zone := fmt.Sprintf("zone-%d", n%3)
			endpoints[j] = Endpoint{
				Addr: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}),
				Place: unique.Make(Place{
					NodeName: fmt.Sprintf("node-%d.example.com", n%1000),
					Zone:     zone,
					ForZones: NamesOf(zone),
				}),
				Ready:   true,
				Serving: true,
			}
		}
		yield(svc, sliceOf(svc.Name.Name, svc.Name.Name+"-abcde", endpoints...))
	}
}

func clusterState(services int) *State {
	s := NewState(Node{Name: "node-1.example.com", Zone: "zone-1"})
	cluster(services, func(svc Service, slice EndpointSlice) {
		s.SetService(svc)
		s.SetSlice(slice)
	})
	return s
}

func BenchmarkResolve(b *testing.B) {
	for _, bench := range []struct {
		name      string
		endpoints int
		options   []func(*Service)
	}{
		{"ClusterIP of 10", 10, nil},
		{"LoadBalancer of 10", 10, []func(*Service){balanced, externalLocal}},
		{"ClusterIP of 1000", 1000, nil},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var endpoints []Endpoint
			for i := range bench.endpoints {
				endpoints = append(endpoints, Endpoint{
					Addr:    netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}),
					Place:   unique.Make(Place{NodeName: fmt.Sprintf("n%d", i%3)}),
					Ready:   true,
					Serving: true,
				})
			}
			svc, slices := web(bench.options...), []*EndpointSlice{slice("a", endpoints...)}
			b.ReportAllocs()
			for b.Loop() {
				Resolve(svc, slices, &testNode)
			}
		})
	}
}

// Everything is resolved, as at start.
func BenchmarkResolve10000Services(b *testing.B) {
	s := clusterState(10_000)
	b.ReportAllocs()
	for b.Loop() {
		for name := range s.services {
			s.touch(name)
		}
		for _, name := range s.Touched() {
			s.Resolve(name)
		}
	}
}

// A relist: every object comes again, and none has changed.
func BenchmarkUnchangedSlice(b *testing.B) {
	var endpoints []Endpoint
	for i := range 100 {
		endpoints = append(endpoints, endpoint(fmt.Sprintf("10.0.0.%d", i), zones("za")))
	}
	s := NewState(testNode)
	same := *slice("a", endpoints...)
	s.SetSlice(same)
	b.ReportAllocs()
	for b.Loop() {
		s.SetSlice(same)
	}
}

func BenchmarkUnchangedService(b *testing.B) {
	s := NewState(testNode)
	s.SetService(service("a", balanced))
	same := service("a", balanced)
	b.ReportAllocs()
	for b.Loop() {
		s.SetService(same)
	}
}

// How much memory 10,000 Services with 100,000 endpoints take.
func BenchmarkStateMemory(b *testing.B) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		s := clusterState(10_000)
		after := heap()
		b.ReportMetric(float64(after-before)/1e6, "MB")
		b.ReportMetric(float64(after-before)/100_000, "B/endpoint")
		runtime.KeepAlive(s)
	}
}
