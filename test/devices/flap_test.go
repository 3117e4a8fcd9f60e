package devices

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/test/lab"
)

// away is how long an endpoint that was not ready is gone.
const away = 3 * time.Second

// endpointOf is what explain tells of a backend, and false if that gets no connections.
func endpointOf(is explain.Explanation, b backend) (explain.Endpoint, bool) {
	i := slices.IndexFunc(is.Endpoints, func(e explain.Endpoint) bool {
		return e.Eligible && e.Address == netip.AddrPortFrom(b.ips[ipv4], podPort)
	})
	if i < 0 {
		return explain.Endpoint{}, false
	}

	return is.Endpoints[i], true
}

// flap has the first backend of each service leave, and come back.
func (w *world) flap(t *testing.T, services ...service) {
	t.Helper()
	fewer := slices.Clone(services)
	for i, s := range services {
		fewer[i].backends = s.backends[1:]
	}
	for _, published := range [][]service{fewer, services} {
		w.publish(t, published...)
		for i, s := range services {
			lab.Eventually(t, fmt.Sprintf("%s has %d backends", s.name(), len(published[i].backends)), func() bool {
				_, has := endpointOf(w.mustExplain(t, "--to", s.at(clusterIP, ipv4, nil)), s.backends[0])

				return has == (len(published[i].backends) == len(s.backends))
			})
		}
		if len(published[0].backends) < len(services[0].backends) {
			time.Sleep(away)
		}
	}
}

// TestFlap has an endpoint of each Service leave for some seconds while its connections go on: it is the backend that it
// was. Those who compare loads give it its share, and not all that others have more, and a suspect stays one.
//
//	pod-1-0 ─┬─ pod-1-1
//	         ├─ pod-1-2
//	         ├─ pod-1-3, leaves and comes back
//	         └─ pod-1-4, a suspect that leaves and comes back
func TestFlap(t *testing.T) {
	t.Parallel()
	const each = 20
	w := mustWorld(t, setting{Config: lab.Config{PodsPerNode: 5}})
	var backends []backend
	for _, pod := range w.Nodes[0].Pods[1:] {
		backends = append(backends, onPod(pod))
	}
	slices.Reverse(backends)
	var services []service
	for i, algorithm := range []string{"sed", "nq", "lc"} {
		services = append(services, service{number: 1 + i, backends: backends[1:], annotations: map[string]string{"sluice-lb.io/algorithm": algorithm}})
	}
	tried := roundRobin(service{number: 4, backends: backends})
	w.start(t, append(services, tried)...)
	caller := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0])

	connect := func(s service) {
		for range each * len(s.backends) {
			mustConnect(t, caller, "tcp4", s.at(clusterIP, ipv4, nil))
		}
	}
	counts := func(s service) (counts []int) {
		is := w.mustExplain(t, "--to", s.at(clusterIP, ipv4, nil))
		for _, b := range s.backends {
			e, _ := endpointOf(is, b)
			counts = append(counts, e.Connections)
		}

		return counts
	}
	before := make(map[int][]int)
	for _, s := range services {
		connect(s)
		before[s.number] = counts(s)
	}
	to := tried.at(clusterIP, ipv4, nil)
	connectEach(t, caller, to, len(backends)) // each has answered
	lab.Must(t, w.Nodes[0].Pods[4].Netfilter(deaf))
	var suspect explain.Endpoint
	lab.Eventually(t, "the backend that does not answer is a suspect", func() bool {
		for range 30 {
			_, _ = caller.Exchange(lab.Exchange{Network: "tcp4", Address: to, Timeout: 20 * time.Millisecond})
		}
		suspect, _ = endpointOf(w.mustExplain(t, "--to", to), backends[0])

		return suspect.Suspect != nil
	})

	w.flap(t, append(services, tried)...)

	if now, has := endpointOf(w.mustExplain(t, "--to", to), backends[0]); !has || now.Suspect == nil {
		t.Errorf("the suspect that is back is %+v, was %+v", now, suspect)
	}
	for _, s := range services {
		algorithm := s.annotations["sluice-lb.io/algorithm"]
		if after := counts(s); !slices.Equal(after, before[s.number]) {
			t.Errorf("%s: the backends have %d connections when the first is back, want %d", algorithm, after, before[s.number])
		}
		connect(s)
		// Of lc, which compares two at random, the three differ by more than 10 once in ten million times.
		differ := map[string]int{"lc": 10}[algorithm]
		if after := counts(s); slices.Max(after)-slices.Min(after) > differ || after[0]+after[1]+after[2] != 2*each*len(s.backends) {
			t.Errorf("%s: then they have %d, had %d", algorithm, after, before[s.number])
		}
	}
}
