package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

const (
	lateDevice = "late"
	// What has been held up has this mark, and leaves by this table.
	lateMark, lateTable = 1, 100
	// More packets than this that wait are lost, as in any queue.
	lateQueue = 4096
)

// delay holds up what a pod sends: its packets go into a tun device, and from there, after their
// time, out by eth0. What ends it sends what is still waiting.
func delay(pod *lab.Pod, by time.Duration) (end func() error, err error) {
	gateway := netip.PrefixFrom(pod.IPv4, 24).Masked().Addr().Next()
	handle := pod.Netlink()
	eth0, err := handle.LinkByName("eth0")
	if err != nil {
		return nil, fmt.Errorf("delay of %s: %w", pod.Name, err)
	}
	rule := netlink.NewRule()
	rule.Mark, rule.Table, rule.Family = lateMark, lateTable, unix.AF_INET
	d := new(delayer)
	end = func() error {
		everywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)

		return errors.Join(pod.AddRoute(everywhere, gateway), d.close(), handle.RuleDel(rule))
	}
	err = errors.Join(
		handle.RouteReplace(&netlink.Route{Table: lateTable, LinkIndex: eth0.Attrs().Index, Gw: gateway.AsSlice(), Flags: unix.RTNH_F_ONLINK}),
		handle.RuleAdd(rule),
		pod.Do(d.open),
		pod.SetUp(lateDevice),
	)
	if err == nil {
		d.start(by)
		err = pod.AddDeviceRoute(netip.PrefixFrom(netip.IPv4Unspecified(), 0), lateDevice)
	}
	if err != nil {
		err = fmt.Errorf("delay of %s: %w", pod.Name, err)
	}

	return end, err
}

// delayer moves packets from a tun device to a raw socket.
type delayer struct {
	tun     *os.File
	raw     int
	waiting chan latePacket
	running sync.WaitGroup
}

type latePacket struct {
	due   time.Time
	bytes []byte
}

// open makes the device and the socket, in the namespace of the calling thread.
func (d *delayer) open() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	request, err := unix.NewIfreq(lateDevice)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err == nil {
		d.raw, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	}
	if err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	d.tun = os.NewFile(uintptr(fd), lateDevice)

	return unix.SetsockoptInt(d.raw, unix.SOL_SOCKET, unix.SO_MARK, lateMark)
}

func (d *delayer) start(by time.Duration) {
	d.waiting = make(chan latePacket, lateQueue)
	d.running.Go(func() {
		defer close(d.waiting)
		buffer := make([]byte, 1<<16)
		for {
			n, err := d.tun.Read(buffer)
			if err != nil {
				return // closed
			}
			select {
			case d.waiting <- latePacket{time.Now().Add(by), append([]byte(nil), buffer[:n]...)}:
			default:
			}
		}
	})
	d.running.Go(func() {
		for p := range d.waiting {
			time.Sleep(time.Until(p.due))
			if p.bytes[0]>>4 == 4 {
				// One that cannot be sent is lost.
				_ = unix.Sendto(d.raw, p.bytes, 0, &unix.SockaddrInet4{Addr: [4]byte(p.bytes[16:20])})
			}
		}
	})
}

// close removes the device, after what waits has been sent.
func (d *delayer) close() error {
	if d.tun == nil {
		return nil
	}
	err := d.tun.Close()
	d.running.Wait()

	return errors.Join(err, unix.Close(d.raw))
}
