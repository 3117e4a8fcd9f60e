package bpf

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/gopacket/gopacket/layers"
)

// packet describes a frame, with the IPv4 addresses of the plan; frame_test.go makes its bytes, in either
// family. Its methods return changed copies: the expected packet is in.to(backend).
type packet struct {
	tags     []uint16 // VLANs, the outermost first
	ether    layers.EthernetType
	src, dst netip.AddrPort
	proto    layers.IPProtocol // ICMPv4 stands for that of IPv6 as well
	hops     uint8             // TTL, hop limit
	tos      uint8             // or traffic class
	extras   int               // so many options of IPv4, or extension headers of IPv6
	flags    string            // of TCP, as tcpdump writes them: "S", "S.", ".", "F.", "R"
	seq, ack uint32            // of TCP, see numbered and acks
	nothing  bool              // TCP: it acknowledges not even the SYN
	stamp    uint32            // TCP's timestamp; 0: none
	subflow  []byte            // the value of the option of Multipath TCP; nil: none
	chunk    uint8             // SCTP's first
	bears    uint32            // SCTP's tag; 0: the one that everyone asks for
	reflects bool              // SCTP: that is the tag of what the packet answers
	signs    uint8             // the kind of TCP's option with a signature; 0: none
	nops     int               // so many options of TCP that mean nothing, before it
	short    bool              // TCP's header says that it is shorter than any
	unsummed bool              // UDP without a checksum, TCP with a wrong one
	own      bool              // of this node, which writes neither an ID nor a flow label
	toAll    bool              // to all stations of the Ethernet
	whole    bool              // IPv4: it may not be cut
	echo     bool              // an ICMP echo request, else an error
	icmpType icmpKind          // which error
	quote    *packet           // by an error
	quoted   int               // how many bytes of it, 0 for all
	payload  string
	padding  int // bytes that follow the packet in the frame
	piece    *piece
}

// piece is the part of a datagram in one fragment.
type piece struct {
	offset, length int // in bytes; the last one is as long as it takes
	last           bool
}

// SCTP's chunks.
const (
	chunkData         = 0
	chunkInit         = 1
	chunkInitAck      = 2
	chunkAbort        = 6
	chunkShutdown     = 7
	chunkShutdownAck  = 8
	chunkCookieEcho   = 10
	chunkCookieAck    = 11
	chunkShutdownDone = 14
)

func tcp(src, dst, flags string) packet {
	return packet{src: at(src), dst: at(dst), proto: layers.IPProtocolTCP, hops: 64, flags: flags}
}

// udp returns a datagram with an odd number of bytes, which the checksum has to pad.
func udp(src, dst string) packet {
	return packet{src: at(src), dst: at(dst), proto: layers.IPProtocolUDP, hops: 64, payload: "who answers"}
}

// association is the payload of SCTP packets. Both sides ask for the tag at its start.
const association = "association!"

func sctp(src, dst string, chunk uint8) packet {
	return packet{src: at(src), dst: at(dst), proto: layers.IPProtocolSCTP, hops: 64, chunk: chunk, payload: association}
}

func ping(src, dst string) packet {
	return packet{src: at(src), dst: at(dst), proto: layers.IPProtocolICMPv4, hops: 64, echo: true, payload: "ping"}
}

// protocol returns a packet of an unknown protocol.
func protocol(number layers.IPProtocol, src, dst string) packet {
	return packet{src: at(src), dst: at(dst), proto: number, hops: 64, payload: "something else"}
}

// ofTransport returns a packet of a protocol of Services: of TCP with these flags, of SCTP with this
// chunk, of UDP with this text.
func ofTransport(proto layers.IPProtocol, src, dst, flags string, chunk uint8, text string) packet {
	switch proto {
	case layers.IPProtocolTCP:
		return tcp(src, dst, flags)
	case layers.IPProtocolSCTP:
		return sctp(src, dst, chunk)
	default:
		return udp(src, dst).with(text)
	}
}

// first returns the first packet of a client, second the one after the first answer.
func first(proto layers.IPProtocol, src, dst string) packet {
	return ofTransport(proto, src, dst, "S", chunkInit, "who answers")
}

func second(proto layers.IPProtocol, src, dst string) packet {
	return ofTransport(proto, src, dst, ".", chunkCookieEcho, "who answers")
}

// answer returns the answer to a client's first packet, third the one to its second.
func answer(proto layers.IPProtocol, src, dst string) packet {
	return ofTransport(proto, src, dst, "S.", chunkInitAck, "it is me")
}

func third(proto layers.IPProtocol, src, dst string) packet {
	return ofTransport(proto, src, dst, ".", chunkCookieAck, "it is me")
}

// transports are the protocols of Services.
var transports = []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP, layers.IPProtocolSCTP}

func (p packet) from(src string) packet { p.src = at(src); return p }
func (p packet) to(dst string) packet   { p.dst = at(dst); return p }
func (p packet) fromPort(port uint16) packet {
	p.src = netip.AddrPortFrom(p.src.Addr(), port)
	return p
}
func (p packet) toPort(port uint16) packet { p.dst = netip.AddrPortFrom(p.dst.Addr(), port); return p }

// numbered sets the sequence number of a segment, relative to the SYN. 0 is that of the SYN, or right after
// it.
func (p packet) numbered(seq uint32) packet { p.seq = seq; return p }

// acks sets the acknowledgement, relative to the SYN of the other side.
func (p packet) acks(ack uint32) packet      { p.ack = ack; return p }
func (p packet) acksNothing() packet         { p.nothing = true; return p }
func (p packet) stamped(stamp uint32) packet { p.stamp = stamp; return p }

// capable and joins add the option of Multipath TCP with which its first and its further subflows begin.
func (p packet) capable() packet { p.subflow = []byte{0x01, 0x01}; return p }
func (p packet) joins() packet   { p.subflow = []byte{0x10, 1, 2, 3, 4, 5, 6, 7, 8, 9}; return p }

// bearing sets the tag of an SCTP packet to the one that a payload has asked for.
func (p packet) bearing(asked string) packet {
	p.bears = binary.BigEndian.Uint32([]byte(asked))

	return p
}

// reflecting sets the tag to that of the packet that it answers.
func (p packet) reflecting(asked string) packet {
	p.reflects = true

	return p.bearing(asked)
}

// cut ends the payload after so many bytes.
func (p packet) cut(bytes int) packet { return p.with(p.payload[:bytes]) }

// filled replaces the payload. SCTP's keeps the tag that its side asks for.
func (p packet) filled(payload string) packet {
	if p.proto == layers.IPProtocolSCTP {
		payload = association[:4] + payload
	}

	return p.with(payload)
}

func (p packet) with(payload string) packet { p.payload = payload; return p }
func (p packet) long(bytes int) packet {
	return p.filled(strings.Repeat("long payload ", bytes/13+1)).cut(bytes)
}
func (p packet) tagged(vlans ...uint16) packet { p.tags = vlans; return p }
func (p packet) withExtras(n int) packet       { p.extras = n; return p }
func (p packet) withHops(n uint8) packet       { p.hops = n; return p }
func (p packet) withTOS(tos uint8) packet      { p.tos = tos; return p }
func (p packet) signed(kind uint8) packet      { p.signs = kind; return p }
func (p packet) behind(nops int) packet        { p.nops = nops; return p }
func (p packet) shortened() packet             { p.short = true; return p }
func (p packet) withoutSum() packet            { p.unsummed = true; return p }
func (p packet) broadcast() packet             { p.toAll = true; return p }
func (p packet) uncut() packet                 { p.whole = true; return p }

// padded adds bytes after the end of the packet, as in short Ethernet frames.
func (p packet) padded(bytes int) packet { p.padding = bytes; return p }

// fragment is a part of the packet, seen as one datagram.
func (p packet) fragment(offset, length int) packet {
	p.piece = &piece{offset: offset, length: length}

	return p
}

// rest is the last fragment.
func (p packet) rest(offset int) packet {
	p.piece = &piece{offset: offset, last: true}

	return p
}

// icmpKind is a kind of ICMP error.
type icmpKind struct {
	v4   layers.ICMPv4TypeCode
	v6   layers.ICMPv6TypeCode
	rest uint32 // of the header: a router, an MTU
}

func icmpV4(kind, code uint8) layers.ICMPv4TypeCode { return layers.CreateICMPv4TypeCode(kind, code) }
func icmpV6(kind, code uint8) layers.ICMPv6TypeCode { return layers.CreateICMPv6TypeCode(kind, code) }

var (
	tooBig          = icmpKind{v4: icmpV4(3, 4), v6: icmpV6(2, 0), rest: 1280}
	portUnreachable = icmpKind{v4: icmpV4(3, 3), v6: icmpV6(1, 4)}
	hostUnreachable = icmpKind{v4: icmpV4(3, 1), v6: icmpV6(1, 3)}
	timeExceeded    = icmpKind{v4: icmpV4(11, 0), v6: icmpV6(3, 0)}
	badParameter    = icmpKind{v4: icmpV4(12, 0), v6: icmpV6(4, 0), rest: 6}
	redirect        = icmpKind{v4: icmpV4(5, 1), v6: icmpV6(137, 0)}
)

// icmpError returns an ICMP error about a packet.
func icmpError(what icmpKind, src, dst string, about packet) packet {
	return packet{
		src: at(src), dst: at(dst), proto: layers.IPProtocolICMPv4, hops: 64,
		icmpType: what, quote: &about,
	}
}

// quoting truncates the quote of an error.
func (p packet) quoting(bytes int) packet { p.quoted = bytes; return p }
