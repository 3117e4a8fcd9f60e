package devices

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// visit is somebody who dials a Service in all the ways that are named, over TCP
// and UDP and in both families, and what comes of it.
type visit struct {
	name string
	from *lab.Caller
	to   service
	ways []way

	backend string        // who answers; "" nobody does
	seen    [2]netip.Addr // whom it sees, by family
	errno   unix.Errno    // without a backend: ETIMEDOUT for silence, or ECONNREFUSED
}

const (
	// patience is what an answer may take on a machine that is busy with other
	// tests.
	patience = 10 * time.Second

	// silence is how long nobody may have said anything.
	silence = 300 * time.Millisecond

	// atOnce is how soon a refusal comes: before a SYN would be repeated.
	atOnce = 900 * time.Millisecond

	// atSecond is before it would be repeated again. Over a virtual link the error
	// is there before connect(2) has let go of the socket, and then IPv6 does not
	// listen: neither does it to the kernel's own refusals.
	atSecond = 2500 * time.Millisecond
)

var networks = []string{"tcp", "udp"}

// run dials everything at once.
func (v visit) run(t *testing.T, w *world) {
	t.Run(v.name, func(t *testing.T) {
		var dialling sync.WaitGroup
		for _, f := range families {
			for _, way := range v.ways {
				for _, network := range networks {
					dialling.Go(func() {
						if err := v.dial(network, v.to.at(way, f, w.Nodes[0]), f); err != nil {
							t.Errorf("%s, %s of %s: %v", f, network, way, err)
						}
					})
				}
			}
		}
		dialling.Wait()
	})
}

func (v visit) dial(network, address string, f family) error {
	exchange := lab.Exchange{Network: network, Address: address, Timeout: patience}
	if v.errno == unix.ETIMEDOUT {
		exchange.Timeout = silence
	}
	reply, err := v.from.Exchange(exchange)
	if v.backend == "" {
		if lab.Errno(err) != v.errno {
			return fmt.Errorf("%s: %v, %q, want %w", address, err, reply.Text, v.errno)
		}
		soon := atOnce
		if network == "tcp" && f == ipv6 {
			soon = atSecond
		}
		if v.errno == unix.ECONNREFUSED && reply.Latency > soon {
			return fmt.Errorf("%s: refused after %v, want %v at most", address, reply.Latency, soon)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", address, err)
	}

	return expect(reply, v.backend, v.seen[f])
}

// expect says who should have answered, and whom it should have seen.
func expect(reply lab.Reply, backend string, seen netip.Addr) error {
	answer, err := lab.ParseAnswer(reply.Text)
	if err != nil {
		return err
	}
	if answer.Name != backend || answer.Client.Addr() != seen {
		return fmt.Errorf("%q, want it from %s, to %s", answer, backend, seen)
	}

	return nil
}

// hostIPs and podIPs are whom a backend sees.
func hostIPs(host *lab.Host) [2]netip.Addr { return [2]netip.Addr{host.IPv4, host.IPv6} }

func podIPs(pod *lab.Pod) [2]netip.Addr { return [2]netip.Addr{pod.IPv4, pod.IPv6} }

// sourcesTo are what a node's kernel sends to a backend, and therefore whom the
// backend of a masqueraded flow sees.
func sourcesTo(t *testing.T, node *lab.Node, backend backend) [2]netip.Addr {
	t.Helper()
	var sources [2]netip.Addr
	for _, f := range families {
		source, err := node.SourceTo(backend.ips[f])
		if err != nil {
			t.Fatal(err)
		}
		sources[f] = source
	}

	return sources
}
