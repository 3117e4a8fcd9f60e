package bpf

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// sum is a checksum in a frame.
type sum struct {
	what  string // "ip", "tcp", "quoted udp", …
	at    int    // where it is
	size  int
	none  bool // UDP without one
	known bool // all that it covers is in the frame; SCTP's in a quote is never checked
	right bool
	total uint16 // of all that it covers, itself included: 0xffff is right
}

// sums returns all checksums of a frame. They are found and computed by this file alone. A truncated header
// has none.
func sums(frame []byte, ethernet bool) []sum {
	at, ok := 0, true
	if ethernet {
		at, ok = skipLink(frame)
	}
	if !ok {
		return nil
	}

	return sumsOf(frame, at, "")
}

// skipLink returns the offset of the IP header.
func skipLink(frame []byte) (int, bool) {
	for at := 12; at+2 <= len(frame); at += 4 {
		switch binary.BigEndian.Uint16(frame[at:]) {
		case 0x8100, 0x88a8:
		case 0x0800, 0x86dd:
			return at + 2, true
		default:
			return 0, false
		}
	}

	return 0, false
}

// sumsOf returns the checksums of the IP packet at an offset.
func sumsOf(frame []byte, at int, prefix string) []sum {
	ip, ok := dissect(frame, at)
	if !ok {
		return nil
	}
	var found []sum
	if !ip.six {
		total := add(0, frame[at:ip.transport])
		found = append(found, sum{what: prefix + "ip", at: at + 10, size: 2, known: true, right: total == 0xffff, total: uint16(total)})
	}
	if ip.later {
		return found
	}

	return append(found, ip.transportSums(frame, prefix)...)
}

// dissected contains the offsets of the parts of an IP packet.
type dissected struct {
	six, fragment, later bool
	transport, end       int // offsets; of a packet that is cut short, end is beyond the frame
	proto                uint8
	addrs                []byte // source and destination
}

func dissect(frame []byte, at int) (dissected, bool) {
	if at >= len(frame) {
		return dissected{}, false
	}
	if frame[at]>>4 == 6 {
		return dissectV6(frame, at)
	}
	if frame[at]>>4 != 4 || len(frame) < at+20 {
		return dissected{}, false
	}
	ip := frame[at:]
	fragment := binary.BigEndian.Uint16(ip[6:])
	d := dissected{
		fragment: fragment&0x3fff != 0, later: fragment&0x1fff != 0,
		transport: at + int(ip[0]&15)*4, end: at + int(binary.BigEndian.Uint16(ip[2:])),
		proto: ip[9], addrs: ip[12:20],
	}

	return d, d.transport >= at+20 && d.transport <= len(frame)
}

func dissectV6(frame []byte, at int) (dissected, bool) {
	if len(frame) < at+40 {
		return dissected{}, false
	}
	ip := frame[at:]
	d := dissected{
		six: true, transport: at + 40, end: at + 40 + int(binary.BigEndian.Uint16(ip[4:])),
		proto: ip[6], addrs: ip[8:40],
	}
	for slices.Contains([]uint8{0, 43, 44, 51, 60}, d.proto) && !d.later {
		if len(frame) < d.transport+8 {
			return dissected{}, false
		}
		header, length := frame[d.transport:], 8
		switch d.proto {
		case 44:
			fragment := binary.BigEndian.Uint16(header[2:])
			d.fragment, d.later = fragment&0xfff9 != 0, fragment&0xfff8 != 0
		case 51:
			length = (int(header[1]) + 2) * 4
		default:
			length = (int(header[1]) + 1) * 8
		}
		d.proto = header[0]
		d.transport += length
	}

	return d, d.transport <= len(frame)
}

// transportSums returns the checksum of the transport, and those of the packet that it quotes.
func (d dissected) transportSums(frame []byte, prefix string) []sum {
	offset, ok := map[uint8]int{6: 16, 17: 6, 132: 8, 1: 2, 58: 2}[d.proto]
	at := d.transport + offset
	s := sum{what: fmt.Sprintf("%sprotocol %d", prefix, d.proto), at: at, size: 2}
	if d.proto == 132 {
		s.size = 4
	}
	if !ok || at+s.size > min(len(frame), d.end) {
		return nil
	}
	s.none = d.proto == 17 && frame[at] == 0 && frame[at+1] == 0
	s.known = !d.fragment && d.end <= len(frame) && !(prefix != "" && s.size == 4)
	if s.known {
		s.total, s.right = d.total(frame[d.transport:d.end])
	}
	found := []sum{s}
	if prefix == "" && isError(d, frame) {
		found = append(found, sumsOf(frame[:min(len(frame), d.end)], d.transport+8, "quoted ")...)
	}

	return found
}

func isError(d dissected, frame []byte) bool {
	switch d.proto {
	case 1:
		return slices.Contains([]uint8{3, 4, 5, 11, 12}, frame[d.transport])
	case 58:
		return frame[d.transport] >= 1 && frame[d.transport] <= 4
	default:
		return false
	}
}

// total adds up a whole transport part, and reports whether the sum is right.
func (d dissected) total(transport []byte) (uint16, bool) {
	if d.proto == 132 {
		whole := slices.Clone(transport)
		want := binary.LittleEndian.Uint32(whole[8:])
		binary.LittleEndian.PutUint32(whole[8:], 0)

		return 0, crc32.Checksum(whole, crc32.MakeTable(crc32.Castagnoli)) == want
	}
	start := uint32(0)
	if d.proto != 1 {
		start = add(uint32(len(transport))+uint32(d.proto), d.addrs)
	}
	total := uint16(add(start, transport))

	return total, total == 0xffff
}

// add adds bytes to a sum, in ones' complement.
func add(start uint32, bytes []byte) uint32 {
	for i := 0; i < len(bytes); i += 2 {
		start += uint32(bytes[i]) << 8
		if i+1 < len(bytes) {
			start += uint32(bytes[i+1])
		}
		start = start&0xffff + start>>16
	}

	return start&0xffff + start>>16
}

// blank returns the frame with zero checksums, except of UDP that had none.
func blank(frame []byte, ethernet bool) []byte {
	frame = slices.Clone(frame)
	for _, s := range sums(frame, ethernet) {
		if !s.known || s.none {
			continue // it is compared as it is
		}
		clear(frame[s.at : s.at+s.size])
	}

	return frame
}

// wrong returns the checksums of a frame that are not right.
func wrong(frame []byte, ethernet bool) []string {
	var names []string
	for _, s := range sums(frame, ethernet) {
		if s.known && !s.none && !s.right {
			names = append(names, s.what)
		}
	}

	return names
}
