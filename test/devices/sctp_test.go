package devices

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestSCTP goes through an association, packet by packet, made by hand: neither
// this kernel nor those of most machines have SCTP. netfilter, which has
// SCTP, checks every packet on the way, and so do the ends.
//
//	client ── node port, load balancer ─┬─ pod-1-1
//	                                    └─ pod-2-0, masqueraded
func TestSCTP(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	w.start(t, c.local, c.remote)
	pods := []*lab.Pod{w.Nodes[0].Pods[1], w.Nodes[1].Pods[0]}
	seen := [][2]netip.Addr{hostIPs(w.Client), sourcesTo(t, w.Nodes[0], c.remote.backends[0])}

	for i, to := range []service{c.local, c.remote} {
		for _, f := range families {
			server := mustPeer(t, pods[i].Namespace, podIPs(pods[i])[f], podPort)
			go server.serve()
			client := mustPeer(t, w.Client.Namespace, hostIPs(w.Client)[f], uint16(4000+10*i+int(f)))
			for _, way := range []way{nodePort, loadBalancer} {
				t.Run(fmt.Sprintf("%s, %s of %s", f, way, pods[i].Name), func(t *testing.T) {
					saw, err := client.associate(netip.MustParseAddrPort(to.at(way, f, w.Nodes[0])))
					lab.Must(t, err)
					if saw != seen[i][f].String() {
						t.Errorf("the server saw %s, want %s", saw, seen[i][f])
					}
				})
			}
		}
	}
}

// The types of chunks, RFC 9260.
const (
	chunkData       = 0
	chunkInit       = 1
	chunkInitAck    = 2
	chunkSack       = 3
	chunkCookieEcho = 10
	chunkCookieAck  = 11
)

// peer is one end of associations.
type peer struct {
	conn net.PacketConn
	port uint16
	tag  uint32 // that packets to it carry
}

// packet is an SCTP packet of one chunk.
type packet struct {
	from     netip.AddrPort
	tag      uint32
	chunk    byte
	contents []byte
}

func mustPeer(t *testing.T, ns *lab.Namespace, ip netip.Addr, port uint16) *peer {
	t.Helper()
	network := map[bool]string{false: "ip4:132", true: "ip6:132"}[ip.Is6()]
	conn, err := ns.ListenPacket(network, ip.String())
	lab.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	return &peer{conn: conn, port: port, tag: 0x5110_0000 | uint32(port)}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (p *peer) send(to netip.AddrPort, tag uint32, chunk byte, contents []byte) error {
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
func (p *peer) receive() (packet, error) {
	buffer := make([]byte, 2048)
	for {
		size, from, err := p.conn.ReadFrom(buffer)
		if err != nil {
			return packet{}, err
		}
		b := buffer[:size]
		if size < 16 || binary.BigEndian.Uint16(b[2:]) != p.port {
			continue
		}
		sum := binary.LittleEndian.Uint32(b[8:])
		binary.LittleEndian.PutUint32(b[8:], 0)
		if crc32.Checksum(b, castagnoli) != sum {
			return packet{}, fmt.Errorf("packet from %s: its checksum is wrong: %x", from, b)
		}
		ip, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)

		return packet{
			from:     netip.AddrPortFrom(ip.Unmap(), binary.BigEndian.Uint16(b)),
			tag:      binary.BigEndian.Uint32(b[4:]),
			chunk:    b[12],
			contents: b[16 : 12+binary.BigEndian.Uint16(b[14:])],
		}, nil
	}
}

// initChunk is also that of the answer, which has a cookie.
func (p *peer) initChunk(cookie string) []byte {
	b := binary.BigEndian.AppendUint32(nil, p.tag)
	b = append(b, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1) // window, streams, first number
	if cookie != "" {
		b = append(b, 0, 7)
		b = binary.BigEndian.AppendUint16(b, uint16(4+len(cookie)))
		b = append(b, cookie...)
	}

	return b
}

// serve answers, to data with the address it came from, until the peer is closed.
func (p *peer) serve() {
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

// associate returns the client as the server saw it.
func (p *peer) associate(server netip.AddrPort) (saw string, err error) {
	if err := p.conn.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
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
		if err != nil {
			return "", fmt.Errorf("answer to chunk %d: %w", step.send, err)
		}
		if got.chunk != step.want || got.from != server || got.tag != p.tag {
			return "", fmt.Errorf("answer to chunk %d is %d, tag %x, from %s", step.send, got.chunk, got.tag, got.from)
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
