package flows

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// protocolICMP is what a flow calls an echo request, of either family. It is none
// that a Service can have.
const protocolICMP corev1.Protocol = "ICMP"

// exchangeTimeout is the default of [lab.Exchange].
const exchangeTimeout = 2 * time.Second

// The numbers of an echo request and its reply, by [familyIndex].
var (
	icmpProtocols = [...]int{1, 58}
	echoRequests  = [...]byte{8, 128}
	echoReplies   = [...]byte{0, 129}
)

// isRaw reports whether a protocol has no sockets here but raw ones.
func isRaw(protocol corev1.Protocol) bool {
	return protocol == corev1.ProtocolSCTP || protocol == protocolICMP
}

// exchangeRaw sends the first packet of such a flow, and returns as [lab.Caller.Exchange] does. The port is the client's; in
// an echo request it is the identifier.
func exchangeRaw(ns *lab.Namespace, f flow, port uint16, timeout time.Duration) (lab.Reply, error) {
	protocol, packet := protocolSCTP, sctpPacket(port, f.DestPort, chunkInit, "")
	if f.Protocol == protocolICMP {
		protocol, packet = icmpProtocols[familyIndex(f.DestIP)], echoRequest(f.DestIP, port)
	}
	if timeout == 0 {
		timeout = exchangeTimeout
	}
	start := time.Now()
	var conn *net.IPConn
	err := ns.Do(func() (err error) {
		conn, err = net.DialIP(rawNetwork(f.DestIP, protocol), ipAddr(f.SourceIP), ipAddr(f.DestIP))
		return err
	})
	if err != nil {
		return lab.Reply{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(start.Add(timeout)); err != nil {
		return lab.Reply{}, err
	}
	reply := lab.Reply{Local: netip.AddrPortFrom(f.SourceIP, port), Peer: f.dest()}
	if _, err = conn.Write(packet); err == nil {
		reply.Text, err = awaitAnswer(conn, f, port)
	}
	reply.Latency = time.Since(start)

	return reply, err
}

// awaitAnswer receives until there is an answer to what was sent from a port. All
// packets of a protocol come to all raw sockets.
func awaitAnswer(conn *net.IPConn, f flow, port uint16) (string, error) {
	buffer := make([]byte, 1<<16)
	for {
		size, _, err := conn.ReadFromIP(buffer)
		if err != nil {
			return "", err
		}
		if f.Protocol == protocolICMP {
			if isEchoReply(buffer[:size], f.DestIP, port) {
				// The kernel's answer has no content.
				return lab.Answer{Name: "kernel", Local: f.dest(), Client: netip.AddrPortFrom(f.SourceIP, port)}.String(), nil
			}
			continue
		}
		from, to, chunk, cookie, err := parseSCTP(buffer[:size])
		if err != nil {
			return "", err
		}
		if from == f.DestPort && to == port && chunk == chunkInitAck {
			return cookie, nil
		}
	}
}

func echoRequest(to netip.Addr, id uint16) []byte {
	p := []byte{echoRequests[familyIndex(to)], 0, 0, 0}
	p = binary.BigEndian.AppendUint16(p, id)
	p = append(p, 0, 1)
	if to.Is4() { // otherwise the kernel does it
		sum := uint32(p[0])<<8 + uint32(id) + 1
		binary.BigEndian.PutUint16(p[2:], ^uint16(sum>>16+sum))
	}

	return p
}

func isEchoReply(p []byte, from netip.Addr, id uint16) bool {
	return len(p) >= 8 && p[0] == echoReplies[familyIndex(from)] && binary.BigEndian.Uint16(p[4:]) == id
}

// isSilence reports whether nothing came back.
func isSilence(err error) bool {
	var timeout interface{ Timeout() bool }

	return errors.As(err, &timeout) && timeout.Timeout()
}
