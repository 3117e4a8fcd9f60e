// Package connections lists the connections that Sluice translated at a socket of this node, with the
// pod and the process that has each open, and ends them. It needs no agent.
//
// A connection is a TCP socket or a connected UDP socket, or one destination of a UDP socket that sends
// without connecting. What devices translate is in package flow.
package connections

import (
	"cmp"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/pods"
)

// Connection is one connection from a socket of this node to a backend.
type Connection struct {
	Service  string `json:"service"` // namespace/name:port
	Protocol string `json:"protocol"`
	// Client is the address of the socket in its network namespace.
	Client netip.AddrPort `json:"client"`
	// Pod is NAMESPACE/NAME of the pod whose process made the socket, and PodUID its UID. Both are empty
	// if it is not a pod's; Pod also if the node does not know the pod's name.
	Pod    string `json:"pod,omitempty"`
	PodUID string `json:"podUID,omitempty"`
	// Process is the one with the lowest number that has the socket open; nil if none has, or if this
	// process may not see it.
	Process     *Process       `json:"process,omitempty"`
	OriginalDst netip.AddrPort `json:"originalDst"`
	Backend     netip.AddrPort `json:"backend"`
	// State is one of [States]: of TCP as `ss` names it.
	State string `json:"state"`
	// AgeSeconds is the time since the socket connected; nil in state [Unconnected], and if a build that
	// recorded no times translated it.
	AgeSeconds *int64 `json:"ageSeconds,omitempty"`
	// IdleSeconds is the time since the last datagram, in state [Unconnected] only.
	IdleSeconds *int64 `json:"idleSeconds,omitempty"`
	TCP         *TCP   `json:"tcp,omitempty"` // nil for UDP, of which the kernel counts nothing
	// Cookie is the kernel's number of the socket, and Netns the inode number of its network namespace.
	Cookie uint64 `json:"cookie"`
	Netns  uint32 `json:"netns"`

	sock maps.TranslatedSock
}

// Process is a process that has a socket open.
type Process struct {
	PID     int    `json:"pid"`
	Command string `json:"command"` // as in /proc/PID/comm
}

// TCP is what the kernel counts of a TCP socket.
type TCP struct {
	BytesSent     uint64 `json:"bytesSent"` // without retransmissions
	BytesReceived uint64 `json:"bytesReceived"`
	Retransmits   uint32 `json:"retransmits"`
	// RTTMicroseconds is the smoothed round-trip time, zero before the first measurement.
	RTTMicroseconds uint32 `json:"rttMicroseconds"`
}

// The states of UDP sockets.
const (
	Connected   = "connected"
	Unconnected = "unconnected"
)

// tcpStates are the states of TCP by the kernel's number.
var tcpStates = [...]string{
	1: "established", 2: "syn-sent", 3: "syn-recv", 4: "fin-wait-1", 5: "fin-wait-2", 6: "time-wait",
	7: "closed", 8: "close-wait", 9: "last-ack", 10: "listen", 11: "closing",
}

// States returns the states that a connection can have.
func States() []string {
	states := slices.Clone(tcpStates[1:])
	states = slices.DeleteFunc(states, func(s string) bool {
		return s == "syn-recv" || s == "time-wait" || s == "closed" || s == "listen"
	})

	return append(states, Connected, Unconnected)
}

// Filter selects connections. What is empty selects all.
type Filter struct {
	Service string // namespace/name
	Pod     string // NAMESPACE/NAME, NAME or UID
	Backend string // address, or address:port
	Client  string // address, or address:port
	State   string
	Cookie  uint64
}

// Validate returns an error that names the field that cannot be used.
func (f Filter) Validate() error {
	for name, at := range map[string]string{"backend": f.Backend, "client": f.Client} {
		_, addrErr := netip.ParseAddr(at)
		_, portErr := netip.ParseAddrPort(at)
		if at != "" && addrErr != nil && portErr != nil {
			return fmt.Errorf("%s %q: it is neither ADDRESS nor ADDRESS:PORT", name, at)
		}
	}
	if f.State != "" && !slices.Contains(States(), f.State) {
		return fmt.Errorf("state %q: it is one of %s", f.State, strings.Join(States(), ", "))
	}

	return nil
}

// List returns the connections that the filter selects, in no order. It finds their pods where node says.
func List(pinned *maps.Pinned, node pods.Config, filter Filter) ([]Connection, error) {
	if err := filter.Validate(); err != nil {
		return nil, err
	}
	sockets, err := datapath.OpenSockets()
	if err != nil {
		return nil, err
	}
	defer sockets.Close()
	socks, err := sockets.All(pinned)
	if err != nil {
		return nil, err
	}
	if socks, err = addPinned(pinned, socks); err != nil {
		return nil, err
	}
	ports, err := maps.Collect(pinned.ServicePorts.All())
	if err != nil {
		return nil, err
	}
	now := maps.Now()
	all := []Connection{}
	for _, sock := range socks {
		port, known := ports[sock.State.ServicePortId]
		c := connectionOf(sock, now)
		c.Service = fmt.Sprintf("id %d", sock.State.ServicePortId) // of a deleted Service
		service := ""
		if known {
			c.Service, service = port.String(), port.Service()
		}
		if filter.admits(c, service) {
			all = append(all, c)
		}
	}
	if err := describeOwners(all, node, filter.Pod); err != nil {
		return nil, err
	}

	return slices.DeleteFunc(all, func(c Connection) bool {
		return filter.Pod != "" && !pods.Pod{Name: c.Pod, UID: c.PodUID}.Is(filter.Pod)
	}), nil
}

// addPinned adds the destinations of unconnected UDP sockets that these have no room for.
func addPinned(tables *maps.Pinned, socks []maps.TranslatedSock) ([]maps.TranslatedSock, error) {
	pinned := make(map[uint64]maps.TranslatedSock)
	for _, sock := range socks {
		if sock.Pinned != 0 {
			pinned[sock.Cookie] = sock
		}
	}
	if len(pinned) == 0 {
		return socks, nil
	}
	for e, err := range tables.UDPPins.All() {
		if err != nil {
			return nil, err
		}
		sock, ok := pinned[e.Key.Cookie]
		if !ok || e.Key.Way != maps.UDPPinSend {
			continue
		}
		sock.State = maps.SockState{
			OriginalDst: e.Key.Addr, OriginalPort: e.Key.Port, Backend: e.Value.Addr, BackendPort: e.Value.Port,
			ServicePortId: e.Value.ServicePortId, BackendId: e.Value.BackendId,
		}
		sock.LastUsed = e.Value.LastUsed
		socks = append(socks, sock)
	}

	return socks, nil
}

// connectionOf returns what a socket itself shows of its connection.
func connectionOf(sock maps.TranslatedSock, now uint64) Connection {
	c := Connection{
		Client:      addrPort(sock.Source, sock.SourcePort),
		OriginalDst: addrPort(sock.State.OriginalDst, sock.State.OriginalPort),
		Backend:     addrPort(sock.State.Backend, sock.State.BackendPort),
		Cookie:      sock.Cookie, Netns: sock.Netns, sock: sock,
	}
	if sock.State.Since != 0 {
		c.AgeSeconds = new(int64(since(sock.State.Since, now) / time.Second))
	}
	switch {
	case sock.Proto == unix.IPPROTO_TCP:
		c.Protocol, c.State = "TCP", fmt.Sprintf("state %d", sock.TcpState)
		if int(sock.TcpState) < len(tcpStates) {
			c.State = tcpStates[sock.TcpState]
		}
		c.TCP = &TCP{sock.BytesSent, sock.BytesReceived, sock.Retransmits, sock.Rtt}
	case sock.LastUsed != 0:
		c.Protocol, c.State = "UDP", Unconnected
		c.IdleSeconds = new(int64(since(sock.LastUsed, now) / time.Second))
	default:
		c.Protocol, c.State = "UDP", Connected
	}

	return c
}

// since returns how much later now is than then, zero if it is earlier: the clock was read before.
func since(then, now uint64) time.Duration { return time.Duration(now - min(then, now)) }

func addrPort(a maps.Addr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.IP(), maps.Port(port))
}

// admits reports whether the filter, without its pod, selects a connection of a Service.
func (f Filter) admits(c Connection, service string) bool {
	is := func(at netip.AddrPort, want string) bool {
		if addr, err := netip.ParseAddr(want); err == nil {
			return at.Addr() == addr.Unmap()
		}
		addrPort, _ := netip.ParseAddrPort(want)

		return want == "" || at == netip.AddrPortFrom(addrPort.Addr().Unmap(), addrPort.Port())
	}

	return (f.Service == "" || service == f.Service) && (f.State == "" || c.State == f.State) &&
		(f.Cookie == 0 || c.Cookie == f.Cookie) && is(c.Backend, f.Backend) && is(c.Client, f.Client)
}

// connected returns when the socket connected; what has no such time comes last.
func (c Connection) connected() uint64 { return c.sock.State.Since - 1 }

// orders are the ways to sort connections: what an operator looks for comes first.
var orders = map[string]func(a, b Connection) int{
	"service":     func(a, b Connection) int { return cmp.Compare(a.Service, b.Service) },
	"pod":         func(a, b Connection) int { return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.PodUID, b.PodUID)) },
	"backend":     func(a, b Connection) int { return a.Backend.Compare(b.Backend) },
	"state":       func(a, b Connection) int { return cmp.Compare(a.State, b.State) },
	"age":         func(a, b Connection) int { return cmp.Compare(a.connected(), b.connected()) },
	"sent":        func(a, b Connection) int { return cmp.Compare(b.sock.BytesSent, a.sock.BytesSent) },
	"received":    func(a, b Connection) int { return cmp.Compare(b.sock.BytesReceived, a.sock.BytesReceived) },
	"retransmits": func(a, b Connection) int { return cmp.Compare(b.sock.Retransmits, a.sock.Retransmits) },
	"rtt":         func(a, b Connection) int { return cmp.Compare(b.sock.Rtt, a.sock.Rtt) },
}

// Orders returns the keys by which [Sort] sorts.
func Orders() []string { return slices.Sorted(stdmaps.Keys(orders)) }

// Sort sorts connections by one of [Orders], then by Service, client and original destination.
func Sort(all []Connection, order string) {
	slices.SortFunc(all, func(a, b Connection) int {
		return cmp.Or(orders[order](a, b), cmp.Compare(a.Service, b.Service), a.Client.Compare(b.Client),
			a.OriginalDst.Compare(b.OriginalDst), cmp.Compare(a.Cookie, b.Cookie))
	})
}

// CanKill returns an error if a connection cannot be ended, as that of a UDP socket that is not connected: to destroy
// the socket would end what else it sends and receives.
func (c Connection) CanKill() error {
	if c.State == Unconnected {
		return errors.New("an unconnected UDP socket has no connection to end")
	}

	return nil
}

// Kill ends connections that [List] has returned: their processes get ECONNABORTED, and the backends
// of TCP a reset. It returns how many it ended, also next to an error; those that ended meanwhile are not
// among them.
func Kill(all []Connection) (int, error) {
	var socks []maps.TranslatedSock
	for _, c := range all {
		if err := c.CanKill(); err != nil {
			return 0, fmt.Errorf("connection of %s to %s: %w", c.Client, c.OriginalDst, err)
		}
		socks = append(socks, c.sock)
	}

	return datapath.DestroySocks(socks)
}
