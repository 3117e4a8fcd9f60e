package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"
	"time"
)

// The types of chunks, RFC 9260.
const (
	chunkData       = 0
	chunkInit       = 1
	chunkInitAck    = 2
	chunkSack       = 3
	chunkCookieEcho = 10
	chunkCookieAck  = 11
)

// SCTPPeer is one end of associations, which are made by hand: neither this kernel nor those of most machines have SCTP.
type SCTPPeer struct {
	conn net.PacketConn
	port uint16
	tag  uint32 // that packets to it carry
}

// sctpPacket is a packet of one chunk.
type sctpPacket struct {
	from     netip.AddrPort
	tag      uint32
	chunk    byte
	contents []byte
}

// MustSCTP makes an end of associations in a namespace, which is closed with the test.
func MustSCTP(t testing.TB, ns *Namespace, ip netip.Addr, port uint16) *SCTPPeer {
	t.Helper()
	network := map[bool]string{false: "ip4:132", true: "ip6:132"}[ip.Is6()]
	conn, err := ns.ListenPacket(network, ip.String())
	Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	return &SCTPPeer{conn: conn, port: port, tag: 0x5110_0000 | uint32(port)}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (p *SCTPPeer) send(to netip.AddrPort, tag uint32, chunk byte, contents []byte) error {
	var b []byte
	b = binary.BigEndian.AppendUint16(b, p.port)
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint32(b, tag)
	b = binary.BigEndian.AppendUint32(b, 0) // the checksum
	b = append(b, chunk, 3)                 // of data: all of it
	b = binary.BigEndian.AppendUint16(b, uint16(4+len(contents)))
	b = append(b, contents...)
	b = append(b, make([]byte, -len(contents)&3)...)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, castagnoli))
	_, err := p.conn.WriteTo(b, &net.IPAddr{IP: to.Addr().AsSlice()})

	return err
}

// receive waits for the next packet to the peer's port.
func (p *SCTPPeer) receive() (sctpPacket, error) {
	buffer := make([]byte, 2048)
	for {
		size, from, err := p.conn.ReadFrom(buffer)
		if err != nil {
			return sctpPacket{}, err
		}
		b := buffer[:size]
		if size < 16 || binary.BigEndian.Uint16(b[2:]) != p.port {
			continue
		}
		sum := binary.LittleEndian.Uint32(b[8:])
		binary.LittleEndian.PutUint32(b[8:], 0)
		if crc32.Checksum(b, castagnoli) != sum {
			return sctpPacket{}, fmt.Errorf("packet from %s: its checksum is wrong: %x", from, b)
		}
		ip, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)

		return sctpPacket{
			from:     netip.AddrPortFrom(ip.Unmap(), binary.BigEndian.Uint16(b)),
			tag:      binary.BigEndian.Uint32(b[4:]),
			chunk:    b[12],
			contents: b[16 : 12+binary.BigEndian.Uint16(b[14:])],
		}, nil
	}
}

// initChunk is also that of the answer, which has a cookie.
func (p *SCTPPeer) initChunk(cookie string) []byte {
	b := binary.BigEndian.AppendUint32(nil, p.tag)
	b = append(b, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1) // window, streams, first number
	if cookie != "" {
		b = append(b, 0, 7)
		b = binary.BigEndian.AppendUint16(b, uint16(4+len(cookie)))
		b = append(b, cookie...)
	}

	return b
}

// Serve answers, to data with the address it came from, until the peer is closed.
func (p *SCTPPeer) Serve() {
	tags := make(map[netip.AddrPort]uint32)
	for {
		got, err := p.receive()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || got.chunk != chunkInit && got.tag != p.tag {
			continue // the client times out
		}
		switch got.chunk {
		case chunkInit:
			tags[got.from] = binary.BigEndian.Uint32(got.contents)
			err = p.send(got.from, tags[got.from], chunkInitAck, p.initChunk("cake"))
		case chunkCookieEcho:
			err = p.send(got.from, tags[got.from], chunkCookieAck, nil)
		case chunkData:
			number := append(got.contents[:12:12], got.from.Addr().String()...)
			err = errors.Join(
				p.send(got.from, tags[got.from], chunkSack, []byte{0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0}),
				p.send(got.from, tags[got.from], chunkData, number),
			)
		}
		_ = err // as above
	}
}

// Associate begins an association, and returns the client as the server saw it.
func (p *SCTPPeer) Associate(server netip.AddrPort, timeout time.Duration) (saw string, err error) {
	if err := p.conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	tag := uint32(0)
	for _, step := range []struct {
		send     byte
		contents []byte
		want     byte
	}{
		{chunkInit, p.initChunk(""), chunkInitAck},
		{chunkCookieEcho, []byte("cake"), chunkCookieAck},
		{chunkData, append([]byte{0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, "who"...), chunkSack},
	} {
		if err := p.send(server, tag, step.send, step.contents); err != nil {
			return "", err
		}
		got, err := p.receive()
		for err == nil && got.tag != p.tag { // of another association: RFC 9260, 8.5
			got, err = p.receive()
		}
		if err != nil {
			return "", fmt.Errorf("answer to chunk %d: %w", step.send, err)
		}
		if got.chunk != step.want || got.from != server {
			return "", fmt.Errorf("answer to chunk %d is %d, from %s", step.send, got.chunk, got.from)
		}
		if got.chunk == chunkInitAck {
			tag = binary.BigEndian.Uint32(got.contents)
		}
	}
	got, err := p.receive()
	if err != nil || got.chunk != chunkData || got.from != server {
		return "", fmt.Errorf("answer is chunk %d from %s: %w", got.chunk, got.from, err)
	}

	return string(got.contents[12:]), nil
}
