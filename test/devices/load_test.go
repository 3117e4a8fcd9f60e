package devices

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// TestLoadAndBytes has a client outside hold connections and send bytes: the node
// that translates them counts how many each backend has, until they have ended in
// whatever way, and how much was sent.
//
//	client ══ node port ══┬══ pod-1-1
//	                      └══ pod-2-0, masqueraded
func TestLoadAndBytes(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	c := casesOf(w)
	bulk, refuses := c.remote, c.local
	bulk.number, bulk.port = 77, bulkPort
	refuses.number, refuses.port = 78, 1
	w.start(t, c.local, c.remote, bulk, refuses)
	w.mustSwallow(t)
	pinned := sluice.MustLoad(t, w.agents[0])

	for _, to := range []service{c.local, c.remote} {
		for _, f := range families {
			t.Run(to.backends[0].name+" over "+f.String(), func(t *testing.T) { w.testLoad(t, to, f) })
		}
	}
	t.Run("refused", func(t *testing.T) {
		for range 3 {
			_, err := w.outside(t).Request("tcp", refuses.at(nodePort, ipv4, w.Nodes[0]))
			if lab.Errno(err) != unix.ECONNREFUSED {
				t.Errorf("%v, want %v", err, unix.ECONNREFUSED)
			}
		}
		w.mustHave(t, 0, refuses, "tcp")
	})
	t.Run("bytes", func(t *testing.T) { w.testBytes(t, pinned, bulk) })
}

// mustHave waits until the backends of a service have so many connections.
func (w *world) mustHave(t *testing.T, n int, s service, protocol string) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("%d connections of %s", n, s.name()), func() error {
		services, err := w.agents[0].Services()
		if err != nil {
			return err
		}
		have := 0
		for _, svc := range services {
			for _, port := range svc.Ports {
				for _, b := range port.Backends {
					if svc.Name == "lab/"+s.name() && strings.EqualFold(b.Protocol.String(), protocol) {
						have += b.Connections
					}
				}
			}
		}
		if have != n {
			return fmt.Errorf("%d connections", have)
		}

		return nil
	})
}

func (w *world) testLoad(t *testing.T, to service, f family) {
	client := w.outside(t)
	at := to.at(nodePort, f, w.Nodes[0])
	network := []string{"tcp4", "tcp6"}[f]
	var open []*lab.Socket
	for range 5 {
		socket, err := client.Socket(network)
		lab.Must(t, err)
		lab.Must(t, socket.Connect(at))
		open = append(open, socket)
	}
	w.mustHave(t, 5, to, "tcp")
	lab.Must(t, open[0].Close(), open[1].Send("bye\n"))
	w.mustHave(t, 4, to, "tcp") // the second one is half closed, by the server
	lab.Must(t, open[1].Close())
	w.mustHave(t, 3, to, "tcp")
	lab.Must(t, w.agents[0].Kill())
	lab.Must(t, open[2].Close())
	lab.Must(t, w.agents[0].Start())
	sluice.MustWait(t, w.agents[0])
	w.mustHave(t, 2, to, "tcp")
	lab.Must(t, client.Close()) // killed: the kernel closes the rest
	w.mustHave(t, 0, to, "tcp")
}

// testBytes transfers as much as is counted. Each packet has headers, too, and
// there are those that only acknowledge.
func (w *world) testBytes(t *testing.T, pinned *maps.Pinned, bulk service) {
	const up, down = 20 << 20, 5 << 20
	before := w.bytes(t, pinned, bulk)
	_, _, err := transfer(w.Client.Namespace, bulk.at(nodePort, ipv4, w.Nodes[0]), up, down)
	lab.Must(t, err)
	w.mustHave(t, 0, bulk, "tcp")
	after := w.bytes(t, pinned, bulk)
	for what, size := range map[uint32]uint64{maps.StatBytesSent: up, maps.StatBytesReceived: down} {
		if have := after[what] - before[what]; have < size || have > size+size/10+(up+down)/20 {
			t.Errorf("%d: %d bytes are counted of %d", what, have, size)
		}
	}
}

// bytes returns what is counted of a service, with what is still in flows.
func (w *world) bytes(t *testing.T, pinned *maps.Pinned, s service) map[uint32]uint64 {
	t.Helper()
	mine := make(map[uint32]bool)
	for e, err := range pinned.ServicePorts.All() {
		lab.Must(t, err)
		mine[e.Key] = strings.HasPrefix(e.Value.String(), "lab/"+s.name()+":tcp")
	}
	sum := make(map[uint32]uint64)
	for e, err := range pinned.Stats.All() {
		lab.Must(t, err)
		if mine[e.Key.ServicePortId] {
			sum[e.Key.What] += e.Value
		}
	}
	for _, table := range []maps.Table[maps.FlowKey, maps.Flow]{pinned.Flows, pinned.HalfOpen, pinned.Unanswered} {
		for e, err := range table.All() {
			lab.Must(t, err)
			switch {
			case !mine[e.Value.ServicePortId]:
			case e.Value.Role == maps.FlowFromClient:
				sum[maps.StatBytesSent] += e.Value.Bytes
			case e.Value.Role == maps.FlowToClient:
				sum[maps.StatBytesReceived] += e.Value.Bytes
			}
		}
	}

	return sum
}
