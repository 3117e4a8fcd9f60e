package flows

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// world is where a scenario plays:
//
//	┌ node ─────────────────────────────────────────┐
//	│ eth0: localIPs        pods    pod0    pod1    │   forwards
//	└──┊─────────────────────┊───────┊───────┊──────┘
//	   ┊                     ┊ eth0  ┊ eth0  ┊ eth0
//	┌──┊─ elsewhere ─────┐  local   pod 0   pod 1       one for each pod that dials
//	│ node      clients  │
//	│  └── br0 ────┴┊    │
//	│ lo: all others┊    │
//	└───────────────┊────┘
//	                ┊ eth0
//	             clients
//
// An address belongs to the node, to a pod that dials, to the pods of this node
// that only answer, to a client beyond the uplink or, all others, to elsewhere:
// pods of other nodes, and the virtual addresses themselves, so that what was not
// translated is answered, too, with where it went.
//
// A pod that dials has a twin among the clients, as a pod of another node. Routes
// lead to one of them at a time.
type world struct {
	node      *lab.Namespace
	elsewhere *lab.Namespace
	clients   *lab.Namespace
	local     *lab.Namespace

	addresses []netip.Addr        // the node's
	answering map[netip.Addr]bool // of local
	dialling  map[netip.Addr]bool // of clients
	others    map[netip.Addr]bool // of elsewhere
	pods      map[netip.Addr]hop

	nodeToClients, elsewhereToClients, elsewhereToNode hop

	listeners map[*lab.Namespace]map[listener]bool // see mustServe
}

func mustWorld(t *testing.T, s *scenario) *world {
	t.Helper()
	w := &world{
		node:      mustClients(t, "node"),
		elsewhere: lab.MustNamespace(t, "elsewhere"),
		clients:   mustClients(t, "clients"),
		local:     lab.MustNamespace(t, "local"),
		addresses: s.Node.LocalIPs,
		answering: map[netip.Addr]bool{},
		dialling:  map[netip.Addr]bool{},
		others:    map[netip.Addr]bool{},
		pods:      map[netip.Addr]hop{},
		listeners: map[*lab.Namespace]map[listener]bool{},
	}
	err := errors.Join(
		lab.ApplySysctls(w.node),
		// Clients and masquerades are told by their ports, whatever the profile has.
		w.node.Sysctl("net/ipv4/ip_local_port_range", "32768 60999"),
		w.node.Sysctl("net/ipv4/ip_local_reserved_ports", "\n"),
		w.node.Sysctl("net/ipv4/ip_forward", "1"),
		w.node.Sysctl("net/ipv6/conf/all/forwarding", "1"),
		w.addUplink(s.Node.PrimaryIP),
	)
	for _, f := range s.Flows {
		for _, p := range s.paths(f) {
			err = errors.Join(err, w.addClient(t, f.SourceIP, p.from))
		}
	}
	err = errors.Join(err, w.addLocal(s.localEndpoints()), w.addServers(s))
	lab.Must(t, err)
	for ns, listeners := range w.listeners {
		mustServe(t, ns, listeners)
	}

	return w
}

// mustClients returns a namespace in which the port of a client is free when its
// connection ends. Otherwise the kernel holds it for a minute (TIME-WAIT), and flows
// that dial faster than that run out of ports.
func mustClients(t *testing.T, what string) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, what)
	lab.Must(t, ns.Sysctl("net/ipv4/tcp_max_tw_buckets", "0"))

	return ns
}

// addUplink leads the node, elsewhere and the clients to each other.
func (w *world) addUplink(primary netip.Addr) error {
	var addresses []netip.Prefix
	for _, ip := range w.addresses {
		if !ip.IsLoopback() && !slices.Contains(addresses, single(ip)) {
			addresses = append(addresses, single(ip))
		}
	}
	node := lab.End{Namespace: w.node, Device: "eth0", Addresses: addresses}
	clients := lab.End{Namespace: w.clients, Device: "eth0"}
	elsewhere := lab.End{Namespace: w.elsewhere, Device: "br0"}
	err := errors.Join(
		w.elsewhere.AddBridge(elsewhere.Device),
		lab.Veth(node, lab.End{Namespace: w.elsewhere, Device: "node", Bridge: elsewhere.Device}),
		lab.Veth(clients, lab.End{Namespace: w.elsewhere, Device: "clients", Bridge: elsewhere.Device}),
	)
	if err != nil {
		return err
	}
	w.elsewhereToNode = hopTo(elsewhere, node, 1)
	w.elsewhereToClients = hopTo(elsewhere, clients, 3)
	w.nodeToClients = hopTo(node, clients, 3)
	for _, all := range everywhere {
		// What a process of the node sends has the node IP, unless it binds to another.
		var preferred netip.Addr
		if slices.Contains(w.addresses, primary) && primary.Is4() == all.Addr().Is4() {
			preferred = primary
		}
		err = errors.Join(err, hopTo(node, elsewhere, 2).lead(all, preferred))
	}

	return errors.Join(err, w.elsewhereToNode.leadAll(), hopTo(clients, node, 1).leadEven())
}

// addClient adds a client with this address, unless there is one.
func (w *world) addClient(t *testing.T, ip netip.Addr, at place) error {
	t.Helper()
	if _, known := w.pods[ip]; at == inPod && !known {
		h, err := w.attach(mustClients(t, "pod"), fmt.Sprintf("pod%d", len(w.pods)), ip)
		w.pods[ip] = h

		return err
	}
	if at == beyond && !w.dialling[ip] {
		w.dialling[ip] = true

		return errors.Join(w.clients.AddAddress("lo", single(ip)), w.announce(ip, w.home(ip)))
	}

	return nil
}

// addLocal makes pods of this node that only answer: all of them in one namespace.
func (w *world) addLocal(ips []netip.Addr) error {
	for _, ip := range ips {
		if _, dials := w.pods[ip]; !dials {
			w.answering[ip] = true
		}
	}
	_, err := w.attach(w.local, "pods", slices.Collect(maps.Keys(w.answering))...)

	return err
}

// attach leads the node and a pod to each other, and returns the way there.
func (w *world) attach(pod *lab.Namespace, device string, ips ...netip.Addr) (hop, error) {
	there := lab.End{Namespace: pod, Device: "eth0"}
	for _, ip := range ips {
		there.Addresses = append(there.Addresses, single(ip))
	}
	here := lab.End{Namespace: w.node, Device: device}
	h := hopTo(here, there, 4)
	err := errors.Join(lab.Veth(there, here), hopTo(there, here, 1).leadAll())
	for _, ip := range ips {
		err = errors.Join(err, h.leadTo(ip))
	}

	return h, err
}

// home is where a client is when it does not dial.
func (w *world) home(ip netip.Addr) place {
	if _, isPod := w.pods[ip]; isPod {
		return inPod
	}
	if w.dialling[ip] {
		return beyond
	}

	return onNode
}

// announce routes a client's address to the place where it is now. A client beyond the
// uplink can be reached without this node.
func (w *world) announce(ip netip.Addr, at place) error {
	switch at {
	case inPod:
		return errors.Join(w.pods[ip].leadTo(ip), w.elsewhereToNode.lead(single(ip), netip.Addr{}))
	case beyond:
		return errors.Join(w.nodeToClients.lead(single(ip), netip.Addr{}), w.elsewhereToClients.lead(single(ip), netip.Addr{}))
	}

	return nil
}

func (w *world) mustAnnounce(t *testing.T, ip netip.Addr, at place) {
	t.Helper()
	lab.Must(t, w.announce(ip, at))
}

// start is the namespace in which a flow starts.
func (w *world) start(f flow, at place) *lab.Namespace {
	switch at {
	case inPod:
		return w.pods[f.SourceIP].to.Namespace
	case beyond:
		return w.clients
	}

	return w.node
}

// sourceTo is what the node's kernel sends to an address with.
func (w *world) sourceTo(ip netip.Addr) netip.Addr {
	routes, err := w.node.Netlink().RouteGet(ip.AsSlice())
	if err != nil || len(routes) == 0 {
		return netip.Addr{}
	}
	source, _ := netip.AddrFromSlice(routes[0].Src)

	return source.Unmap()
}

// portsOfWorld is how many ports of clients are used in one world, unless a single
// flow needs more. So many flows fit into the tables of an agent of a test. What
// Sluice and the kernel know of them ends with the world: no port is used twice.
const portsOfWorld = 4000

// clientPorts are those that a client beyond a device may have: not privileged, no
// node ports, none that the kernel hands out, and none where a server may listen.
func (s *scenario) clientPorts() []uint16 {
	const last, handedOut, nodePorts, privileged = 65535, 60999, 30000, 1023
	serves := map[uint16]bool{}
	for _, target := range s.targets() {
		serves[target.Port()] = true
	}
	for _, f := range s.Flows {
		serves[f.DestPort] = true
	}
	var ports []uint16
	for port := uint16(last); port > privileged; port-- {
		if (port < nodePorts || port > handedOut) && !serves[port] {
			ports = append(ports, port)
		}
	}

	return ports
}

// parts divides a scenario by its flows, in their order: each part is the whole
// scenario with some of them, which need at most so many ports. One that needs more
// is a part of its own.
func (s *scenario) parts(ports int) []scenario {
	part, room := *s, ports
	part.Flows = nil
	var parts []scenario
	for _, f := range s.Flows {
		need := s.portsFor(f)
		if need > room && len(part.Flows) > 0 {
			parts = append(parts, part)
			part.Flows, room = nil, ports
		}
		part.Flows = append(part.Flows, f)
		room -= need
	}

	return append(parts, part)
}

// portsFor is how many ports a flow needs: one for each attempt whose packets come
// by a device.
func (s *scenario) portsFor(f flow) int {
	need := 0
	for _, p := range s.paths(f) {
		if !p.socket {
			need += attempts(len(s.expect(f, p).outcomes))
		}
	}

	return need
}
