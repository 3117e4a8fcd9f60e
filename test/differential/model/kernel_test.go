package model

import (
	"errors"
	"flag"
	"fmt"
	randv2 "math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

var kernelSeeds = flag.Uint64("kernel-seeds", 24, "how many sessions to play in the kernel's maps, with its programs")

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// The real programs, on real maps, treat packets as the model does. (Sockets
// are asked in test/conformance/flows, with the flows of the fixtures.)
func TestInKernel(t *testing.T) {
	m := mustMachine(t)
	for seed := *first; seed < *first+*kernelSeeds; seed++ {
		if what := m.play(newSession(seed)); what != "" {
			t.Fatalf("seed %d: %s\nReplay: go test ./test/differential/model -run TestInKernel -first %d -kernel-seeds 1", seed, what, seed)
		}
	}
	t.Logf("%d packets: %v", m.packets, m.seen)
	for _, v := range []verdict{untouched, reject, drop, balance} {
		if m.seen[v] == 0 {
			t.Errorf("no packet was ever %s", v)
		}
	}
}

// machine is a node in a network namespace, with the kernel's maps.
//
//	up0    198.18.0.1/24, fd00:ff::1/64; the default gateways are 198.18.0.254 and fd00:ff::fe
//	pod0
//
// The addresses that the node has in a session are in the maps alone: whatever they
// are, there is a way to every backend.
type machine struct {
	ns       *lab.Namespace
	maps     *maps.Pinned
	programs map[bpf.DeviceConfig]*bpf.DevicePrograms
	packets  int
	seen     map[verdict]int
}

func mustMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{
		ns: lab.MustNamespace(t, "model"),
		maps: mapstest.MustCreate(t, map[string]uint32{
			maps.NameFrontendIDs: 4096, maps.NameAffinity: 4096, maps.NameFlows: 4096, maps.NameHalfOpen: 4096, maps.NameUnanswered: 4096,
		}),
		programs: map[bpf.DeviceConfig]*bpf.DevicePrograms{},
		seen:     map[verdict]int{},
	}
	lab.Must(t, m.build(lab.MustNamespace(t, "others")))
	t.Cleanup(func() {
		for _, p := range m.programs {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return m
}

// build makes devices, addresses and routes: the programs ask the kernel for the
// way to a backend.
func (m *machine) build(outside *lab.Namespace) error {
	errs := []error{
		m.ns.Sysctl("net/ipv4/ip_forward", "1"),
		m.ns.Sysctl("net/ipv6/conf/all/forwarding", "1"),
		lab.Veth(lab.End{Namespace: m.ns, Device: "up0", Addresses: []netip.Prefix{netip.MustParsePrefix("198.18.0.1/24"), netip.MustParsePrefix("fd00:ff::1/64")}},
			lab.End{Namespace: outside, Device: "up0"}),
		lab.Veth(lab.End{Namespace: m.ns, Device: "pod0"}, lab.End{Namespace: outside, Device: "pod0"}),
	}
	errs = append(errs,
		m.ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("198.18.0.254")),
		m.ns.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr("fd00:ff::fe")))
	return errors.Join(errs...)
}

// packetsPerStep are asked about after each step.
const packetsPerStep = 40

// play plays a session, and returns what is wrong.
func (m *machine) play(s *session) string {
	c := newCluster(s.options)
	subject, err := newSubjectOn(s.options, m.maps.Tables)
	if err != nil {
		return err.Error()
	}
	rng := randv2.New(randv2.NewPCG(s.probes, 6))
	for i, st := range s.steps {
		if _, _, err := subject.happen(c, st); err != nil {
			return err.Error()
		}
		subject.agent.Work()
		if what := subject.rest(); what != "" {
			return what
		}
		for range packetsPerStep {
			if what := m.ask(c, c.randomPacket(rng)); what != "" {
				return fmt.Sprintf("after step %d: %s\n%s", i, what, s)
			}
		}
	}
	return m.empty(s.options)
}

// empty removes everything from the maps, as an agent without objects does.
func (m *machine) empty(o options) string {
	s, err := newSubjectOn(o, m.maps.Tables)
	if err != nil {
		return err.Error()
	}
	s.setAddrs(nil)
	s.agent.Work()
	if what := s.rest(); what != "" {
		return what
	}
	s.forgetAddrs()
	return s.rest()
}

// randomPacket comes by a device, mostly to where a Service is.
func (c *cluster) randomPacket(rng *randv2.Rand) packet {
	for {
		p := packet{
			dst:      destinations[rng.IntN(len(destinations))],
			protocol: probedProtocols[rng.IntN(len(probedProtocols))],
		}
		if p.protocol != icmp {
			p.port = probedPorts[rng.IntN(len(probedPorts))]
		}
		sp, _ := c.owner(p)
		if sp == nil && c.nodePort(p) == nil && rng.IntN(50) > 0 {
			continue
		}
		clients := c.clients(familyOf(p.dst))
		from := clients[rng.IntN(len(clients))]
		p.path, p.src = from.path, from.src
		if p.path == podDevice || p.path == uplink {
			return p
		}
	}
}

// ask sends a packet, and returns what is wrong with its outcome.
func (m *machine) ask(c *cluster, p packet) string {
	want := c.expect(p)
	m.packets++
	m.seen[want.verdict]++
	have, to, err := m.send(c, p)
	if err != nil {
		return fmt.Sprintf("%s: %v", p, err)
	}
	right := have == want.verdict
	if have == balance {
		right = right && slices.ContainsFunc(want.targets, func(t target) bool { return t.at == to.at && t.masquerade == to.masquerade })
	}
	if !right {
		return fmt.Sprintf("%s: it is %s (%s, masqueraded %t), and must be %s", p, have, to.at, to.masquerade, want)
	}
	return ""
}

// send runs a packet through the program of its device.
func (m *machine) send(c *cluster, p packet) (verdict, target, error) {
	device, class := "up0", maps.DeviceUplink
	if p.path == podDevice {
		device, class = "pod0", maps.DevicePods
	}
	link, err := m.ns.Netlink().LinkByName(device)
	if err != nil {
		return "", target{}, err
	}
	program, err := m.program(uint32(class), c.options.detect != byDevice)
	if err != nil {
		return "", target{}, err
	}
	from := clientPort(m.packets)
	frame, err := p.frame(from, link.Attrs().HardwareAddr)
	if err != nil {
		return "", target{}, err
	}
	before, err := m.maps.ReasonCounts()
	if err != nil {
		return "", target{}, err
	}
	run := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: &skBuff{Ifindex: uint32(link.Attrs().Index)}}
	err = m.ns.Do(func() error {
		_, err := program.Run(run)
		return err
	})
	if err != nil {
		return "", target{}, err
	}
	after, err := m.maps.ReasonCounts()
	if err != nil {
		return "", target{}, err
	}
	return m.outcome(p, from, before, after, run.DataOut)
}

// outcome derives what happened to a packet from the counters and the flow maps.
func (m *machine) outcome(p packet, from uint16, before, after map[maps.Reason]uint64, out []byte) (verdict, target, error) {
	for reason, n := range after {
		if n == before[reason] {
			continue
		}
		switch reason {
		case maps.ReasonPassNoFrontend, maps.ReasonPassOtherTraffic:
			return untouched, target{}, nil
		case maps.ReasonRejectNoBackend, maps.ReasonRejectNoPort, maps.ReasonRejectLimited:
			return reject, target{}, nil
		case maps.ReasonDropNoLocalBackend, maps.ReasonDropSourceRange, maps.ReasonDropUnallocated, maps.ReasonDropSource:
			return drop, target{}, nil
		case maps.ReasonTranslated:
			key := maps.FlowKeyOf(maps.HookIngress, protocolNumbers[p.protocol], netip.AddrPortFrom(p.src, from), netip.AddrPortFrom(p.dst, uint16(p.port)))
			flow, found, err := m.maps.Opening(key.Proto).Lookup(key)
			if err != nil || !found {
				return "", target{}, fmt.Errorf("translated, but no flow: %w", err)
			}
			return balance, target{at: destination(out), masquerade: flow.IsMasqueraded()}, nil
		}
		return "", target{}, fmt.Errorf("%s", reason)
	}
	return "", target{}, errors.New("nothing was counted")
}

// program is the one of a kind of devices.
func (m *machine) program(class uint32, bySource bool) (*ebpf.Program, error) {
	version, err := features.LinuxVersionCode()
	if err != nil {
		return nil, err
	}
	cfg := bpf.DeviceConfig{Class: class, ScopeBySource: bySource, FIBSource: version >= 6<<16|7<<8, ChecksumIPv6: version >= 6<<16|16<<8}
	if m.programs[cfg] == nil {
		if m.programs[cfg], err = bpf.LoadDevice(m.maps, cfg); err != nil {
			return nil, err
		}
	}
	return m.programs[cfg].Ingress, nil
}

// skBuff is the beginning of struct __sk_buff, as far as a test run takes it.
type skBuff struct {
	_       [10]uint32
	Ifindex uint32
}
