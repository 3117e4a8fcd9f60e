package bpf

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// fuzzPlaces are one of each kind of device.
var fuzzPlaces = []place{uplink, podPort, podTun, tunnel}

// FuzzFrames feeds frames to the hooks. The first byte of the input selects the hook, the place, the family,
// and whether flows are turned around.
func FuzzFrames(f *testing.F) {
	for i, in := range seeds() {
		for _, family := range families {
			choice := byte(i)
			if family == ipv6 {
				choice |= 0x80
			}
			place, _ := chosen(choice)
			between := ends{src: macOf(in.src.Addr()), dst: macOf(in.dst.Addr())}
			frame := in.network(family)
			if !place.noEthernet {
				frame = in.frame(family, between)
			}
			f.Add(append([]byte{choice}, frame...))
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) < 1+14 {
			return // less than a test run takes
		}
		family := ipv4
		if input[0]&0x80 != 0 {
			family = ipv6
		}
		place, egress := chosen(input[0])
		newCrowd(t, ways[input[0]>>5&1], family).check(t, place, egress, input[1:])
	})
}

// chosen reads a fuzzer's choice.
func chosen(choice byte) (p place, egress bool) {
	return fuzzPlaces[int(choice)%len(fuzzPlaces)], choice>>2&1 == 1
}

// Frames that are broken in many ways keep all properties, and reach most reasons.
func TestMutatedFrames(t *testing.T) {
	frames := 10_000 // in each family
	if testing.Short() {
		frames = 500 // of an emulated machine
	}
	eachCrowd(t, func(t *testing.T, c *crowd) {
		before, err := c.maps.ReasonCounts()
		lab.Must(t, err)
		m := mutator{rand.New(rand.NewPCG(3, uint64(c.family)))}
		all := seeds()
		for i := range frames {
			p := fuzzPlaces[m.IntN(len(fuzzPlaces))]
			frame := m.mutate(c.seedFrame(p, all[m.IntN(len(all))]), !p.noEthernet)
			c.check(t, p, i%3 == 0, frame)
			if t.Failed() {
				return
			}
		}
		after, err := c.maps.ReasonCounts()
		lab.Must(t, err)
		for _, why := range []maps.Reason{
			maps.ReasonTranslated, maps.ReasonFlow, maps.ReasonFlowError, maps.ReasonPassOtherTraffic, maps.ReasonPassNoFlow,
			maps.ReasonPassNoFrontend, maps.ReasonPassFragment, maps.ReasonPassMalformed, maps.ReasonRejectNoBackend,
			maps.ReasonRejectNoPort, maps.ReasonRejectLimited, maps.ReasonDropUnallocated, maps.ReasonDropSourceRange,
			maps.ReasonDropNoLocalBackend, maps.ReasonDropRedirect, maps.ReasonDropRewrite, maps.ReasonRejectNoFlow, maps.ReasonDropNoFlow,
		} {
			if after[why] == before[why] && !testing.Short() {
				t.Errorf("no frame was %q", why)
			}
		}
	})
}

// mutator breaks frames.
type mutator struct{ *rand.Rand }

// mutate breaks a frame in up to four ways, and one time in two puts its checksums right.
func (m mutator) mutate(frame []byte, ethernet bool) []byte {
	for range m.IntN(5) {
		frame = m.once(frame)
	}
	if len(frame) < 14 {
		frame = append(frame, make([]byte, 14-len(frame))...)
	}
	if m.IntN(2) == 0 {
		putRight(frame, ethernet)
	}

	return frame
}

// once breaks a frame in one way. Headers are broken more often than payloads.
func (m mutator) once(frame []byte) []byte {
	if len(frame) == 0 {
		return frame
	}
	at := m.IntN(len(frame))
	if m.IntN(2) == 0 {
		at = min(at, m.IntN(90))
	}
	switch m.IntN(7) {
	case 0:
		frame[at] ^= 1 << m.IntN(8)
	case 1:
		frame[at] = byte(m.Uint32())
	case 2:
		frame[at] = []byte{0, 1, 4, 6, 17, 43, 44, 51, 58, 60, 132, 0x45, 0x4f, 0x60, 0x7f, 0x80, 0xff}[m.IntN(17)]
	case 3:
		frame = frame[:at]
	case 4:
		frame = append(frame, make([]byte, m.IntN(60))...)
	case 5:
		other := m.IntN(len(frame))
		n := min(m.IntN(20), len(frame)-max(at, other))
		copy(frame[at:at+n], frame[other:other+n])
	case 6:
		frame = slices.Insert(frame, at, make([]byte, 1+m.IntN(8))...)
	}

	return frame
}

// putRight corrects the checksums of a frame, from the inside out.
func putRight(frame []byte, ethernet bool) {
	found := sums(frame, ethernet)
	slices.Reverse(found)
	for _, s := range found {
		if !s.known || s.right || s.size != 2 {
			continue
		}
		frame[s.at], frame[s.at+1] = 0, 0
		for _, again := range sums(frame, ethernet) {
			if again.at == s.at {
				binary.BigEndian.PutUint16(frame[s.at:], ^again.total)
			}
		}
	}
}

// A truncated frame is not changed if its headers are missing, and otherwise only like a complete one.
func TestTruncatedFrames(t *testing.T) {
	eachCrowd(t, func(t *testing.T, c *crowd) {
		places := fuzzPlaces
		if testing.Short() {
			places = places[:1]
		}
		for _, p := range places {
			for _, in := range seeds() {
				if len(in.payload) > 500 {
					continue
				}
				frame := c.seedFrame(p, in)
				for n := 14; n <= len(frame); n++ {
					c.check(t, p, false, frame[:n])
					c.check(t, p, true, frame[:n])
					if t.Failed() {
						t.Fatalf("%+v, cut to %d of %d bytes", in, n, len(frame))
					}
				}
			}
		}
	})
}
