package bpf

import (
	"bytes"
	"encoding/hex"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	abi "github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The verdicts of programs.
const (
	verdictNext     = int32(-1)
	verdictDrop     = int32(2)
	verdictRedirect = int32(7)
)

// shortestRun is the least number of bytes for a test run, in IPv6.
const shortestRun = 14 + 40

// skBuff is struct __sk_buff.
type skBuff struct {
	Len, PktType, Mark, QueueMapping, Protocol     uint32
	VlanPresent, VlanTCI, VlanProto, Priority      uint32
	IngressIfindex, Ifindex, TCIndex               uint32
	CB                                             [5]uint32
	Hash, TCClassID, Data, DataEnd, NapiID, Family uint32
	RemoteIP4, LocalIP4                            uint32
	RemoteIP6, LocalIP6                            [4]uint32
	RemotePort, LocalPort, DataMeta                uint32
	FlowKeys, TStamp                               uint64
	WireLen, GSOSegs                               uint32
	Sock                                           uint64
	GSOSize                                        uint32
	TStampType                                     uint8
	_                                              [3]uint8
	HWTStamp                                       uint64
}

const (
	markOfOthers = 0x4000
	// checksumComplete is BPF_F_TEST_SKB_CHECKSUM_COMPLETE: the frame arrives as if its device had summed it,
	// and the kernel fails (EBADMSG) if the sum is wrong after the program.
	checksumComplete = 1 << 2
)

// outcome is the result of a program for a frame.
type outcome struct {
	t       testing.TB
	w       *world
	place   place
	ingress bool
	in      packet
	between ends
	sent    []byte
	got     []byte
	verdict int32
	reasons map[abi.Reason]uint64
}

// ingress runs a packet through the ingress hook, egress through the egress hook.
func (w *world) ingress(t testing.TB, p place, in packet) outcome {
	t.Helper()
	between := ends{src: macOf(in.src.Addr()), dst: w.links[p.device].Attrs().HardwareAddr}
	if p.bridgePort {
		between.dst = w.links["br0"].Attrs().HardwareAddr
	}

	if in.toAll {
		between.dst = net.HardwareAddr{255, 255, 255, 255, 255, 255}
	}
	o := w.run(t, w.programs(t, p).Ingress, p, in, between)
	o.ingress = true

	return o
}

// refused is ingress for a packet that will be refused. An error has no checksum of the device, because the
// kernel drops that when it sends the error.
func (w *world) refused(t testing.TB, p place, in packet) outcome {
	t.Helper()
	w.unsummed = true
	defer func() { w.unsummed = false }()

	return w.ingress(t, p, in)
}

func (w *world) egress(t testing.TB, p place, in packet) outcome {
	t.Helper()
	between := ends{src: w.links[p.device].Attrs().HardwareAddr, dst: macOf(in.dst.Addr())}

	return w.run(t, w.programs(t, p).Egress, p, in, between)
}

// programs returns the programs of a place with the configuration of w.
func (w *world) programs(t testing.TB, p place) *DevicePrograms {
	t.Helper()

	return w.mustPrograms(t, w.config(t, p))
}

func (w *world) config(t testing.TB, p place) DeviceConfig {
	t.Helper()
	cfg := DeviceConfig{
		Class: p.class, NoEthernet: p.noEthernet, BridgePort: p.bridgePort,
		FIBSource: atLeast(t, 6, 7), ChecksumIPv6: atLeast(t, 6, 16), Conntrack: knowsConntrack(t),
	}
	for _, option := range w.options {
		option(&cfg)
	}

	return cfg
}

// bytes returns the bytes of a packet at a place.
func (w *world) bytes(p place, in packet, between ends) []byte {
	if p.noEthernet {
		return in.network(w.family)
	}

	return in.frame(w.family, between)
}

func (w *world) run(t testing.TB, program *ebpf.Program, p place, in packet, between ends) outcome {
	t.Helper()
	before, err := w.maps.ReasonCounts()
	lab.Must(t, err)
	o := outcome{t: t, w: w, place: p, in: in, between: between, sent: w.bytes(p, in, between)}
	o.got, o.verdict = w.runBytes(t, program, p, o.sent)
	after, err := w.maps.ReasonCounts()
	lab.Must(t, err)
	maps.DeleteFunc(after, func(why abi.Reason, n uint64) bool { return n == before[why] })
	for why := range after {
		after[why] -= before[why]
	}
	o.reasons = after

	return o
}

// runBytes runs a frame, and checks that the program did not change the rest of the context.
func (w *world) runBytes(t testing.TB, program *ebpf.Program, p place, frame []byte) ([]byte, int32) {
	t.Helper()
	before := skBuff{Ifindex: w.index(p.device), Mark: markOfOthers, Priority: 5}
	if w.gsoSize > 0 {
		before.GSOSize, before.GSOSegs = w.gsoSize, uint32(len(frame))/w.gsoSize+1
	}
	var after skBuff
	sent := len(frame)
	if p.noEthernet {
		// A test run requires an Ethernet and an IP header.
		frame = append(slices.Clip(frame), make([]byte, max(0, shortestRun-sent))...)
	}
	options := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: &before, ContextOut: &after}
	if !p.noEthernet && !w.unsummed && canCheckSums(t) {
		options.Flags = checksumComplete
	}
	verdict, err := w.call(program, options)
	if w.lenient && errors.Is(err, unix.EBADMSG) {
		options.Flags, options.DataOut = 0, make([]byte, len(frame)+256)
		verdict, err = w.call(program, options)
		if int32(verdict) == verdictNext {
			t.Errorf("%d bytes: the sum that the device had added up is wrong:\n%s", len(frame), hex.Dump(frame))
		}
	}
	if err != nil {
		t.Fatalf("%d bytes:\n%s\n%v", len(frame), hex.Dump(frame), err)
	}
	if int32(verdict) == verdictNext && (after.Mark != before.Mark^w.marked || after.Priority != before.Priority || after.GSOSize != before.GSOSize) {
		t.Errorf("mark, priority and segment size are %#x, %d, %d, want %#x, %d, %d",
			after.Mark, after.Priority, after.GSOSize, before.Mark^w.marked, before.Priority, before.GSOSize)
	}

	if len(options.DataOut) == len(frame) {
		options.DataOut = options.DataOut[:sent]
	}

	return options.DataOut, int32(verdict)
}

// call runs a program inside the node.
func (w *world) call(program *ebpf.Program, options *ebpf.RunOptions) (verdict uint32, err error) {
	err = w.node.Do(func() (err error) {
		verdict, err = program.Run(options)

		return err
	})

	return verdict, err
}

// canCheckSums reports whether the kernel supports checksumComplete.
func canCheckSums(t testing.TB) bool {
	return checkedSums(t)
}

var checkedSums = func() func(testing.TB) bool {
	var once sync.Once
	var can bool

	return func(t testing.TB) bool {
		once.Do(func() { can = atLeast(t, 6, 13) })

		return can
	}
}()

// becomes checks that the packet went on as want. Between two pods of one bridge, its Ethernet address is that
// of the backend.
func (o outcome) becomes(want packet, why abi.Reason) {
	o.t.Helper()
	o.ends(verdictNext, why)
	between := o.between
	if o.place.bridgePort && o.place.class == abi.DevicePods && o.ingress && isBridged(want.src) && isBridged(want.dst) && want.src.Addr() != want.dst.Addr() {
		between.dst = macOf(want.dst.Addr())
	}
	o.compare(o.w.bytes(o.place, want, between))
}

// isBridged reports whether an address is behind the bridge.
func isBridged(a netip.AddrPort) bool {
	return netip.MustParsePrefix("8.0.1.0/24").Contains(a.Addr())
}

// passes checks that the packet went on unchanged. With ReasonNext, no reason was counted.
func (o outcome) passes(why abi.Reason) {
	o.t.Helper()
	o.ends(verdictNext, why)
	o.isUntouched()
}

// leaves checks that the packet was turned around, as want with a lower hop limit.
func (o outcome) leaves(want packet, why abi.Reason) {
	o.t.Helper()
	o.ends(verdictRedirect, why)
	want.hops--
	o.compare(o.w.bytes(o.place, want, o.between))
}

// drops checks that the packet was dropped silently.
func (o outcome) drops(why abi.Reason) {
	o.t.Helper()
	o.ends(verdictDrop, why)
}

// rejects checks that an ICMP error was sent back.
func (o outcome) rejects(want packet, why abi.Reason) {
	o.t.Helper()
	o.ends(verdictRedirect, why)
	o.compare(o.w.bytes(o.place, want, ends{src: o.between.dst, dst: o.between.src}))
}

// ends checks verdict and reason.
func (o outcome) ends(verdict int32, why abi.Reason) {
	o.t.Helper()
	o.verdictIs(verdict)
	want := map[abi.Reason]uint64{why: 1}
	if why == abi.ReasonNext {
		want = nil
	}
	if !maps.Equal(o.reasons, want) {
		o.t.Errorf("reasons are %v, want %q", o.reasons, why)
	}
}

func (o outcome) verdictIs(want int32) {
	o.t.Helper()
	if o.verdict != want {
		o.t.Errorf("verdict is %d, want %d", o.verdict, want)
	}
}

func (o outcome) isUntouched() {
	o.t.Helper()
	if !bytes.Equal(o.sent, o.got) {
		o.t.Errorf("packet was changed (-sent +got):\n%s", cmp.Diff(o.text(o.sent), o.text(o.got)))
	}
}

// compare compares the frame with the expected one. A checksum can have two right values, so each is checked
// separately.
func (o outcome) compare(want []byte) {
	o.t.Helper()
	ethernet := !o.place.noEthernet
	if bytes.Equal(want, o.got) {
		return
	}
	if names := wrong(o.got, ethernet); len(names) > 0 {
		o.t.Errorf("checksums are wrong: %s", strings.Join(names, ", "))
	}
	if a, b := blank(want, ethernet), blank(o.got, ethernet); !bytes.Equal(a, b) {
		o.t.Errorf("packet differs (-want +got):\n%s", cmp.Diff(o.text(want), o.text(o.got)))
	}
}

// text returns a readable frame, layer by layer, and its bytes.
func (o outcome) text(frame []byte) []string {
	var kind gopacket.Decoder = layers.LayerTypeEthernet
	if o.place.noEthernet {
		kind = layers.LayerTypeIPv4
		if o.w.family == ipv6 {
			kind = layers.LayerTypeIPv6
		}
	}

	return strings.Split(gopacket.NewPacket(frame, kind, gopacket.Default).String()+hex.Dump(frame), "\n")
}
