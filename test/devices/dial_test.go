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

// dialTest is a client that dials a Service in all the named ways, over TCP and UDP
// and in both families, and the expected outcome.
type dialTest struct {
	name string
	from *lab.Caller
	to   service
	ways []way

	backend string        // that answers; "" if none does
	seen    [2]netip.Addr // the client as it sees it, by family
	errno   unix.Errno    // without a backend: ETIMEDOUT for silence, or ECONNREFUSED
}

const (
	// dialTimeout limits a dial and its answer: the machine may be busy with other
	// tests.
	dialTimeout = 10 * time.Second

	// silence is how long a test waits before it takes a packet as dropped.
	silence = 300 * time.Millisecond

	// atOnce is how soon a refusal comes: before a SYN would be repeated.
	atOnce = 900 * time.Millisecond

	// atSecond is before it would be repeated again. Over a virtual link the error
	// is there before connect(2) has released the socket, and then IPv6 and Multipath
	// TCP ignore it, as they ignore the kernel's own refusals.
	atSecond = 2500 * time.Millisecond
)

var networks = []string{"tcp", "udp"}

// run dials everything at once.
func (d dialTest) run(t *testing.T, w *world) {
	t.Run(d.name, func(t *testing.T) {
		var dialling sync.WaitGroup
		for _, f := range families {
			for _, way := range d.ways {
				for _, network := range networks {
					dialling.Go(func() {
						if err := d.dial(w, network, d.to.at(way, f, w.Nodes[0]), f); err != nil {
							t.Errorf("%s, %s of %s: %v", f, network, way, err)
						}
					})
				}
			}
		}
		dialling.Wait()
	})
}

func (d dialTest) dial(w *world, network, address string, f family) error {
	exchange := lab.Exchange{Network: network, Address: address, Timeout: dialTimeout}
	if d.errno == unix.ETIMEDOUT {
		exchange.Timeout = silence
	}
	reply, err := d.from.Exchange(exchange)
	if d.backend == "" {
		if lab.Errno(err) != d.errno {
			return fmt.Errorf("%s: %v, %q, want %w", address, err, reply.Text, d.errno)
		}
		soon := atOnce
		if network == "tcp" && (f == ipv6 || w.Profile.MPTCP) {
			soon = atSecond
		}
		if d.errno == unix.ECONNREFUSED && reply.Latency > soon {
			return fmt.Errorf("%s: refused after %v, want %v at most", address, reply.Latency, soon)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", address, err)
	}

	return expect(reply, d.backend, d.seen[f])
}

// expect returns an error unless this backend has answered and has seen this client.
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

// hostIPs and podIPs are the clients' addresses as a backend sees them.
func hostIPs(host *lab.Host) [2]netip.Addr { return [2]netip.Addr{host.IPv4, host.IPv6} }

func podIPs(pod *lab.Pod) [2]netip.Addr { return [2]netip.Addr{pod.IPv4, pod.IPv6} }

// sourcesTo are what a node's kernel sends to a backend, and therefore what the
// backend of a masqueraded flow sees as the client.
func sourcesTo(t *testing.T, node *lab.Node, backend backend) [2]netip.Addr {
	t.Helper()
	var sources [2]netip.Addr
	for _, f := range families {
		source, err := node.SourceTo(backend.ips[f])
		lab.Must(t, err)
		sources[f] = source
	}

	return sources
}
