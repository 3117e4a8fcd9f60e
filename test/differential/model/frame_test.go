package model

import (
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	corev1 "k8s.io/api/core/v1"
)

// clientPort is the packets' source port; no Service has it as its NodePort.
func clientPort(number int) uint16 { return uint16(40000 + number%20000) }

// frame is a packet as the first one of a flow, from a client's port to a device.
func (p packet) frame(from uint16, device net.HardwareAddr) ([]byte, error) {
	transport, number := p.transport(from)
	ether := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, DstMAC: device, EthernetType: layers.EthernetTypeIPv4}
	var network gopacket.SerializableLayer
	if p.dst.Is4() {
		network = &layers.IPv4{Version: 4, TTL: 64, Protocol: number, SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice()}
	} else {
		ether.EthernetType = layers.EthernetTypeIPv6
		network = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: number, SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice()}
	}
	if summed, ok := transport[0].(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		if err := summed.SetNetworkLayerForChecksum(network.(gopacket.NetworkLayer)); err != nil {
			return nil, err
		}
	}
	buffer := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	err := gopacket.SerializeLayers(buffer, options, append([]gopacket.SerializableLayer{ether, network}, transport...)...)
	return buffer.Bytes(), err
}

func (p packet) transport(from uint16) ([]gopacket.SerializableLayer, layers.IPProtocol) {
	body := gopacket.Payload("sixteen bytes...")
	switch {
	case p.protocol == corev1.ProtocolTCP:
		return []gopacket.SerializableLayer{&layers.TCP{SrcPort: layers.TCPPort(from), DstPort: layers.TCPPort(p.port), SYN: true, Window: 1000}}, layers.IPProtocolTCP
	case p.protocol == corev1.ProtocolUDP:
		return []gopacket.SerializableLayer{&layers.UDP{SrcPort: layers.UDPPort(from), DstPort: layers.UDPPort(p.port)}, body}, layers.IPProtocolUDP
	case p.protocol == corev1.ProtocolSCTP:
		init := &layers.SCTPInit{SCTPChunk: layers.SCTPChunk{Type: layers.SCTPChunkTypeInit}, InitiateTag: 1, AdvertisedReceiverWindowCredit: 1500, OutboundStreams: 1, InboundStreams: 1}
		return []gopacket.SerializableLayer{&layers.SCTP{SrcPort: layers.SCTPPort(from), DstPort: layers.SCTPPort(p.port)}, init}, layers.IPProtocolSCTP
	case p.dst.Is4():
		return []gopacket.SerializableLayer{&layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(8, 0), Id: from}, body}, layers.IPProtocolICMPv4
	}
	return []gopacket.SerializableLayer{&layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(128, 0)}, &layers.ICMPv6Echo{Identifier: from}, body}, layers.IPProtocolICMPv6
}

// destination is where a frame goes.
func destination(frame []byte) netip.AddrPort {
	packet := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.NoCopy)
	var ip netip.Addr
	if network := packet.NetworkLayer(); network != nil {
		ip, _ = netip.AddrFromSlice(network.NetworkFlow().Dst().Raw())
	}
	var port uint16
	if transport := packet.TransportLayer(); transport != nil {
		raw := transport.TransportFlow().Dst().Raw()
		port = uint16(raw[0])<<8 | uint16(raw[1])
	}
	return netip.AddrPortFrom(ip, port)
}
