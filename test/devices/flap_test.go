package devices

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// away is how long an endpoint that was not ready is gone.
const away = 3 * time.Second

// backendsOf returns what node-1 says of the endpoints of a port of a Service in one family, in the order of the service's
// backends.
func (w *world) backendsOf(t *testing.T, s service, network string, f family) (states []status.Backend) {
	t.Helper()
	out, err := w.agents[0].Run("backends", "lab/"+s.name(), "-o", "json")
	lab.Must(t, err)
	var all []status.Backend
	lab.Must(t, json.Unmarshal([]byte(out), &all))
	for _, b := range s.backends {
		i := slices.IndexFunc(all, func(is status.Backend) bool {
			return is.Address == netip.AddrPortFrom(b.ips[f], podPort) && strings.EqualFold(is.Protocol.String(), network[:3])
		})
		if i < 0 {
			states = append(states, status.Backend{})
		} else {
			states = append(states, all[i])
		}
	}

	return states
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
		is := len(published[0].backends) == len(services[0].backends)
		for _, s := range services {
			lab.Eventually(t, fmt.Sprintf("the first backend of %s is there: %t", s.name(), is), func() bool {
				for _, f := range families {
					for _, network := range networks {
						if w.backendsOf(t, s, network, f)[0].Active != is {
							return false
						}
					}
				}

				return true
			})
		}
		if !is {
			time.Sleep(away)
		}
	}
}

// dialled is a service with the connections, or exchanges of datagrams, that a client has to it in one way.
type dialled struct {
	service
	what    string
	caller  *lab.Caller
	network string
	family
	to    string
	conns []*lab.Socket
	each  int // how many connections for each backend the client opens at once
}

// connect opens more connections, each of which is answered.
func (d *dialled) connect(t *testing.T) {
	t.Helper()
	for range d.each * len(d.backends) {
		d.conns = append(d.conns, mustConnect(t, d.caller, d.network, d.to))
		d.answer(t, len(d.conns)-1)
	}
}

// answer returns which backend answers on a connection.
func (d *dialled) answer(t *testing.T, i int) int {
	t.Helper()
	lab.Must(t, d.conns[i].Send("who\n"))
	text, _, err := d.conns[i].Recv()
	lab.Must(t, err)
	answer, err := lab.ParseAnswer(text)
	lab.Must(t, err)

	return slices.IndexFunc(d.backends, func(b backend) bool { return b.name == answer.Name })
}

// answers returns on how many connections each backend answers.
func (d *dialled) answers(t *testing.T) []int {
	t.Helper()
	counts := make([]int, len(d.backends))
	for i := range d.conns {
		counts[d.answer(t, i)]++
	}

	return counts
}

// counts returns how many connections each backend has, as its node says.
func (d *dialled) counts(t *testing.T, w *world) (counts []int) {
	t.Helper()
	for _, b := range w.backendsOf(t, d.service, d.network, d.family) {
		counts = append(counts, b.Connections)
	}

	return counts
}

// TestFlap has an endpoint of each Service leave for some seconds while its connections go on: it is the backend that it
// was. Those who compare loads give it its share, and not all that others have more, a suspect stays one, and a client keeps it.
// Connections and datagrams of both families begin at a socket, and at the node's uplink.
//
//	pod-1-0, client ─┬─ pod-1-1
//	                 ├─ pod-1-2
//	client ── eth0 ──┼─ pod-1-3, leaves and comes back
//	                 └─ pod-1-4, a suspect that leaves and comes back
func TestFlap(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{PodsPerNode: 5, Attachment: lab.Routed}})
	var backends []backend
	for _, pod := range w.Nodes[0].Pods[1:] {
		backends = append(backends, onPod(pod))
	}
	slices.Reverse(backends)
	inside, outside := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0]), w.outside(t)
	var services []service
	var all []*dialled
	dial := func(s service, each int) {
		services = append(services, s)
		caller, way, where := inside, clusterIP, "a socket"
		if s.number%2 == 0 {
			caller, way, where = outside, nodePort, "an uplink"
		}
		for _, f := range families {
			for _, network := range []string{[]string{"tcp4", "tcp6"}[f], []string{"udp4", "udp6"}[f]} {
				what := fmt.Sprintf("%s of %s at %s", network, s.name(), where)
				all = append(all, &dialled{s, what, caller, network, f, s.at(way, f, w.Nodes[0]), nil, each})
			}
		}
	}
	for i, algorithm := range []string{"sed", "nq", "lc"} {
		for k := range 2 {
			dial(service{number: 2 + 2*i + k, backends: backends[1:], annotations: map[string]string{"sluice-lb.io/algorithm": algorithm}}, 20)
		}
	}
	compared := all
	for number := range 2 {
		dial(service{number: 8 + number, backends: backends[1:2], sticky: true}, 1)
	}
	kept := all[len(compared):]
	tried := roundRobin(service{number: 10, backends: backends})
	services = append(services, tried)
	w.start(t, services...)

	for _, d := range all {
		d.connect(t)
	}
	for i, s := range services {
		if s.sticky {
			services[i].backends = backends[1:] // from now on there are others
		}
	}
	var suspect [2]status.Backend
	lab.Must(t, func() error {
		for _, f := range families {
			connectEach(t, inside, tried.at(clusterIP, f, nil), len(backends)) // each has answered
		}

		return w.Nodes[0].Pods[4].Netfilter(deaf)
	}())
	for _, f := range families {
		lab.Eventually(t, fmt.Sprintf("over %s, the backend that does not answer is a suspect", f), func() bool {
			for range 30 {
				_, _ = inside.Exchange(lab.Exchange{Network: "tcp", Address: tried.at(clusterIP, f, nil), Timeout: 20 * time.Millisecond})
			}
			suspect[f] = w.backendsOf(t, tried, "tcp", f)[0]

			return suspect[f].Suspect != nil
		})
	}

	w.flap(t, services...)

	for _, f := range families {
		if now := w.backendsOf(t, tried, "tcp", f)[0]; now.Suspect == nil {
			t.Errorf("the suspect that is back is %+v, was %+v", now, suspect[f])
		}
	}
	for _, d := range kept { // by chance, all go to the first backend once in 6,561 times
		d.connect(t)
		if d.answer(t, len(d.conns)-1) != 0 {
			t.Errorf("%s: the client's next one does not go to %s", d.what, d.backends[0].name)
		}
	}
	for _, d := range compared {
		algorithm := d.annotations["sluice-lb.io/algorithm"]
		answers := d.answers(t)
		t.Logf("%s: %d", d.what, answers)
		if after := d.counts(t, w); !slices.Equal(after, answers) {
			t.Errorf("%s by %s: the backends have %d connections when the first is back, and answer on %d", d.what, algorithm, after, answers)
		}
		d.connect(t)
		// Of lc, which compares two at random, the three differ by more than 10 once in ten million times.
		differ := map[string]int{"lc": 10}[algorithm]
		after := d.counts(t, w)
		if answers := d.answers(t); !slices.Equal(after, answers) || slices.Max(after)-slices.Min(after) > differ {
			t.Errorf("%s by %s: then they have %d, and answer on %d", d.what, algorithm, after, answers)
		}
	}
}
