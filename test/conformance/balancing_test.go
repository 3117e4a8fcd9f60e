package conformance

import (
	"math"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// Every backend has the same share, however often it is listed.
//
//	clients ──── web:80 ─┬─ pod-1-0, pod-1-1
//	                     └─ pod-2-0, pod-2-1, which are in two slices
func TestEvenShares(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pods := append(s.Local()[:2], s.Remote()[:2]...)
	s.SetEndpoints(t, "web", scene.ReadyAll(pods...)...)
	again := s.Slice("web", discoveryv1.AddressTypeIPv4, scene.ReadyAll(pods[2:]...)...)
	again.Name = "web-again"
	s.PutSlice(t, again)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	for _, c := range s.Clients() {
		d := c.To("tcp", web)
		scene.MustReach(t, d, scene.Names(pods...)...)
		const n = 800
		answered := make(map[string]int)
		for range n {
			answered[d.MustAsk(t).Name]++
		}
		share := float64(n) / float64(len(pods))
		most := 6 * math.Sqrt(share*(1-share/n)) // one in 10⁹ is further off
		for _, pod := range pods {
			if off := math.Abs(float64(answered[pod.Name]) - share); off > most {
				t.Errorf("%s: %v answered, %s should have %v ± %.0f", d, answered, pod.Name, share, most)
			}
		}
	}
}

// A flow has one backend for its life, of TCP as of UDP, at whatever address.
func TestOneBackendPerFlow(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	for _, address := range []string{
		scene.At(b.service.Spec.ClusterIPs[0], 80), scene.At(b.service.Spec.ClusterIPs[1], 80), scene.At(b.vips[0], 80),
	} {
		b.mustReachBoth(t, address)
		open := scene.MustOpenAll(t, b.Clients(), address, "tcp", "udp")
		for range 20 {
			scene.MustGoOn(t, open...)
		}
	}
}

// Datagrams that are fragmented arrive whole, in both directions.
//
//	clients ──── web:80, 4000 bytes ─┬─ pod-1-0
//	                                 └─ pod-2-0
func TestBigDatagrams(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	number := b.service.Spec.Ports[1].NodePort
	self := b.Lab.Nodes[0]
	for _, address := range []string{
		scene.At(b.service.Spec.ClusterIPs[0], 80), scene.At(b.service.Spec.ClusterIPs[1], 80),
		scene.At(self.IPv4.String(), number), scene.At(self.IPv6.String(), number),
		scene.At(b.vips[0], 80), scene.At(b.vips[1], 80),
	} {
		for _, c := range b.Clients() {
			d := c.To("udp", address)
			scene.MustReach(t, d, b.here.Name, b.there.Name)
			answered := make(map[string]bool)
			for range 30 {
				answered[mustAskMuch(t, d, 4000)] = true
			}
			if len(answered) != 2 {
				t.Errorf("%s: only %v answered", d, answered)
			}
		}
	}
}

// mustAskMuch asks with a datagram of a size, and is answered with one.
func mustAskMuch(t *testing.T, d scene.Dial, size int) string {
	t.Helper()
	x := d.Exchange()
	x.Question = "size 4000" + strings.Repeat(" ", size-len("size 4000\n"))
	reply, err := d.From.Exchange(x)
	if err != nil {
		t.Fatalf("%s: %d bytes: %v", d, size, err)
	}
	if len(reply.Text) != size-1 { // without its line end
		t.Errorf("%s: an answer of %d bytes, want %d", d, len(reply.Text), size-1)
	}
	answer, err := lab.ParseAnswer(reply.Text)
	lab.Must(t, err)

	return answer.Name
}
