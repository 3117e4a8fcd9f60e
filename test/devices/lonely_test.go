package devices

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestLonelyClient has one pod connect to a Service of three backends, one after the other, when the device of one of
// them has gone down. No connection fails, though the node there reports every three seconds that it cannot reach the
// backend, and few take long, though none has reached that backend before.
//
//	pod-1-0 ─┬─▶ pod-2-0, whose device is down
//	         ├─▶ pod-2-1
//	         └─▶ pod-1-1
func TestLonelyClient(t *testing.T) {
	t.Parallel()
	const connections, pause = 80, 30 * time.Millisecond
	const late, mostLate = 350 * time.Millisecond, 3
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--heal=resteer"}})
	backends := []backend{onPod(w.Nodes[1].Pods[0]), onPod(w.Nodes[1].Pods[1]), onPod(w.Nodes[0].Pods[1])}
	s := service{number: 1, backends: backends}
	w.start(t, s)
	lab.Must(t, w.Nodes[1].SetDown("pod0"))
	client, n := lab.MustCaller(t, w.Nodes[0].Pods[0].Namespace, w.cgroups[0]), 0
	for range connections {
		begin := time.Now()
		if _, err := client.Exchange(lab.Exchange{Network: "tcp", Address: s.at(clusterIP, ipv4, nil), Timeout: dialTimeout}); err != nil {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		if time.Since(begin) > late {
			n++
		}
		time.Sleep(pause)
	}
	if n > mostLate {
		t.Errorf("%d of %d connections took more than %v, want %d at most", n, connections, late, mostLate)
	}
}
