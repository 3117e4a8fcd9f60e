package lab

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A datagram on its way from one end of a pair to the other has a checksum that
// is right, or that the hardware has yet to compute.
func TestOffloadOfChecksums(t *testing.T) {
	sender, receiver := MustNamespace(t, "sender"), MustNamespace(t, "receiver")
	MustVeth(t,
		End{Namespace: sender, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}},
		End{Namespace: receiver, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/24")}})

	for _, on := range []bool{true, false} {
		Must(t, sender.SetOffload("eth0", Checksums, on))
		fd := mustTap(t, receiver)
		conn, err := sender.Dial("udp", "10.0.0.2:9", time.Second)
		Must(t, err)
		if _, err := conn.Write([]byte("some text")); err != nil {
			t.Fatal(err)
		}
		if right := checksumIsRight(mustDatagram(t, fd)); right == on {
			t.Errorf("offload is %t, but the checksum on the wire is right: %t", on, right)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

// mustTap opens a socket that gets everything that comes to a namespace.
func mustTap(t testing.TB, ns *Namespace) (fd int) {
	t.Helper()
	MustDo(t, ns, func() (err error) {
		protocol := int(unix.ETH_P_ALL&0xff<<8 | unix.ETH_P_ALL>>8)
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol)
		return err
	})
	t.Cleanup(func() { _ = unix.Close(fd) })
	Must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}))

	return fd
}

// mustDatagram waits for one of UDP over IPv4.
func mustDatagram(t testing.TB, fd int) []byte {
	t.Helper()
	buffer := make([]byte, 2048)
	for {
		size, err := unix.Read(fd, buffer)
		Must(t, err)
		if size > 28 && buffer[0] == 0x45 && buffer[9] == unix.IPPROTO_UDP {
			return buffer[:size]
		}
	}
}

func checksumIsRight(packet []byte) bool {
	length := len(packet) - 20
	sum := uint32(unix.IPPROTO_UDP + length)
	for bytes := packet[12:]; len(bytes) > 0; bytes = bytes[2:] {
		if len(bytes) == 1 {
			bytes = append(bytes, 0)
		}
		sum += uint32(binary.BigEndian.Uint16(bytes))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}

	return sum == 0xffff
}
