package bpf

import (
	"slices"
	"testing"
)

// The checksums of gopacket, which made the frames, test the code that verifies checksums.
func TestSums(t *testing.T) {
	for _, f := range families {
		for _, in := range append(seeds(), otherTrafficList()...) {
			frame := in.frame(f, ends{src: macOf(in.src.Addr()), dst: macOf(in.dst.Addr())})
			if names := wrong(frame, true); len(names) > 0 {
				t.Errorf("%+v: %v are wrong", in, names)
			}
			for _, s := range sums(frame, true) {
				if !s.known || s.none {
					continue
				}
				broken := slices.Clone(frame)
				broken[s.at+1] ^= 0x10
				if !slices.Contains(wrong(broken, true), s.what) {
					t.Errorf("%+v: %s is right, whatever it says", in, s.what)
				}
				if s.size == 2 {
					putRight(broken, true)
					if names := wrong(broken, true); len(names) > 0 {
						t.Errorf("%+v: %v cannot be put right", in, names)
					}
				}
			}
		}
	}
}

func otherTrafficList() []packet {
	var all []packet
	for _, in := range otherTraffic() {
		all = append(all, in)
	}

	return all
}

// The checksum of every protocol is found.
func TestSumsAreFound(t *testing.T) {
	for name, test := range map[string]struct {
		in   packet
		want [2]int // how many, in IPv4 and IPv6
	}{
		"TCP":                {tcp(client, clusterIP, "S"), [2]int{2, 1}},
		"with options":       {tcp(client, clusterIP, "S").withExtras(3), [2]int{2, 1}},
		"UDP":                {udp(client, clusterIP), [2]int{2, 1}},
		"SCTP, tagged":       {sctp(client, clusterIP, chunkInit).tagged(1, 2), [2]int{2, 1}},
		"a ping":             {ping(client, clusterIP), [2]int{2, 1}},
		"an error about TCP": {icmpError(tooBig, router, clusterIP, tcp(clusterIP, client, ".")), [2]int{4, 2}},
		"a short quote":      {icmpError(tooBig, router, clusterIP, tcp(clusterIP, client, ".")).quoting(28), [2]int{3, 1}},
		"a later fragment":   {udp(client, clusterIP).long(3000).rest(1024), [2]int{1, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			for i, f := range families {
				frame := test.in.frame(f, ends{src: macOf(test.in.src.Addr()), dst: macOf(test.in.dst.Addr())})
				if found := sums(frame, true); len(found) != test.want[i] {
					t.Errorf("%s: %d checksums, want %d: %+v", f, len(found), test.want[i], found)
				}
			}
		})
	}
}
