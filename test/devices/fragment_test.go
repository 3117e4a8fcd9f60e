package devices

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestFragments sends datagrams of two fragments and of more than forty, and has
// them answered by as many:
//
//	client ─▶ node port, cluster IP ─┬▶ pod-1-1
//	                                 └▶ pod-2-0, masqueraded, through 1450 bytes
//	pod-1-0 ─▶ cluster IP ── the same
//
// Where connections are tracked the kernel puts datagrams together before it
// sends them on, and the egress hook sees fragments of its making. Where they are
// not, hooks see the client's all the way.
func TestFragments(t *testing.T) {
	for _, test := range []struct {
		name       string
		attachment lab.Attachment
		filter     string
	}{
		{"put together on the way", lab.Routed, bridgeCNI},
		{"left alone", lab.Bridged, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{Attachment: test.attachment, OverlayMTU: 1450},
				filter: test.filter,
			})
			c := casesOf(w)
			w.start(t, c.local, c.remote)
			client, pod := w.outside(t), w.optedOut(t, w.Nodes[0].Pods[0])
			masquerade := sourcesTo(t, w.Nodes[0], c.remote.backends[0])
			for _, d := range []datagrams{
				{"client to a pod here", client, c.local, nodePort, hostIPs(w.Client)},
				{"client to a pod on another node", client, c.remote, nodePort, masquerade},
				{"client to the cluster IP of a pod here", client, c.local, clusterIP, hostIPs(w.Client)},
				{"client to the cluster IP of a pod on another node", client, c.remote, clusterIP, masquerade},
				{"pod to a pod here", pod, c.local, clusterIP, podIPs(w.Nodes[0].Pods[0])},
				{"pod to a pod on another node", pod, c.remote, clusterIP, podIPs(w.Nodes[0].Pods[0])},
			} {
				d.run(t, w)
			}
		})
	}
}

// datagrams are large ones from a client to a Service.
type datagrams struct {
	name string
	from *lab.Caller
	to   service
	way  way
	seen [2]netip.Addr
}

func (d datagrams) run(t *testing.T, w *world) {
	t.Run(d.name, func(t *testing.T) {
		for _, f := range families {
			for _, size := range []int{2000, 60_000} {
				reply, err := d.ask(d.to.at(d.way, f, w.Nodes[0]), size)
				if err == nil {
					err = expect(reply, d.to.backends[0].name, d.seen[f])
				}
				// Without its line end.
				if err == nil && len(reply.Text) != size-1 {
					err = fmt.Errorf("answer has %d bytes", len(reply.Text)+1)
				}
				if err != nil {
					t.Errorf("%s, %d bytes: %v", f, size, err)
				}
			}
		}
	})
}

// ask sends a datagram of a size and expects one of that size back. It asks again
// if there is no answer: in IPv6 the sender has to learn first what fits through the
// tunnel, and the router that reports it (EMSGSIZE) drops the datagram.
func (d datagrams) ask(address string, size int) (reply lab.Reply, err error) {
	question := fmt.Sprintf("size %d", size)
	question += strings.Repeat(" ", size-len(question)-1)
	for deadline := time.Now().Add(dialTimeout); time.Now().Before(deadline); {
		reply, err = d.from.Exchange(lab.Exchange{
			Network:  "udp",
			Address:  address,
			Question: question,
			Timeout:  time.Second,
		})
		if errno := lab.Errno(err); errno != unix.ETIMEDOUT && errno != unix.EMSGSIZE {
			break
		}
	}

	return reply, err
}
