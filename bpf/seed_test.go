package bpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// Texts with which tests seed hashes: none, and one that clients do not know.
var seedTexts = []string{"", "known to nodes alone"}

func withSeed(seed uint32) func(*DeviceConfig) {
	return func(cfg *DeviceConfig) { cfg.HashSeed = seed }
}

// flowBytes are what of a first packet is hashed for its flow.
func flowBytes(t testing.TB, w *world, in packet) []byte {
	t.Helper()
	var key bytes.Buffer
	lab.Must(t, binary.Write(&key, binary.NativeEndian, maps.FlowKeyOf(
		maps.HookIngress, uint8(in.proto), w.family.addrPort(in.src), w.family.addrPort(in.dst))))

	return key.Bytes()
}

// A client that knows the backends, and how flows are hashed, chooses its ports, or its addresses, so that all of its
// flows go to one backend. It cannot where there is a seed that it does not know.
func TestHashSeed(t *testing.T) {
	const flows = 400
	for _, test := range []struct {
		name      string
		algorithm uint8
		client    func(i int) string
		of        func(*world, packet) []byte
	}{
		{"ports by maglev", maps.AlgorithmMaglev, func(i int) string { return fmt.Sprintf("8.0.101.7:%d", 1024+i) },
			func(w *world, in packet) []byte { return flowBytes(t, w, in) }},
		{"addresses by sh", maps.AlgorithmSH, func(i int) string { return fmt.Sprintf("8.0.%d.%d:40000", 101+i/250%100, 1+i%250) },
			func(w *world, in packet) []byte {
				addr := w.mapAddr(in.src.String())

				return addr.Bytes[:]
			}},
	} {
		for _, text := range seedTexts {
			t.Run(fmt.Sprintf("%s with the seed %q", test.name, text), func(t *testing.T) {
				eachFamily(t, func(t *testing.T, f family) {
					w := newWorld(t, f, withSeed(SeedOf(text)))
					to := manyPods(5)
					s := w.serve(t, service{at: []string{clusterIP}, to: to, algorithm: test.algorithm, here: true})
					counts, begun := make([]int, len(to)), 0
					for i := 0; begun < flows; i++ {
						in := first(layers.IPProtocolTCP, test.client(i), clusterIP)
						if mapstest.Hashed(s.table, test.of(w, in)) != to[0] {
							continue
						}
						counts[slices.Index(to, w.opens(t, uplink, in, to...))]++
						begun++
					}
					if text != "" {
						lab.MustBeFair(t, "of a client that does not know the seed", counts, lab.Even(len(to)))
					} else if counts[0] != flows {
						t.Errorf("of %d flows, the backends get %v, want all at the first", flows, counts)
					}
				})
			})
		}
	}
}
