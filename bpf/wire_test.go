package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// What a test run cannot show is shown on the rig's own devices: packets whose
// checksum is yet to be computed, packets to be cut into segments, and devices
// without Ethernet.

// attach attaches a program to a device of the node for the time of a test.
func (r *rig) attach(t testing.TB, device string, parent uint32, program *ebpf.Program) {
	t.Helper()
	index := r.links[device].Attrs().Index
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	lab.Must(t, r.node.Netlink().QdiscReplace(qdisc))
	t.Cleanup(func() {
		if err := r.node.Netlink().QdiscDel(qdisc); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			t.Error(err)
		}
	})
	lab.Must(t, r.node.Netlink().FilterReplace(&netlink.BpfFilter{
		FilterAttrs:  netlink.FilterAttrs{LinkIndex: index, Parent: parent, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:           program.FD(),
		Name:         "sluice",
		DirectAction: true,
	}))
}

// vnetHeader is struct virtio_net_hdr: what a packet socket says of a packet's offloads.
type vnetHeader struct {
	Flags, GSOType                          uint8
	HeaderLen, GSOSize, SumStart, SumOffset uint16
}

const (
	vnetHeaderLen = 10
	vnetNeedsSum  = 1
	gsoNone       = 0
	gsoTCPv4      = 1
	gsoTCPv6      = 4
	gsoUDP        = 5
)

// station is a packet socket at the other end of one of the node's devices.
type station struct {
	fd    int
	index int
}

func mustStation(t testing.TB, ns *lab.Namespace, device string) station {
	t.Helper()
	link, err := ns.Netlink().LinkByName(device)
	lab.Must(t, err)
	s := station{index: link.Attrs().Index}
	lab.MustDo(t, ns, func() (err error) {
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)

		return err
	})
	t.Cleanup(func() { unix.Close(s.fd) })
	lab.Must(t, unix.SetsockoptInt(s.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	lab.Must(t, unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	lab.Must(t, unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: s.index})) // all protocols, in network order

	return s
}

// send sends a packet whose checksum the device has yet to compute, cut into
// segments if gsoSize is not zero.
func (s station) send(t testing.TB, frame []byte, kind uint8, gsoSize uint16) {
	t.Helper()
	l3, _ := skipLink(frame)
	d, _ := dissect(frame, l3)
	offset := uint16(16)
	if d.proto == 17 {
		offset = 6
	}
	at := d.transport + int(offset)
	// The sum so far is that of the pseudo header.
	length := uint32(d.end - d.transport)
	binary.BigEndian.PutUint16(frame[at:], uint16(add(length+uint32(d.proto), d.addrs)))
	header := vnetHeader{Flags: vnetNeedsSum, GSOType: kind, HeaderLen: uint16(d.transport) + 20, GSOSize: gsoSize, SumStart: uint16(d.transport), SumOffset: offset}
	if d.proto == 17 {
		header.HeaderLen = uint16(d.transport) + 8
	}
	bytes, err := binary.Append(nil, binary.NativeEndian, header)
	lab.Must(t, err)
	_, err = unix.SendmsgN(s.fd, append(bytes, frame...), nil, &unix.SockaddrLinklayer{Ifindex: s.index, Halen: 6}, 0)
	lab.Must(t, err)
}

// receive waits for a packet from one address to another, and puts in the checksum
// that the device has yet to compute.
func (s station) receive(t testing.TB, want packet, f family) ([]byte, vnetHeader) {
	t.Helper()
	buffer := make([]byte, 70000)
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		n, _, err := unix.Recvfrom(s.fd, buffer, 0)
		if err != nil || n < vnetHeaderLen+34 {
			continue
		}
		var header vnetHeader
		_, err = binary.Decode(buffer, binary.NativeEndian, &header)
		lab.Must(t, err)
		frame := buffer[vnetHeaderLen:n]
		l3, ok := skipLink(frame)
		if src, dst, read := addresses(frame, l3); !ok || !read || src != f.addr(want.src.Addr()) || dst != f.addr(want.dst.Addr()) {
			continue
		}
		if header.Flags&vnetNeedsSum != 0 {
			start := int(header.SumStart)
			binary.BigEndian.PutUint16(frame[start+int(header.SumOffset):], ^uint16(add(0, frame[start:])))
		}

		return frame, header
	}
	t.Fatalf("no packet from %s to %s", want.src, want.dst)

	return nil, vnetHeader{}
}

// A packet that its sender left unfinished is translated, and can be finished
// by the next sender: in one piece, and in segments.
func TestOffloads(t *testing.T) {
	for _, test := range []struct {
		name string
		in   packet
		kind func(family) uint8
		size uint16
	}{
		{"TCP with its checksum to come", tcp(client, clusterIP, "P.").with("hello"), nil, 0},
		{"UDP with its checksum to come", udp(client, clusterIP), nil, 0},
		{"TCP to be cut", tcp(client, clusterIP, "P.").long(4001), func(f family) uint8 {
			if f == ipv6 {
				return gsoTCPv6
			}

			return gsoTCPv4
		}, 1000},
		{"UDP to be cut", udp(client, clusterIP).long(4001), func(family) uint8 { return gsoUDP }, 1000},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "UDP to be cut" && !atLeast(t, 6, 2) {
				t.Skip("this kernel takes no such packet from a packet socket (Linux 6.2)")
			}
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f)
				kind := uint8(gsoNone)
				if test.kind != nil {
					kind = test.kind(f)
				}
				w.offload(t, test.in, kind, test.size)
			})
		})
	}
}

// offload sends a packet from the client to the Service and one back, through
// the node's stack.
func (w *world) offload(t *testing.T, in packet, kind uint8, size uint16) {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, proto: in.proto, to: []string{tapPod}})
	w.ingress(t, uplink, first(in.proto, client, clusterIP)).ends(verdictNext, maps.ReasonTranslated)
	for device, hop := range map[string]string{"eth0": "8.0.50.254:0", "tap0": tapPod} {
		lab.Must(t, w.node.Netlink().NeighSet(&netlink.Neigh{
			LinkIndex: int(w.index(device)), State: netlink.NUD_PERMANENT,
			IP: w.family.addr(at(hop).Addr()).AsSlice(), HardwareAddr: macOf(at(hop).Addr()),
		}))
	}
	outside, pod := mustStation(t, w.outside, "eth0"), mustStation(t, w.outside, "tap0")
	w.attach(t, "eth0", netlink.HANDLE_MIN_INGRESS, w.programs(t, uplink).Ingress)
	w.attach(t, "eth0", netlink.HANDLE_MIN_EGRESS, w.programs(t, uplink).Egress)

	forward := in
	forward.hops--
	out := in.from(tapPod).to(client)
	for _, step := range []struct {
		from, to station
		by       string
		in, want packet
	}{
		{outside, pod, "eth0", in, forward.to(tapPod)},
		{pod, outside, "tap0", out, forward.from(clusterIP).to(client)},
	} {
		between := ends{src: macOf(step.in.src.Addr()), dst: w.links[step.by].Attrs().HardwareAddr}
		step.from.send(t, step.in.frame(w.family, between), kind, size)
		got, header := step.to.receive(t, step.want, w.family)
		if header.GSOSize != size || header.GSOType != kind {
			t.Errorf("it came with type %d and %d bytes a segment, want %d and %d", header.GSOType, header.GSOSize, kind, size)
		}
		o := outcome{t: t, w: w, place: uplink, got: got}
		o.compare(step.want.frame(w.family, ends{src: net.HardwareAddr(got[6:12]), dst: net.HardwareAddr(got[:6])}))
	}
}

// mustTun makes a device without Ethernet, with a process at its other end.
func (w *world) mustTun(t testing.TB, name string) int {
	t.Helper()
	var fd int
	lab.MustDo(t, w.node, func() (err error) {
		fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("/dev/net/tun: %w", err)
		}
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)

		return unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	})
	link, err := w.node.Netlink().LinkByName(name)
	lab.Must(t, err)
	w.links[name] = link
	t.Cleanup(func() {
		unix.Close(fd)
		delete(w.links, name)
	})
	lab.Must(t, w.node.SetUp(name))
	for _, address := range both("8.0.7.1/24") {
		lab.Must(t, w.node.AddAddress(name, address))
	}

	return fd
}

// A device without Ethernet, for real: what comes by it is translated or refused.
func TestRealDeviceWithoutEthernet(t *testing.T) {
	eachFamily(t, func(t *testing.T, f family) {
		w := newWorld(t, f)
		p := place{device: "real0", client: "8.0.7.2:40000", class: maps.DevicePods, noEthernet: true}
		fd := w.mustTun(t, p.device)
		lab.Must(t, w.maps.Devices.Put(w.index(p.device), maps.Device{SourceV4: maps.AddrOf(at("8.0.7.1:0").Addr()), SourceV6: maps.AddrOf(six(at("8.0.7.1:0").Addr()))}))
		w.serve(t, service{at: []string{clusterIP}})
		w.serve(t, service{at: []string{otherIP}, to: []string{"8.0.7.2:8080"}})
		programs := w.programs(t, p)
		w.attach(t, p.device, netlink.HANDLE_MIN_INGRESS, programs.Ingress)
		w.attach(t, p.device, netlink.HANDLE_MIN_EGRESS, programs.Egress)

		for name, in := range map[string]packet{
			"refused": tcp(p.client, clusterIP, "S"), "refused, long": tcp(p.client, clusterIP, "S").long(300),
			"refused, a ping": ping(p.client, clusterIP),
		} {
			t.Run(name, func(t *testing.T) {
				want := refusalOf(in, "8.0.7.1:0")
				o := outcome{t: t, w: w, place: p, got: w.exchange(t, fd, in, want)}
				o.compare(want.network(f))
			})
		}
		t.Run("translated and masqueraded", func(t *testing.T) {
			in := tcp(p.client, otherIP, "S")
			want := in.from("8.0.7.1:0").to("8.0.7.2:8080")
			want.hops--
			got := w.exchange(t, fd, in, want)
			o := outcome{t: t, w: w, place: p, got: got}
			o.compare(want.fromPort(maps.Port(w.flowOf(t, p.client, otherIP).MasqueradePort)).network(f))
		})
	})
}

// exchange gives a packet to a tun device and waits for one from where want comes.
func (w *world) exchange(t testing.TB, fd int, in, want packet) []byte {
	t.Helper()
	_, err := unix.Write(fd, in.network(w.family))
	lab.Must(t, err)
	buffer := make([]byte, 2000)
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		n, err := unix.Read(fd, buffer)
		if err != nil {
			continue
		}
		src, dst, ok := addresses(buffer[:n], 0)
		if ok && src == w.family.addr(want.src.Addr()) && dst == w.family.addr(want.dst.Addr()) {
			return buffer[:n]
		}
	}
	t.Fatalf("no packet from %s", want.src)

	return nil
}
