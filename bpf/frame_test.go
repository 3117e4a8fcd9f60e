package bpf

import (
	"encoding/binary"
	"net"
	"strings"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// Frames are made by gopacket, including checksums and lengths, which shares no code with the programs.

var serializing = gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}

// fragmentID is the id of all fragmented datagrams in the tables.
const fragmentID = 0x1234

// mustBytes serializes layers.
func mustBytes(parts ...gopacket.SerializableLayer) []byte {
	buffer := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buffer, serializing, parts...); err != nil {
		panic(err) // a table's mistake
	}

	return buffer.Bytes()
}

// ends are the Ethernet addresses of a frame.
type ends struct{ src, dst net.HardwareAddr }

// frame is the packet as an Ethernet frame.
func (p packet) frame(f family, between ends) []byte {
	types := []layers.EthernetType{layers.EthernetTypeIPv4}
	if f == ipv6 {
		types[0] = layers.EthernetTypeIPv6
	}
	if p.ether != 0 {
		types[0] = p.ether
	}
	for i := range p.tags {
		tag := layers.EthernetTypeDot1Q
		if i > 0 {
			tag = layers.EthernetTypeQinQ // the outer one of two
		}
		types = append(types, tag)
	}
	last := len(types) - 1
	parts := []gopacket.SerializableLayer{
		&layers.Ethernet{SrcMAC: between.src, DstMAC: between.dst, EthernetType: types[last]},
	}
	for i, vlan := range p.tags {
		parts = append(parts, &layers.Dot1Q{VLANIdentifier: vlan, Priority: 3, Type: types[last-1-i]})
	}
	ip := p.network(f)
	frame := mustBytes(append(parts, gopacket.Payload(ip))...)

	// gopacket fills frames up to 60 bytes, which not every device does.
	return append(frame[:14+4*len(p.tags)+len(ip)], make([]byte, p.padding)...)
}

// network is the packet from its IP header on.
func (p packet) network(f family) []byte {
	transport := p.transport(f)
	if p.piece != nil {
		transport = p.piece.of(transport)
	}
	if f == ipv6 {
		next, extensions := p.extensions()
		ip := p.v6()
		ip.NextHeader = next

		return mustBytes(ip, gopacket.Payload(append(extensions, transport...)))
	}

	return mustBytes(p.v4(), gopacket.Payload(transport))
}

// of returns this part of a datagram.
func (c *piece) of(whole []byte) []byte {
	if c.last {
		return whole[c.offset:]
	}

	return whole[c.offset : c.offset+c.length]
}

func (p packet) v4() *layers.IPv4 {
	ip := &layers.IPv4{
		Version: 4, TOS: p.tos, Id: fragmentID, TTL: p.hops, Protocol: p.proto,
		SrcIP: p.src.Addr().AsSlice(), DstIP: p.dst.Addr().AsSlice(),
	}
	if p.own {
		ip.Id = 0
	}
	if p.whole {
		ip.Flags = layers.IPv4DontFragment
	}
	for range p.extras {
		// Record route, with nothing recorded, and one byte to fill up.
		ip.Options = append(ip.Options,
			layers.IPv4Option{OptionType: 7, OptionLength: 7, OptionData: []byte{4, 0, 0, 0, 0}},
			layers.IPv4Option{OptionType: 1, OptionLength: 1})
	}
	if c := p.piece; c != nil {
		ip.FragOffset = uint16(c.offset / 8)
		if !c.last {
			ip.Flags = layers.IPv4MoreFragments
		}
	}

	return ip
}

func (p packet) v6() *layers.IPv6 {
	ip := &layers.IPv6{
		Version: 6, TrafficClass: p.tos, HopLimit: p.hops, NextHeader: p.protocol(ipv6), FlowLabel: 0x54321,
		SrcIP: six(p.src.Addr()).AsSlice(), DstIP: six(p.dst.Addr()).AsSlice(),
	}
	if p.own {
		ip.FlowLabel = 0
	}

	return ip
}

// protocol is that of the transport header.
func (p packet) protocol(f family) layers.IPProtocol {
	if f == ipv6 && p.proto == layers.IPProtocolICMPv4 {
		return layers.IPProtocolICMPv6
	}

	return p.proto
}

// Extension headers: a packet with three has one of each kind, in this order.
var extensionKinds = []layers.IPProtocol{
	layers.IPProtocolIPv6HopByHop, layers.IPProtocolIPv6Routing, layers.IPProtocolIPv6Destination,
}

// extensions are the extension headers, and the kind of the first of them.
func (p packet) extensions() (layers.IPProtocol, []byte) {
	var kinds []layers.IPProtocol
	for i := range p.extras {
		kinds = append(kinds, extensionKinds[min(i, len(extensionKinds)-1)])
	}
	if p.piece != nil {
		kinds = append(kinds, layers.IPProtocolIPv6Fragment)
	}
	kinds = append(kinds, p.protocol(ipv6))

	var all []byte
	for i, kind := range kinds[:len(kinds)-1] {
		header := make([]byte, 8)
		switch kind {
		case layers.IPProtocolIPv6Fragment:
			more := uint16(1)
			if p.piece.last {
				more = 0
			}
			binary.BigEndian.PutUint16(header[2:], uint16(p.piece.offset)|more)
			binary.BigEndian.PutUint32(header[4:], fragmentID)
		case layers.IPProtocolIPv6Routing:
			copy(header, []byte{0, 0, 253, 0}) // of a kind for experiments, no segments left
		default:
			header = make([]byte, 16)
			copy(header, []byte{0, 1, 1, 12}) // nothing but padding
		}
		header[0] = uint8(kinds[i+1])
		all = append(all, header...)
	}

	return kinds[0], all
}

// pseudo gives a layer what its checksum needs of the IP header.
func (p packet) pseudo(f family, layer interface {
	SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
}) {
	var ip gopacket.NetworkLayer = p.v4()
	if f == ipv6 {
		ip = p.v6()
	}
	if err := layer.SetNetworkLayerForChecksum(ip); err != nil {
		panic(err)
	}
}

// transport is all that follows the IP headers.
func (p packet) transport(f family) []byte {
	payload := gopacket.Payload(p.payload)
	switch p.proto {
	case layers.IPProtocolTCP:
		header := p.tcpHeader()
		p.pseudo(f, header)
		bytes := mustBytes(header, payload)
		if p.unsummed {
			bytes[16] ^= 1
		}
		if p.short {
			sum := uint32(binary.BigEndian.Uint16(bytes[16:])) + uint32(bytes[12]-4<<4)<<8
			binary.BigEndian.PutUint16(bytes[16:], uint16(sum+sum>>16))
			bytes[12] = 4 << 4
		}

		return bytes
	case layers.IPProtocolUDP:
		header := &layers.UDP{SrcPort: layers.UDPPort(p.src.Port()), DstPort: layers.UDPPort(p.dst.Port())}
		p.pseudo(f, header)
		bytes := mustBytes(header, payload)
		if p.unsummed {
			bytes[6], bytes[7] = 0, 0
		}

		return bytes
	case layers.IPProtocolSCTP:
		header := &layers.SCTP{SrcPort: layers.SCTPPort(p.src.Port()), DstPort: layers.SCTPPort(p.dst.Port()), VerificationTag: p.bears}
		if p.bears == 0 && p.chunk != chunkInit {
			header.VerificationTag = p.bearing(association).bears
		}
		chunk := append([]byte{p.chunk, 0, 0, uint8(4 + len(p.payload))}, p.payload...)
		if p.reflects {
			chunk[1] = 1
		}

		return mustBytes(header, gopacket.Payload(chunk))
	case layers.IPProtocolICMPv4:
		return p.icmp(f)
	default:
		return []byte(p.payload)
	}
}

// firstNumber is the sequence number of every SYN, on both sides. Numbers wrap around soon after it.
const firstNumber = uint32(0xfffffffd)

func (p packet) tcpHeader() *layers.TCP {
	header := &layers.TCP{
		SrcPort: layers.TCPPort(p.src.Port()), DstPort: layers.TCPPort(p.dst.Port()),
		Seq: firstNumber + p.seq, Window: 65535,
	}
	if p.seq == 0 && !strings.Contains(p.flags, "S") {
		header.Seq++
	}
	if p.own {
		header.Window = 0
	}
	for _, flag := range p.flags {
		switch flag {
		case 'S':
			header.SYN = true
			header.Options = []layers.TCPOption{{OptionType: 2, OptionLength: 4, OptionData: []byte{5, 180}}}
		case 'F':
			header.FIN = true
		case 'R':
			header.RST = true
		case 'P':
			header.PSH = true
		case '.':
			header.ACK, header.Ack = true, firstNumber+max(p.ack, 1)
		}
	}
	if p.nothing {
		header.Ack = firstNumber
	}

	if p.stamp != 0 {
		stamp := binary.BigEndian.AppendUint32(nil, p.stamp)
		header.Options = append(header.Options, layers.TCPOption{OptionType: 1}, layers.TCPOption{OptionType: 1},
			layers.TCPOption{OptionType: 8, OptionLength: 10, OptionData: append(stamp, 0, 0, 0, 1)})
	}
	for range p.nops {
		header.Options = append(header.Options, layers.TCPOption{OptionType: 1})
	}
	if p.signs != 0 {
		header.Options = append(header.Options, layers.TCPOption{OptionType: layers.TCPOptionKind(p.signs), OptionData: make([]byte, 16)})
	}
	if p.subflow != nil {
		header.Options = append(header.Options, layers.TCPOption{OptionType: 30, OptionData: p.subflow})
	}

	return header
}

// icmp is an echo request or an error: a header of eight bytes and what follows.
func (p packet) icmp(f family) []byte {
	kind4, kind6, rest, body := p.icmpType.v4, p.icmpType.v6, p.icmpType.rest, []byte(p.payload)
	if p.echo {
		kind4, kind6, rest = icmpV4(8, 0), icmpV6(128, 0), 0x00070001
	} else {
		body = p.quote.network(f)
		if p.quoted > 0 {
			body = body[:min(p.quoted, len(body))]
		}
		if f == ipv6 && p.icmpType == redirect {
			body = p.redirection(body)
		}
	}
	if f == ipv4 {
		return mustBytes(&layers.ICMPv4{TypeCode: kind4, Id: uint16(rest >> 16), Seq: uint16(rest)}, gopacket.Payload(body))
	}
	header := &layers.ICMPv6{TypeCode: kind6}
	p.pseudo(f, header)

	return mustBytes(header, gopacket.Payload(binary.BigEndian.AppendUint32(nil, rest)), gopacket.Payload(body))
}

// redirection is the part of an IPv6 redirect before the quote: the better next hop, its destination, and
// the length of the quote in units of 8 bytes.
func (p packet) redirection(quote []byte) []byte {
	better, whom := p.src.Addr(), p.quote.dst.Addr()
	body := append(six(better).AsSlice(), six(whom).AsSlice()...)
	quote = append(quote, make([]byte, -len(quote)&7)...)
	body = append(body, 4, uint8(1+len(quote)/8), 0, 0, 0, 0, 0, 0)

	return append(body, quote...)
}
