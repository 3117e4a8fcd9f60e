package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// Probe tells what the programs that are attached would do with a new flow. It runs their stages
// on the maps in force, and changes none of them. There is one of sockets, and one of each device.
type Probe struct {
	program   *ebpf.Program
	constants map[string][]byte // of the attached program
}

// Answer is the outcome of a new flow.
type Answer struct {
	Reason maps.Reason
	Scope  uint8 // one of the Scope constants of package maps
	// HasFrontend is set if the destination leads to Pool.
	HasFrontend bool
	Pool        maps.Pool
	// Backend is the id of the backend that was picked, or 0. If it is that of an earlier flow of the
	// client, Affinity is how long the client keeps it without a new flow, else 0.
	Backend  uint32
	Affinity time.Duration

	// Why a socket is left alone: its Service or its pod has opted out, or the destination is an
	// address of this node on which a socket answers.
	ServiceOptedOut, PodOptedOut, NodesOwn bool

	// Of a packet at a device:
	TableFull  bool       // a connection that has ended has to make room for this one
	Masquerade netip.Addr // what the backend sees as the client; invalid: the client
	Masks      bool       // the client is masqueraded, if there is an address for it
	Turns      int        // the device by which the packet leaves without passing the stack, or 0
}

// Dial is what a socket dials.
type Dial struct {
	To       netip.AddrPort
	Protocol uint8
	// Source is the address that the socket is bound to, or will have. It is invalid for a process
	// of the node that is bound to none.
	Source netip.Addr
	Host   bool   // in the node's network namespace
	PodUID string // of the calling process, or empty
}

// Packet is the first packet of a flow, at a device.
type Packet struct {
	Device   int
	MAC      net.HardwareAddr // of the device
	From, To netip.AddrPort
	Protocol uint8
	Backend  uint32 // the id of the backend to which the way is wanted; 0: the one that is picked
}

// LoadSocketProbe loads a probe with the configuration of attached, one of the attached socket
// programs. The caller closes the result.
func LoadSocketProbe(m *maps.Pinned, attached *ebpf.Program) (*Probe, error) {
	return newProbe(m, attached, probeProgSluiceProbeSocket)
}

// LoadDeviceProbe loads a probe with the configuration of attached, the program at a device's
// ingress. The caller closes the result.
func LoadDeviceProbe(m *maps.Pinned, attached *ebpf.Program) (*Probe, error) {
	return newProbe(m, attached, probeProgSluiceProbeDevice)
}

func newProbe(m *maps.Pinned, attached *ebpf.Program, name string) (*Probe, error) {
	constants, err := constantsOf(attached)
	if err != nil {
		return nil, fmt.Errorf("configuration of the attached program: %w", err)
	}
	spec, err := loadProbe()
	if err != nil {
		return nil, err
	}
	for variable, value := range constants {
		if v := spec.Variables[variable]; v != nil {
			if err := v.Set(value); err != nil {
				return nil, fmt.Errorf("variable %s: %w", variable, err)
			}
		}
	}
	loader := newLoader(m)
	program, err := loader.loadOne(loader.single(spec, name), name)
	if err != nil {
		return nil, err
	}

	return &Probe{program, constants}, nil
}

// constantsOf returns the bytes of each constant with which a program was loaded, by name.
func constantsOf(program *ebpf.Program) (map[string][]byte, error) {
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("program: %w", err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("map %d: %w", id, err)
		}
		constants, err := readConstants(m)
		if err := errors.Join(err, m.Close()); err != nil {
			return nil, fmt.Errorf("map %d: %w", id, err)
		}
		if constants != nil {
			return constants, nil
		}
	}

	return nil, errors.New("it has no constants")
}

// readConstants returns nil if the map is not one of constants.
func readConstants(m *ebpf.Map) (map[string][]byte, error) {
	const section = ".rodata"
	info, err := m.Info()
	if err != nil || !strings.HasSuffix(info.Name, section) {
		return nil, err
	}
	value, err := m.LookupBytes(uint32(0))
	if err != nil {
		return nil, err
	}
	id, ok := info.BTFID()
	if !ok {
		return nil, errors.New("it has no types")
	}
	handle, err := btf.NewHandleFromID(id)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	types, err := handle.Spec(nil)
	if err != nil {
		return nil, err
	}
	var layout *btf.Datasec
	if err := types.TypeByName(section, &layout); err != nil {
		return nil, err
	}
	constants := make(map[string][]byte)
	for _, v := range layout.Vars {
		end := v.Offset + v.Size
		if int(end) > len(value) {
			return nil, fmt.Errorf("%s ends at %d of %d bytes", v.Type.TypeName(), end, len(value))
		}
		constants[v.Type.TypeName()] = value[v.Offset:end]
	}

	return constants, nil
}

// Close closes the probe.
func (p *Probe) Close() error { return p.program.Close() }

// IsOfPods reports whether the device leads to pods.
func (p *Probe) IsOfPods() bool {
	class := p.constants[deviceVarConfigDeviceClass]

	return len(class) == 4 && binary.NativeEndian.Uint32(class) == maps.DevicePods
}

// SetsErrno reports whether a socket program tells a client more than that it is refused: see
// [Config.SetRetval].
func (p *Probe) SetsErrno() bool {
	sets := p.constants[sockVarConfigHasSetRetval]

	return len(sets) == 1 && sets[0] != 0
}

// Dial returns the outcome of a connect, or of the first datagram of a socket. It must be called in
// the node's network namespace.
func (p *Probe) Dial(d Dial) (Answer, error) {
	question := probeQuestion{
		OriginalDst: probeFrontendKey{Addr: probeAddrOf(d.To.Addr()), Port: maps.Port(d.To.Port()), Proto: d.Protocol, Scope: maps.ScopeInternal},
	}
	if d.Source.IsValid() {
		question.Source, question.HasSource = probeAddrOf(d.Source), 1
	}
	if d.Host {
		question.IsHost = 1
	}
	if uid, ok := maps.PodUIDOf(d.PodUID); ok {
		question.Pod.Text, question.HasPod = uid.Text, 1
	}
	text := make([]byte, binary.Size(question))
	if _, err := binary.Encode(text, binary.NativeEndian, question); err != nil {
		return Answer{}, fmt.Errorf("question: %w", err)
	}

	return p.run(&ebpf.RunOptions{Data: text})
}

// Arrive returns the outcome of a packet at the probe's device. It must be called in the node's
// network namespace.
func (p *Probe) Arrive(packet Packet) (Answer, error) {
	frame := packet.network()
	if ethernet := p.constants[deviceVarConfigEthernet]; len(ethernet) == 1 && ethernet[0] != 0 {
		frame = append(packet.ethernet(), frame...)
	}

	return p.run(&ebpf.RunOptions{
		Data:    frame,
		Context: runContext{Ifindex: uint32(packet.Device), Cb: [5]uint32{packet.Backend}},
	})
}

// runContext is the beginning of the kernel's struct __sk_buff.
type runContext struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTci, VlanProto, Priority uint32
	IngressIfindex, Ifindex, TCIndex                                                      uint32
	Cb                                                                                    [5]uint32
}

func probeAddrOf(a netip.Addr) probeAddr { return probeAddr{Bytes: a.As16()} }

// ethernet returns the Ethernet header.
func (p Packet) ethernet() []byte {
	kind := uint16(unix.ETH_P_IP)
	if p.To.Addr().Is6() {
		kind = unix.ETH_P_IPV6
	}
	header := append(make([]byte, 0, 14), p.MAC...)
	header = append(header, make([]byte, 12-len(header))...)

	return binary.BigEndian.AppendUint16(header, kind)
}

// network returns the packet from its IP header on. Checksums are not set: no program reads them.
func (p Packet) network() []byte {
	const v4, v6, transport, hops = 20, 40, 20, 64
	src, dst := p.From.Addr().AsSlice(), p.To.Addr().AsSlice()
	header := make([]byte, v6, v6+transport)
	if p.To.Addr().Is4() {
		header = header[:v4]
		header[0], header[8], header[9] = 4<<4|v4/4, hops, p.Protocol
		binary.BigEndian.PutUint16(header[2:], v4+transport)
		copy(header[12:], src)
		copy(header[16:], dst)
	} else {
		header[0], header[6], header[7] = 6<<4, p.Protocol, hops
		binary.BigEndian.PutUint16(header[4:], transport)
		copy(header[8:], src)
		copy(header[24:], dst)
	}
	ports := make([]byte, transport)
	binary.BigEndian.PutUint16(ports, p.From.Port())
	binary.BigEndian.PutUint16(ports[2:], p.To.Port())

	return append(header, ports...)
}

// run runs the program with room for an answer behind the question.
func (p *Probe) run(options *ebpf.RunOptions) (Answer, error) {
	var is probeAnswer
	size := max(len(options.Data), binary.Size(is))
	options.Data = append(options.Data, make([]byte, size-len(options.Data))...)
	options.DataOut = make([]byte, size)
	verdict, err := p.program.Run(options)
	if err != nil {
		return Answer{}, fmt.Errorf("probe: %w", err)
	}
	if verdict != 0xffffffff {
		return Answer{}, errors.New("probe: it gives no answer")
	}
	if _, err := binary.Decode(options.DataOut, binary.NativeEndian, &is); err != nil {
		return Answer{}, fmt.Errorf("answer: %w", err)
	}
	found := func(what probeFinding) bool { return is.Found&uint32(what) != 0 }
	answer := Answer{
		Reason:      maps.Reason(is.Reason),
		Scope:       uint8(is.Scope),
		HasFrontend: found(probeFindingFOUND_POOL),
		Pool: maps.Pool{
			SlotBase: is.Pool.SlotBase, SlotCount: is.Pool.SlotCount, TableBase: is.Pool.TableBase, TableSize: is.Pool.TableSize,
			ServicePortId: is.Pool.ServicePortId, AffinitySeconds: is.Pool.AffinitySeconds, Flags: is.Pool.Flags, Algorithm: is.Pool.Algorithm,
		},
		Backend:         is.BackendId,
		ServiceOptedOut: found(probeFindingFOUND_OPT_OUT_SERVICE),
		PodOptedOut:     found(probeFindingFOUND_OPT_OUT_POD),
		NodesOwn:        found(probeFindingFOUND_NODES_OWN),
		TableFull:       found(probeFindingFOUND_NO_ROOM),
		Masks:           found(probeFindingFOUND_MASQUERADE),
	}
	if found(probeFindingFOUND_AFFINITY) {
		answer.Affinity = time.Duration(is.AffinityLeft)
	}
	if answer.Masks && is.Masquerade != (probeAddr{}) {
		answer.Masquerade = netip.AddrFrom16(is.Masquerade.Bytes).Unmap()
	}
	if found(probeFindingFOUND_TURN) {
		answer.Turns = int(is.Out)
	}

	return answer, nil
}
