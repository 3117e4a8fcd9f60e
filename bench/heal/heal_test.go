package main

import (
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	load.Main()
	cluster.Run(m)
}

// A backend is passed over if it gets none of many new connections in a row, and a probe is the one
// that ends such a time.
func TestJudge(t *testing.T) {
	dead, well := netip.MustParseAddr("10.244.6.2"), netip.MustParseAddr("10.244.2.2")
	const began, ended = 10 * time.Second, 20 * time.Second
	// some are so many arrivals at a backend, a millisecond apart.
	some := func(backend netip.Addr, from time.Duration, n int) (all []arrival) {
		for i := range n {
			all = append(all, arrival{At: from + time.Duration(i)*time.Millisecond, Backend: backend})
		}

		return all
	}
	before := append(some(well, time.Second, 1), some(dead, 2*time.Second, 1)...)
	for _, test := range []struct {
		name     string
		arrivals [][]arrival
		want     Result
	}{
		{"as before", [][]arrival{
			some(dead, 11*time.Second, 3), some(well, 12*time.Second, many), some(dead, 13*time.Second, 1), some(dead, 21*time.Second, 1),
		}, Result{Into: 4, Until: 3, Back: new(Seconds(1))}},
		{"passed over, probed, and back", [][]arrival{
			some(dead, 11*time.Second, 2), some(well, 12*time.Second, many+1), some(dead, 14*time.Second, 1),
			some(well, 15*time.Second, many+1), some(dead, 22*time.Second, 2),
		}, Result{Into: 2, Until: 1.001, Probes: 1, PassedOver: 2, Back: new(Seconds(2.001))}},
		{"passed over to the end", [][]arrival{
			some(dead, 11*time.Second, 1), some(well, 12*time.Second, 2*many),
		}, Result{Into: 1, Until: 1, PassedOver: 1}},
		{"passed over by mistake", [][]arrival{
			some(dead, 11*time.Second, many+1), some(well, 12*time.Second, 1), some(dead, 21*time.Second, many+1),
		}, Result{Into: many + 1, Until: 1 + Seconds(many)/1000, Wrong: 2, Back: new(Seconds(1))}},
	} {
		t.Run(test.name, func(t *testing.T) {
			arrivals := before
			for _, some := range test.arrivals {
				arrivals = append(arrivals[:len(arrivals):len(arrivals)], some...)
			}
			var got Result
			got.judge(arrivals, []netip.Addr{well, dead}, []netip.Addr{dead}, began, ended)
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(Phase{})); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

// Those that failed took longer than any other, so that failures never improve a quantile.
func TestPhaseOfFailures(t *testing.T) {
	var dials []load.Dial
	for i := range 98 {
		dials = append(dials, load.Dial{Took: time.Duration(i+1) * time.Millisecond})
	}
	refused := load.Dial{Took: time.Microsecond, Failed: "connect: connection refused"}
	lost := load.Dial{Took: time.Microsecond, Failed: "answer: connection reset by peer", Connected: true}
	p := phaseOf(append(dials, refused, lost))
	if p.Dials != 100 || p.Failed != 1 || p.Lost != 1 {
		t.Errorf("%d failed and %d were lost of %d, want 1 and 1 of 100", p.Failed, p.Lost, p.Dials)
	}
	if p.P50 != 51 || !math.IsInf(float64(p.P99), 1) {
		t.Errorf("p50 %v, p99 %v, want 51 ms and failed", p.P50, p.P99)
	}
	p.add(phaseOf(dials))
	if p.Dials != 198 || p.P50 != 50 || p.Failed != 1 {
		t.Errorf("with another round: %d, p50 %v, %d failed", p.Dials, p.P50, p.Failed)
	}
}

// The tap sees each connection once, whether it is sent again or not, and no answer.
func TestTap(t *testing.T) {
	s, _ := mustSide(t, "nftables")
	backend := s.victim().Pods[0].IPv4
	end, err := drop(s.victim(), "numgen random mod 2 == 0 drop")
	lab.Must(t, err)
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			tap, err := startTap(s.Uplink, s.node().Name, backendPort)
			lab.Must(t, err)
			d := load.Dials{
				Network: network, Target: netip.AddrPortFrom(backend, backendPort),
				Rate: 100, Duration: 400 * time.Millisecond, Timeout: 3 * time.Second,
			}
			dials, err := d.Run(t.Context(), s.node().Pods[0].Namespace, nil)
			lab.Must(t, err)
			arrivals, err := tap.stop()
			lab.Must(t, err)
			if len(arrivals) != len(dials) {
				t.Errorf("%d arrivals of %d connections", len(arrivals), len(dials))
			}
			for i, a := range arrivals {
				if a.Backend != backend || a.At < dials[0].Began-time.Second || i > 0 && a.At < arrivals[i-1].At {
					t.Errorf("arrival %d: %+v", i, a)
				}
			}
		})
	}
	lab.Must(t, end())
}

// Each episode does to backends what its title says, and ends. There is no proxy: clients dial a
// backend that is hit.
func TestEpisodes(t *testing.T) {
	s, _ := mustSide(t, "nftables")
	dial := func(t *testing.T, n int) (answered int, fastest time.Duration) {
		t.Helper()
		d := load.Dials{
			Network: "tcp", Target: netip.AddrPortFrom(s.victim().Pods[0].IPv4, backendPort),
			Rate: 100, Duration: time.Duration(n) * 10 * time.Millisecond, Timeout: 500 * time.Millisecond,
		}
		dials, err := d.Run(t.Context(), s.node().Pods[0].Namespace, nil)
		lab.Must(t, err)
		fastest = time.Hour
		for _, d := range dials {
			if d.Failed == "" {
				answered++
				fastest = min(fastest, d.Took)
			}
		}

		return answered, fastest
	}
	for _, e := range episodes {
		t.Run(e.name, func(t *testing.T) {
			end, err := e.begin(s)
			lab.Must(t, err)
			answered, fastest := dial(t, 120)
			lab.Must(t, end())
			switch e.name {
			case "vanish", "refuse":
				if answered > 0 {
					t.Errorf("%d are answered", answered)
				}
			case "slow-service":
				if answered < 110 || fastest < 300*time.Millisecond {
					t.Errorf("%d of 120 are answered, the fastest after %v: want all, after 300 ms", answered, fastest)
				}
			default: // 30 % loss, or down for a second of 1.2
				if answered == 0 || answered > 110 {
					t.Errorf("%d of 120 are answered, want some", answered)
				}
			}
			if answered, _ := dial(t, 20); answered < 20 {
				t.Errorf("after its end %d of 20 are answered", answered)
			}
		})
	}
}

// mustSide returns a side, and an API server with its objects that no other test uses.
func mustSide(t *testing.T, kind string) (*side, *cluster.Cluster) {
	t.Helper()
	api := cluster.Start(t)
	s, err := newSide(kind, api)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, s.Close()) })
	lab.Must(t, writeObjects(api, s, 1))

	return s, api
}

// A Service that is slow as a whole soon has timeouts to match, so that its connections are not sent to
// one backend after another.
func TestSlowService(t *testing.T) {
	s, api := mustSide(t, "sluice-resteer")
	lab.Must(t, s.start(t.Context(), api, sluice.MustBinary(t)))
	i := slices.IndexFunc(episodes, func(e episode) bool { return e.name == "slow-service" })
	r, err := s.measure(t.Context(), 0, paths[0], episodes[i], 200, phases{healthy: time.Second, episode: 4 * time.Second, after: time.Second})
	lab.Must(t, err)
	t.Log(r)
	if r.Into > 2*r.During.Dials {
		t.Errorf("backends got %d SYNs of %d connections", r.Into, r.During.Dials)
	}
}

// The shortest episode: the packets of a node vanish. Sluice notices and sends new connections
// elsewhere, and takes the node back.
func TestDeadNode(t *testing.T) {
	s, api := mustSide(t, "sluice-eject")
	lab.Must(t, s.start(t.Context(), api, sluice.MustBinary(t)))
	i := slices.IndexFunc(episodes, func(e episode) bool { return e.name == "vanish" })
	r, err := s.measure(t.Context(), 0, paths[0], episodes[i], 400, phases{healthy: time.Second, episode: 5 * time.Second, after: 8 * time.Second})
	lab.Must(t, err)
	t.Log(r)
	if r.After.Failed > 0 {
		t.Errorf("%d failed after the episode", r.After.Failed)
	}
	if r.PassedOver < backendsPerNode || r.Until > 3 {
		t.Errorf("passed over %d times, new connections until %v: want each of %d backends, soon after the begin", r.PassedOver, r.Until, backendsPerNode)
	}
	if r.Back == nil {
		t.Error("no new connections to it at the end")
	}
}
