package datapath

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// destroyUDP destroys one socket by inet_diag. It needs CONFIG_INET_DIAG_DESTROY and
// the module udp_diag, which the kernel loads.
func destroyUDP(sock maps.TranslatedSock) error {
	request := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	request.AddData(&diagRequest{sock})
	if _, err := request.Execute(unix.NETLINK_INET_DIAG, 0); err != nil {
		return fmt.Errorf("destroy of the UDP socket to %s: %w", sock.Peer.IP(), err)
	}

	return nil
}

// diagRequest is the kernel's struct inet_diag_req_v2.
type diagRequest struct {
	sock maps.TranslatedSock
}

const diagRequestLen = 56

// Len implements nl.NetlinkRequestData.
func (*diagRequest) Len() int { return diagRequestLen }

// Serialize implements nl.NetlinkRequestData.
func (r *diagRequest) Serialize() []byte {
	b := make([]byte, diagRequestLen)
	b[0], b[1] = uint8(r.sock.Family), unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], 0xffffffff) // all states
	binary.NativeEndian.PutUint16(b[8:], r.sock.SourcePort)
	binary.NativeEndian.PutUint16(b[10:], r.sock.PeerPort)
	if r.sock.Family == unix.AF_INET {
		copy(b[12:], r.sock.Source.Bytes[12:])
		copy(b[28:], r.sock.Peer.Bytes[12:])
	} else {
		copy(b[12:], r.sock.Source.Bytes[:])
		copy(b[28:], r.sock.Peer.Bytes[:])
	}
	binary.NativeEndian.PutUint32(b[44:], r.sock.Device)
	binary.NativeEndian.PutUint32(b[48:], uint32(r.sock.Cookie))
	binary.NativeEndian.PutUint32(b[52:], uint32(r.sock.Cookie>>32))

	return b
}
