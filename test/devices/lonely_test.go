package devices

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestLonelyClient has one pod connect to a Service of three backends, one after the other, when the device of one of
// them has gone down. With resteer no connection fails, though the node there reports every three seconds that it cannot
// reach the backend, and few take long, though none has reached that backend before. With eject four fail with such a
// report until the backend is passed over, and then only its probes.
//
//	pod-1-0 ─┬─▶ pod-2-0, whose device is down
//	         ├─▶ pod-2-1
//	         └─▶ pod-1-1
func TestLonelyClient(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		heal                 string
		mostFailed, mostLate int
	}{{"resteer", 0, 3}, {"eject", 4, 16}} {
		t.Run(test.heal, func(t *testing.T) {
			t.Parallel()
			const connections, pause, late = 80, 30 * time.Millisecond, 350 * time.Millisecond
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--heal=" + test.heal}})
			backends := []backend{onPod(w.Nodes[1].Pods[0]), onPod(w.Nodes[1].Pods[1]), onPod(w.Nodes[0].Pods[1])}
			s := service{number: 1, backends: backends}
			w.start(t, s)
			lab.Must(t, w.Nodes[1].SetDown("pod0"))
			client := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0])
			const inTurn = 15 // connections that do not fail: the backend is passed over
			failed, last, slow := 0, 0, 0
			for i := range connections {
				begin := time.Now()
				if _, err := client.Exchange(lab.Exchange{Network: "tcp", Address: s.at(clusterIP, ipv4, nil), Timeout: dialTimeout}); err != nil {
					t.Logf("connection %d, after %v: %v", i+1, time.Since(begin), err)
					if failed == 0 || i-last < inTurn {
						failed++
						last = i
					}
				}
				if time.Since(begin) > late {
					slow++
				}
				time.Sleep(pause)
			}
			if failed > test.mostFailed || slow > test.mostLate {
				t.Errorf("%d of %d connections failed before the backend was passed over, want %d at most, and %d took more than %v, want %d at most", failed, connections, test.mostFailed, slow, late, test.mostLate)
			}
		})
	}
}
