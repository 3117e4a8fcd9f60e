package flows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Sluice needs no SCTP module, and neither does this: raw sockets send the first
// packet of an association, and answer it.

const protocolSCTP = 132

// The chunks that open an association (RFC 9260, 3.3.2 and 3.3.3).
const (
	chunkInit    = 1
	chunkInitAck = 2
)

// Offsets in a packet that has one chunk.
const (
	sctpChecksum = 8  // in the common header
	sctpChunk    = 12 // after it
	sctpCookie   = sctpChunk + 4 + 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpPacket returns an INIT, or an INIT ACK with a text as the state cookie.
func sctpPacket(from, to uint16, chunk byte, cookie string) []byte {
	p := binary.BigEndian.AppendUint16(nil, from)
	p = binary.BigEndian.AppendUint16(p, to)
	tag := []byte{1, 2, 3, 4} // that each side asks for
	if chunk == chunkInit {
		p = append(p, 0, 0, 0, 0) // it is yet to be asked
	} else {
		p = append(p, tag...)
	}
	p = append(p, 0, 0, 0, 0) // checksum

	length := 20
	if cookie != "" {
		length += 4 + len(cookie)
	}
	p = append(p, chunk, 0)
	p = binary.BigEndian.AppendUint16(p, uint16(length))
	p = append(p, tag...)
	p = append(p,
		0, 1, 0, 0, // window
		0, 1, 0, 1, // streams
		0, 0, 0, 1, // first TSN
	)
	if cookie != "" {
		p = binary.BigEndian.AppendUint16(p, 7)
		p = binary.BigEndian.AppendUint16(p, uint16(4+len(cookie)))
		p = append(p, cookie...)
		p = append(p, make([]byte, -len(p)&3)...)
	}
	binary.LittleEndian.PutUint32(p[sctpChecksum:], crc32.Checksum(p, castagnoli))

	return p
}

// parseSCTP returns what sctpPacket was given. No receiver takes a packet whose
// checksum is wrong.
func parseSCTP(p []byte) (from, to uint16, chunk byte, cookie string, err error) {
	if len(p) < sctpCookie {
		return 0, 0, 0, "", fmt.Errorf("SCTP packet of %d bytes", len(p))
	}
	got := binary.LittleEndian.Uint32(p[sctpChecksum:])
	clear(p[sctpChecksum:sctpChunk])
	if want := crc32.Checksum(p, castagnoli); got != want {
		return 0, 0, 0, "", fmt.Errorf("SCTP checksum is %#x, want %#x", got, want)
	}
	if len(p) > sctpCookie+4 {
		size := int(binary.BigEndian.Uint16(p[sctpCookie+2:]))
		if size < 4 || sctpCookie+size > len(p) {
			return 0, 0, 0, "", fmt.Errorf("SCTP cookie of %d bytes", size)
		}
		cookie = string(p[sctpCookie+4 : sctpCookie+size])
	}

	return binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:]), p[sctpChunk], cookie, nil
}

// mustServeSCTP answers every INIT that arrives at a port, whichever address of the
// namespace it is for, with its name and the client as it saw it, as a [lab.Server] does.
func mustServeSCTP(t *testing.T, ns *lab.Namespace, ports map[uint16]bool) {
	t.Helper()
	for _, all := range everywhere {
		conn, err := ns.ListenPacket(rawNetwork(all.Addr(), protocolSCTP), all.Addr().String())
		lab.Must(t, err)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			answerSCTP(conn.(*net.IPConn), all.Addr().Is4(), ports)
		}()
		t.Cleanup(func() {
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
			<-stopped
		})
	}
}

func answerSCTP(conn *net.IPConn, is4 bool, ports map[uint16]bool) {
	buffer, control := make([]byte, 1<<16), make([]byte, 128)
	for {
		size, controlSize, _, client, err := conn.ReadMsgIP(buffer, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error for an earlier answer
		}
		packet := buffer[:size]
		if is4 && size > 0 {
			packet = packet[min(size, int(packet[0]&0xf)*4):] // the kernel delivers the IPv4 header, too
		}
		local, source := lab.PacketInfo(control[:controlSize])
		from, to, chunk, _, err := parseSCTP(packet)
		if err != nil || !ports[to] || chunk != chunkInit {
			continue
		}
		remote, _ := netip.AddrFromSlice(client.IP)
		answer := lab.Answer{
			Name:   "server",
			Local:  netip.AddrPortFrom(local, to),
			Client: netip.AddrPortFrom(remote.Unmap(), from),
		}
		// Like any packet, an answer may get lost.
		_, _, _ = conn.WriteMsgIP(sctpPacket(to, from, chunkInitAck, answer.String()), source, client)
	}
}

func ipAddr(ip netip.Addr) *net.IPAddr { return &net.IPAddr{IP: ip.AsSlice()} }

// rawNetwork is what package net calls a protocol of the family of an address.
func rawNetwork(ip netip.Addr, protocol int) string {
	if ip.Is4() {
		return fmt.Sprintf("ip4:%d", protocol)
	}

	return fmt.Sprintf("ip6:%d", protocol)
}
