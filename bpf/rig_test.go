package bpf

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// rig is shared by all packet tables: a namespace that is a node, maps, and programs. It is made once; each
// world empties the maps.
//
//	eth0    8.0.50.1/24               the default gateway is 8.0.50.254; pods of node 2 by 8.0.50.2
//	eth1    8.0.51.1/24, 8.0.51.77    8.0.3.0/24 by 8.0.51.3, source 8.0.51.77
//	eth2    169.254.0.1/16            8.0.5.0/24 by 169.254.0.9
//	wg0     8.0.60.1/24               8.0.110.0/24
//	br0     8.0.1.1/24                a bridge, its ports are port0, port1 and nic0; 8.0.121.0/24 by the pod 8.0.1.2
//	tap0    8.0.4.1/32                8.0.4.0/24; 8.0.120.0/24 by the pod 8.0.4.9
//	tun0    8.0.6.1/32                8.0.6.0/24
//	cni0    8.0.9.1/32                8.0.9.0/24, where nothing is attached: a CNI hands packets on to tap0
//
// and the same in IPv6. All are veths without listeners at their other ends: the configuration of the
// programs determines the kind of device.
type rig struct {
	node, outside *lab.Namespace
	maps          *maps.Pinned
	links         map[string]netlink.Link
	programs      map[DeviceConfig]*DevicePrograms
}

var (
	theRig    *rig
	rigOnce   sync.Once
	rigOpened []interface{ Close() error } // the last one first
)

func mustRig(t testing.TB) *rig {
	t.Helper()
	lab.NeedsRoot(t)
	rigOnce.Do(func() {
		r, err := openRig()
		lab.Must(t, err)
		theRig = r
	})
	if theRig == nil {
		t.Fatal("there is no rig")
	}

	return theRig
}

func openRig() (*rig, error) {
	r := &rig{links: make(map[string]netlink.Link), programs: make(map[DeviceConfig]*DevicePrograms)}
	var err error
	if r.node, err = lab.NewNamespace("tables"); err != nil {
		return nil, err
	}
	rigOpened = append(rigOpened, r.node)
	if r.outside, err = lab.NewNamespace("outside"); err != nil {
		return nil, err
	}
	rigOpened = append(rigOpened, r.outside)
	root := "/sys/fs/bpf/sluice-tables-" + rand.Text()[:8]
	r.maps, err = maps.Create(root, maps.Options{Capacities: map[string]uint32{
		maps.NameFrontendIDs: 4096, maps.NameAddrs: 4096,
		maps.NameServicePorts: 64, maps.NameAffinity: 4096, maps.NameUDPPins: 1024, maps.NameRefusals: 4096,
		maps.NameFlows: 8192, maps.NameHalfOpen: 8192, maps.NameUnanswered: 8192, maps.NameFragments: 4096, maps.NameICMPBudgets: 4096,
	}})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	rigOpened = append(rigOpened, r.maps, pins(root))
	// Chunks that are made later, for hash tables, are pinned there again.
	if err := errors.Join(r.maps.Counts.Begin(1), os.RemoveAll(root)); err != nil {
		return nil, err
	}

	return r, r.build()
}

// pins is a folder of pinned maps.
type pins string

// Close implements [io.Closer]: it removes the folder.
func (p pins) Close() error { return os.RemoveAll(string(p)) }

// closeRig closes the rig, if a test made it.
func closeRig() error {
	var errs []error
	if theRig != nil {
		for _, p := range theRig.programs {
			errs = append(errs, p.Close())
		}
	}
	for _, opened := range rigOpened {
		errs = append(errs, opened.Close())
	}

	return errors.Join(errs...)
}

// build makes devices, addresses and routes.
func (r *rig) build() error {
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv6/conf/default/forwarding"} {
		if err := r.node.Sysctl(name, "1"); err != nil {
			return err
		}
	}
	if err := r.node.AddBridge("br0", both("8.0.1.1/24")...); err != nil {
		return err
	}
	for _, device := range []struct {
		name, bridge string
		addresses    []netip.Prefix
	}{
		{"eth0", "", both("8.0.50.1/24")},
		{"eth1", "", both("8.0.51.1/24", "8.0.51.77/24")},
		{"eth2", "", []netip.Prefix{netip.MustParsePrefix("169.254.0.1/16")}},
		{"wg0", "", both("8.0.60.1/24")},
		{"port0", "br0", nil},
		{"port1", "br0", nil},
		{"nic0", "br0", nil},
		{"tap0", "", both("8.0.4.1/32")},
		{"tun0", "", both("8.0.6.1/32")},
		{"cni0", "", both("8.0.9.1/32")},
	} {
		err := lab.Veth(
			lab.End{Namespace: r.node, Device: device.name, Bridge: device.bridge, Addresses: device.addresses},
			lab.End{Namespace: r.outside, Device: device.name})
		if err != nil {
			return err
		}
	}
	for _, name := range []string{"eth0", "eth1", "eth2", "wg0", "br0", "port0", "port1", "nic0", "tap0", "tun0", "cni0"} {
		link, err := r.node.Netlink().LinkByName(name)
		if err != nil {
			return fmt.Errorf("device %s: %w", name, err)
		}
		r.links[name] = link
	}

	return errors.Join(r.addRoutes(), r.addNeighbours())
}

// both returns prefixes of the plan, in both families.
func both(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, ipv4.prefix(text), ipv6.prefix(text))
	}

	return all
}

func (r *rig) addRoutes() error {
	var errs []error
	for _, route := range []struct{ to, via, device, source string }{
		{"0.0.0.0/0", at(defaultRouter).Addr().String(), "eth0", ""},
		{"8.0.2.0/24", at(farRouter).Addr().String(), "eth0", ""},
		{"8.0.3.0/24", at(nodeThree).Addr().String(), "eth1", "8.0.51.77"},
		{"8.0.5.0/24", "169.254.0.9", "eth2", ""},
		{"8.0.110.0/24", "", "wg0", ""},
		{"8.0.4.0/24", "", "tap0", ""},
		{"8.0.6.0/24", "", "tun0", ""},
		{"8.0.9.0/24", "", "cni0", ""},
		{"8.0.120.0/24", "8.0.4.9", "tap0", ""},
		{"8.0.121.0/24", "8.0.1.2", "br0", ""},
	} {
		for _, f := range families {
			to := f.prefix(route.to)
			entry := &netlink.Route{
				LinkIndex: r.links[route.device].Attrs().Index,
				Dst:       &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
			}
			if route.via != "" {
				entry.Gw = f.addr(netip.MustParseAddr(route.via)).AsSlice()
			} else {
				entry.Scope = netlink.SCOPE_LINK
			}
			if route.source != "" {
				entry.Src = f.addr(netip.MustParseAddr(route.source)).AsSlice()
			}
			if err := r.node.Netlink().RouteReplace(entry); err != nil {
				errs = append(errs, fmt.Errorf("route to %s: %w", to, err))
			}
		}
	}
	// No route leads to the pods that cannot be reached.
	for _, f := range families {
		to := f.prefix("8.0.200.0/24")
		errs = append(errs, r.node.Netlink().RouteAdd(&netlink.Route{
			Type: 7, // unreachable
			Dst:  &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
		}))
	}

	return errors.Join(errs...)
}

// macOf returns the Ethernet address of a neighbour, which contains its IPv4 address.
func macOf(a netip.Addr) net.HardwareAddr {
	b := a.As4()

	return net.HardwareAddr{2, 8, b[0], b[1], b[2], b[3]}
}

// neighbours are those that the node knows, by device: the pods behind the bridge, and the routers.
var neighbours = map[string][]string{
	"br0":  {portPod, portPodToo},
	"eth0": {defaultRouter, farRouter},
	"eth1": {nodeThree},
}

// setNeighbours makes the neighbours of a device known to the node, or forgets them.
func (r *rig) setNeighbours(device string, known bool) error {
	var errs []error
	for _, neighbour := range neighbours[device] {
		for _, f := range families {
			neigh := &netlink.Neigh{
				LinkIndex: r.links[device].Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: f.addr(at(neighbour).Addr()).AsSlice(), HardwareAddr: macOf(at(neighbour).Addr()),
			}
			if known {
				errs = append(errs, r.node.Netlink().NeighSet(neigh))
			} else {
				errs = append(errs, r.node.Netlink().NeighDel(neigh))
			}
		}
	}

	return errors.Join(errs...)
}

// addNeighbours makes all neighbours known to the node.
func (r *rig) addNeighbours() error {
	var errs []error
	for device := range neighbours {
		errs = append(errs, r.setNeighbours(device, true))
	}

	return errors.Join(errs...)
}

// mustPrograms loads the programs for a configuration, or returns those that are loaded.
func (r *rig) mustPrograms(t testing.TB, cfg DeviceConfig) *DevicePrograms {
	t.Helper()
	if loaded := r.programs[cfg]; loaded != nil {
		return loaded
	}
	programs, err := LoadDevice(r.maps, cfg)
	if verifier := new(ebpf.VerifierError); errors.As(err, &verifier) {
		t.Fatalf("%+v", verifier)
	}
	lab.Must(t, err)
	r.programs[cfg] = programs

	return programs
}

// empty deletes all entries of the maps.
func (r *rig) empty() error {
	for name, m := range r.maps.Replacements() {
		switch m.Type() {
		case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie, ebpf.PerCPUHash:
		default:
			continue
		}
		for {
			key, err := m.NextKeyBytes(nil)
			if err == nil && key != nil {
				err = m.Delete(key)
			}
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("map %s: %w", name, err)
			}
			if key == nil {
				break
			}
		}
	}
	for id := range uint32(4096) { // there are no more backends
		if load := r.maps.Loads.Load(id); load.Flows != 0 {
			r.maps.Loads.AddFlows(id, -load.Flows)
		}
	}
	for id := range r.maps.Health.All() {
		if err := r.maps.Health.Put(id, maps.BackendHealth{}); err != nil {
			return err
		}
	}
	for kind := range maps.FlowKindCount {
		r.maps.FlowUsage.Add(kind, -r.maps.FlowUsage.Load(kind))
	}
	r.emptySources()
	ports := r.maps.Replacements()["sl_port_filter"]
	perLine := 1 << 16 / int(ports.MaxEntries())
	for port := range 1 << 16 {
		if r.maps.PortFilter.May(uint16(port)) {
			if err := ports.Put(uint32(port/perLine), make([]byte, perLine)); err != nil {
				return fmt.Errorf("map %s: %w", maps.NamePortFilter, err)
			}
		}
	}

	return nil
}

// atLeast reports whether the kernel has at least this version.
func atLeast(t testing.TB, major, minor uint32) bool {
	t.Helper()
	version, err := features.LinuxVersionCode()
	lab.Must(t, err)

	return version >= major<<16|minor<<8
}

// emptySources clears the source filter, as if all flows were long gone.
func (r *rig) emptySources() {
	const later = uint64(time.Hour)
	r.maps.SourceFilter.Begin(maps.Now() + later).End()
}
