package node

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/pods"
)

// Way is how this node sends packets to an address.
type Way struct {
	// Local is set if the address is this node's. The rest is empty then.
	Local bool
	// Device is the one by which packets leave, as the stack sees it.
	Device string
	index  int
	// Gateway is the next hop, invalid if the address itself is.
	Gateway netip.Addr
	// Source is the address that this node sends from.
	Source netip.Addr
	// Neighbour is the state of the next hop in the kernel's words, "none" if the kernel has not
	// asked for it yet, and empty if the device needs no neighbours.
	Neighbour string
}

// neighbourStates are the kernel's states of neighbours, as ip-neighbour(8) names them.
var neighbourStates = map[int]string{
	netlink.NUD_INCOMPLETE: "incomplete", netlink.NUD_REACHABLE: "reachable", netlink.NUD_STALE: "stale", netlink.NUD_DELAY: "delay",
	netlink.NUD_PROBE: "probe", netlink.NUD_FAILED: "failed", netlink.NUD_NOARP: "noarp", netlink.NUD_PERMANENT: "permanent", netlink.NUD_NONE: "none",
}

// WayTo returns how the calling thread's network namespace sends packets to an address. The error
// wraps that of the kernel if there is no route.
func WayTo(to netip.Addr) (Way, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return Way{}, fmt.Errorf("route to %s: %w", to, err)
	}
	route := routes[0]
	if route.Type == unix.RTN_LOCAL {
		return Way{Local: true}, nil
	}
	link, err := netlink.LinkByIndex(route.LinkIndex)
	if err != nil {
		return Way{}, fmt.Errorf("device of the route to %s: %w", to, err)
	}
	way := Way{Device: link.Attrs().Name, index: route.LinkIndex}
	way.Source, _ = netip.AddrFromSlice(route.Src)
	way.Source = way.Source.Unmap()
	next := to
	if gateway, ok := netip.AddrFromSlice(route.Gw); ok {
		way.Gateway = gateway.Unmap()
		next = way.Gateway
	}
	if len(link.Attrs().HardwareAddr) == 0 {
		return way, nil
	}
	way.Neighbour = neighbourStates[netlink.NUD_NONE]
	if neighbour, err := neighbourAt(route.LinkIndex, next); err != nil {
		return way, err
	} else if neighbour != nil {
		way.Neighbour = neighbourStates[neighbour.State]
	}

	return way, nil
}

// neighbourAt returns the neighbour with this address, or nil if the kernel has none.
func neighbourAt(device int, addr netip.Addr) (*netlink.Neigh, error) {
	family := unix.AF_INET
	if addr.Is6() {
		family = unix.AF_INET6
	}
	neighbours, err := Complete(func() ([]netlink.Neigh, error) { return netlink.NeighList(device, family) })
	if err != nil {
		return nil, fmt.Errorf("neighbours: %w", err)
	}
	for i := range neighbours {
		if ip, ok := netip.AddrFromSlice(neighbours[i].IP); ok && ip.Unmap() == addr {
			return &neighbours[i], nil
		}
	}

	return nil, nil
}

// Arrival is the device on which packets of a client arrive.
type Arrival struct {
	Index int
	Name  string
	MAC   net.HardwareAddr
	// Stack is the device of which the network stack gets the packets: the bridge, for one of its ports.
	Stack string
	// Down is set if no packets pass the device: it, or the other end of the pair, is down.
	Down bool
	// RPFilter is the filter of reverse paths that is in force for IPv4: 0 off, 1 strict, 2 loose.
	RPFilter int
	// peer is the number that the kernel gives to the network namespace of the device's other end,
	// or -1 if there is none.
	peer int
}

// ArrivalAt returns a device by its name.
func ArrivalAt(device string) (Arrival, error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return Arrival{}, fmt.Errorf("device %s: %w", device, err)
	}

	return arrivalOf(link)
}

// ArrivalOf returns the device by which this node reaches a client. If that is a bridge, it is the
// port behind which the bridge has seen the client.
func ArrivalOf(client netip.Addr) (Arrival, error) {
	way, err := WayTo(client)
	if err != nil {
		return Arrival{}, err
	}
	link, err := netlink.LinkByIndex(way.index)
	if err != nil {
		return Arrival{}, fmt.Errorf("device %s: %w", way.Device, err)
	}
	if link.Type() != "bridge" {
		return arrivalOf(link)
	}
	port, err := portOf(way.index, client)
	if err != nil {
		return Arrival{}, fmt.Errorf("port of bridge %s: %w", way.Device, err)
	}
	if port == nil {
		return Arrival{}, fmt.Errorf("bridge %s has not seen %s behind any of its ports", way.Device, client)
	}

	return arrivalOf(port)
}

// portOf returns the port of a bridge behind which a client is: by what the bridge has learnt or, if
// it has not seen the client lately, by the network namespace at the other end of the port. It
// returns nil if there is none.
func portOf(bridge int, client netip.Addr) (netlink.Link, error) {
	neighbour, err := neighbourAt(bridge, client)
	if err != nil {
		return nil, err
	}
	learnt, err := Complete(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return nil, err
	}
	for _, n := range learnt {
		if neighbour != nil && n.MasterIndex == bridge && n.HardwareAddr.String() == neighbour.HardwareAddr.String() {
			return netlink.LinkByIndex(n.LinkIndex)
		}
	}
	links, err := Complete(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	ports := make(map[int]netlink.Link) // by the namespace of their peers
	for _, link := range links {
		if attrs := link.Attrs(); attrs.MasterIndex == bridge && attrs.NetNsID >= 0 {
			ports[attrs.NetNsID] = link
		}
	}
	var port netlink.Link
	err = EachNamespace(func(_ uint64, ns netns.NsHandle) (bool, error) {
		id, err := netlink.GetNetNsIdByFd(int(ns))
		if err != nil || ports[id] == nil {
			return false, err
		}
		has := false
		err = InNamespace(ns, func() (err error) { has, err = hasAddress(client); return err })
		if has {
			port = ports[id]
		}

		return has, err
	})

	return port, err
}

func arrivalOf(link netlink.Link) (Arrival, error) {
	attrs := link.Attrs()
	a := Arrival{Index: attrs.Index, Name: attrs.Name, MAC: attrs.HardwareAddr, peer: attrs.NetNsID, Stack: attrs.Name}
	a.Down = attrs.RawFlags&unix.IFF_UP == 0 || attrs.OperState == netlink.OperDown || attrs.OperState == netlink.OperLowerLayerDown
	if attrs.MasterIndex != 0 {
		master, err := netlink.LinkByIndex(attrs.MasterIndex)
		if err != nil {
			return a, fmt.Errorf("master of %s: %w", a.Name, err)
		}
		if master.Type() == "bridge" {
			a.Stack = master.Attrs().Name
		}
	}
	for _, device := range []string{"all", attrs.Name} {
		filter, err := ReadNumber("/proc/sys/net/ipv4/conf/" + device + "/rp_filter")
		if err != nil {
			return a, err
		}
		a.RPFilter = max(a.RPFilter, filter)
	}

	return a, nil
}

// Namespace is the network namespace of a pod, as its processes show it.
type Namespace struct {
	Inode  uint64
	PodUID string // by the name of the pod's cgroup, empty if no process shows it
	// Mesh is the chain by which a service mesh redirects what the pod sends to a proxy, empty if none is seen.
	Mesh string
}

// Namespace returns the network namespace of the client with this address behind the device, which is another
// one than the calling thread's, and false if it is not there. It is the one at the other end of the device, or
// the one that has the address.
func (a Arrival) Namespace(client netip.Addr) (found Namespace, has bool, err error) {
	own, err := NetnsInode()
	if err != nil {
		return found, false, err
	}
	err = EachNamespace(func(inode uint64, ns netns.NsHandle) (bool, error) {
		if inode == own {
			return false, nil
		}
		if a.peer >= 0 {
			if id, err := netlink.GetNetNsIdByFd(int(ns)); err != nil || id != a.peer {
				return false, err
			}
		}
		err := InNamespace(ns, func() (err error) {
			if has = a.peer >= 0; !has {
				has, err = hasAddress(client)
			}
			if has && err == nil {
				found.Mesh = meshChain()
			}

			return err
		})
		if has && err == nil {
			found.Inode = inode
			found.PodUID, err = podIn(inode)
		}

		return has, err
	})

	return found, has, err
}

// OtherNamespaces calls visit with each network namespace but the calling thread's that this process may enter, and
// with the routes there.
func OtherNamespaces(visit func(of Namespace, routes []Route)) error {
	own, err := NetnsInode()
	if err != nil {
		return err
	}

	return EachNamespace(func(inode uint64, ns netns.NsHandle) (bool, error) {
		if inode == own {
			return false, nil
		}
		of := Namespace{Inode: inode}
		var routes []Route
		err := InNamespace(ns, func() (err error) {
			of.Mesh = meshChain()
			routes, err = Routes()

			return err
		})
		if err != nil {
			return false, err
		}
		of.PodUID, err = podIn(inode)
		visit(of, routes)

		return false, err
	})
}

// meshPrefixes begin the names of the chains by which meshes redirect what pods send.
var meshPrefixes = []string{"ISTIO_OUTPUT", "PROXY_INIT_OUTPUT", "KUMA_MESH_OUTBOUND", "KUMA_OUTBOUND", "OSM_PROXY_OUTBOUND"}

// meshChain returns the chain of a mesh in the calling thread's network namespace, or "" if none is seen.
func meshChain() string {
	netfilter, err := ReadNetfilter()
	if err != nil {
		return ""
	}
	for _, chain := range netfilter.Chains {
		if slices.ContainsFunc(meshPrefixes, func(p string) bool { return strings.HasPrefix(chain.Name, p) }) {
			return chain.String()
		}
	}

	return ""
}

// ForwardingOff returns the sysctl by which the kernel forwards no packets of a family that it gets by a device, and ""
// if it forwards them.
func ForwardingOff(device string, v6 bool) (string, error) {
	sysctls := []string{"net/ipv4/ip_forward", "net/ipv4/conf/" + device + "/forwarding"}
	if v6 {
		sysctls = []string{"net/ipv6/conf/all/forwarding"}
	}
	for _, sysctl := range sysctls {
		value, err := ReadNumber("/proc/sys/" + sysctl)
		if err != nil || value == 0 {
			return strings.ReplaceAll(sysctl, "/", "."), err
		}
	}

	return "", nil
}

// podIn returns the UID of the pod of a process in the network namespace with this inode, empty if there is none.
func podIn(namespace uint64) (string, error) {
	processes, err := filepath.Glob(namespacesOfProcesses)
	if err != nil {
		return "", err
	}
	for _, process := range processes {
		if inode, err := inodeOf(process); err != nil || inode != namespace {
			continue
		}
		cgroups, err := os.ReadFile(strings.TrimSuffix(process, "ns/net") + "cgroup")
		if err != nil {
			continue // it has ended
		}
		if uid := pods.UIDIn(string(cgroups)); uid != "" {
			return uid, nil
		}
	}

	return "", nil
}

// hasAddress reports whether the calling thread's network namespace has an address.
func hasAddress(addr netip.Addr) (bool, error) {
	addrs, err := net.InterfaceAddrs()
	for _, a := range addrs {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr() == addr {
			return true, nil
		}
	}

	return false, err
}
