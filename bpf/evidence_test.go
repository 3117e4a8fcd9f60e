package bpf

import (
	"math/bits"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// A SYN that any backend has to ignore, or one that comes again sooner than clients send it, is no evidence.
func TestEvidenceOfASYN(t *testing.T) {
	syn := first(layers.IPProtocolTCP, client, clusterIP)
	for _, test := range []struct {
		name   string
		syn    packet
		again  time.Duration // after the last one
		counts uint16
	}{
		{"one", syn, 0, 1},
		{"with a wrong checksum", syn.withoutSum(), 0, 0},
		{"with a signature", syn.signed(19), 0, 0},
		{"with an authentication", syn.signed(29), 0, 0},
		{"with a signature behind many options", syn.signed(19).behind(12), 0, 0},
		{"with a header that is too short", syn.shortened(), 0, 0},
		{"with options of IP", syn.withExtras(1), 0, 0},
		{"whose last router is the node", syn.withHops(1), 0, 0},
		{"with data", syn.with("GET /"), 0, 1},
		{"with more data than is looked at", syn.with(strings.Repeat("GET /", 20)), 0, 0},
		{"sent again", syn, time.Second, 1 + 3 + 3 + 3},
		{"sent again, with a wrong checksum", syn.withoutSum(), time.Second, 0},
		{"sent again at once", syn, -time.Minute, 1}, // by the clock of another CPU: no pause of the test counts
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink, podVeth, turning}, func(t *testing.T, w *world, p place) {
				id := w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}}).backends[remotePod]
				w.awaits(t, id)
				w.unsummed = test.syn.unsummed
				in := test.syn.from(p.client)
				w.ingress(t, p, in)
				for range 3 {
					if test.again == 0 {
						break
					}
					for _, e := range w.entries(t) {
						e.flow.Created -= uint64(time.Second)
						e.flow.LastSeen -= uint64(test.again)
						w.put(t, e)
					}
					w.ingress(t, p, in)
				}
				if h, _ := w.maps.HealthOf(id); h.Evidence != test.counts {
					t.Errorf("it counts %d, want %d", h.Evidence, test.counts)
				}
			}, func(c *DeviceConfig) { c.Heal = true })
		})
	}
}

// Addresses of one network outside are one client, since one host may have them all; pods are one each.
func TestEvidenceOfNeighbours(t *testing.T) {
	for _, test := range []struct {
		name    string
		at      place
		clients []string
		want    int
	}{
		{"of a network", uplink, []string{"8.0.100.1", "8.0.100.2", "8.0.100.3", "8.0.100.200"}, 1},
		{"of a network, turned around", turning, []string{"8.0.100.1", "8.0.100.2", "8.0.100.3", "8.0.100.200"}, 1},
		{"of networks", uplink, []string{"8.0.100.1", "8.0.101.1", "8.0.102.1"}, 3},
		{"pods", podVeth, []string{"8.0.4.2", "8.0.4.3", "8.0.4.4"}, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorldAt(t, test.at, f, func(c *DeviceConfig) { c.Heal = true })
				id := w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}}).backends[remotePod]
				w.awaits(t, id)
				for _, address := range test.clients {
					w.ingress(t, test.at, first(layers.IPProtocolTCP, address+":40000", clusterIP))
				}
				h, _ := w.maps.HealthOf(id)
				if n := bits.OnesCount16(h.Clients); int(h.Evidence) != len(test.clients) || n != test.want {
					t.Errorf("%d SYNs of %d clients, want %d of %d", h.Evidence, n, len(test.clients), test.want)
				}
			})
		})
	}
}

// awaits makes a backend one that has answered a second ago.
func (w *world) awaits(t *testing.T, id uint32) {
	t.Helper()
	lab.Must(t, w.maps.Health.Put(maps.Index(id), maps.BackendHealth{Id: id, Answered: now(t) - uint64(time.Second)}))
}
