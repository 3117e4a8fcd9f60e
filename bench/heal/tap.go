package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/lab"
)

// arrival is a new connection on its way to a backend, seen on the wire between the node with
// the proxy and all others. That the backend's node then drops it makes no difference.
type arrival struct {
	At      time.Duration // by load.Clock
	Backend netip.Addr
}

// attempt is what a connection has that its retransmissions have, too. A datagram has no
// sequence number.
type attempt struct {
	client, backend netip.AddrPort
	sequence        uint32
}

// tap listens to a device for first packets to a port.
type tap struct {
	file    *os.File
	reading sync.WaitGroup

	seen     map[attempt]bool
	arrivals []arrival
	err      error // why it ended before it was stopped
}

// startTap begins to listen. The caller stops it.
func startTap(ns *lab.Namespace, device string, port uint16) (*tap, error) {
	t := &tap{seen: make(map[attempt]bool)}
	if err := ns.Do(func() error { return t.open(ns, device, port) }); err != nil {
		return nil, fmt.Errorf("tap of %s in %s: %w", device, ns.Name(), err)
	}
	t.reading.Go(t.read)

	return t, nil
}

// open makes a packet socket that sees packets without link headers. It asks for those of all
// protocols: of a single one it would see none that a bridge has taken.
func (t *tap) open(ns *lab.Namespace, device string, port uint16) error {
	link, err := ns.Netlink().LinkByName(device)
	if err != nil {
		return err
	}
	filter, err := firstPackets(port)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	t.file = os.NewFile(uintptr(fd), "tap")
	// The filter comes before the protocol, without which the socket sees nothing.
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20),
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: link.Attrs().Index}),
	)
	if err != nil {
		err = errors.Join(err, t.file.Close())
	}

	return err
}

func networkOrder(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// firstPackets is a filter for SYNs and datagrams to a port, in packets that begin with a header
// of IPv4 without options and are no fragments, as all of this benchmark are.
func firstPackets(port uint16) ([]unix.SockFilter, error) {
	const protocol, toPort, flags = 9, 22, 33
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtProto},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IP, SkipTrue: 8},
		bpf.LoadAbsolute{Off: toPort, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(port), SkipTrue: 6},
		bpf.LoadAbsolute{Off: protocol, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 3},
		bpf.LoadAbsolute{Off: flags, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0x12}, // SYN and ACK
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0x02, SkipTrue: 1},
		bpf.RetConstant{Val: 64},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return nil, err
	}
	var filter []unix.SockFilter
	for _, i := range program {
		filter = append(filter, unix.SockFilter{Code: i.Op, Jt: i.Jt, Jf: i.Jf, K: i.K})
	}

	return filter, nil
}

// read notes first packets until the socket is closed.
func (t *tap) read() {
	packet := make([]byte, 64)
	for {
		n, err := t.file.Read(packet)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				t.err = err
			}

			return
		}
		if n < 28 {
			continue
		}
		a := attempt{client: addrPort(packet[12:16], packet[20:22]), backend: addrPort(packet[16:20], packet[22:24])}
		if packet[9] == unix.IPPROTO_TCP {
			a.sequence = binary.BigEndian.Uint32(packet[24:28])
		}
		if !t.seen[a] {
			t.seen[a] = true
			t.arrivals = append(t.arrivals, arrival{At: load.Clock(), Backend: a.backend.Addr()})
		}
	}
}

func addrPort(address, port []byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(address)), binary.BigEndian.Uint16(port))
}

// stop ends the tap and returns what it has seen, in order.
func (t *tap) stop() ([]arrival, error) {
	err := t.file.Close()
	t.reading.Wait()

	return t.arrivals, errors.Join(t.err, err)
}
