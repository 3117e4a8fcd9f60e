package datapath

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// fairFlows is how many flows begin in each state of a row of [TestFairAtSockets]: of five backends, one that gets nothing, or
// three times its share, is seen ([lab.CheckShares]).
const fairFlows = 400

// fairBackends is how many backends a service has there: the colours, and two of them at another port.
const fairBackends = 5

// addClients gives the client pod n addresses of each family, and returns the first ones.
func (w *world) addClients(t *testing.T, n int) (first [2]netip.Addr) {
	t.Helper()
	const ofDevice = 14 // a device with many would make any address one of the pod
	for f, prefix := range []string{"10.78.0.0/16", "fd00:78::/64"} {
		network := netip.MustParsePrefix(prefix)
		lab.Must(t, w.node.AddRoute(network, []netip.Addr{w.client.IPv4, w.client.IPv6}[f]))
		first[f] = network.Addr().Next()
		for i, ip := 0, first[f]; i < n; i, ip = i+1, ip.Next() {
			device := fmt.Sprintf("clients%d", i/ofDevice)
			if f == 0 && i%ofDevice == 0 {
				bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: device}}
				lab.Must(t, w.client.Netlink().LinkAdd(bridge), w.client.Netlink().LinkSetUp(bridge))
			}
			lab.Must(t, w.client.AddAddress(device, netip.PrefixFrom(ip, ip.BitLen())))
		}
	}

	return first
}

// balanceMany publishes a service of five backends at n addresses, one after the other, for a way to dial it.
func (w *world) balanceMany(t *testing.T, way way, algorithm uint8, n int) balanced {
	t.Helper()
	s := service{proto: way.network[:3], algorithm: algorithm}
	for i := range fairBackends {
		pod := w.answers[i%len(w.answers)]
		port := uint16(serverPort + i/len(w.answers))
		s.to = append(s.to, netip.AddrPortFrom(way.ofFamily(pod.IPv4, pod.IPv6), port).String())
	}
	vip := way.ofFamily(netip.AddrFrom4([4]byte{10, 97, byte(2 * w.balanced), 1}), netip.AddrFrom16([16]byte{0xfd, 3: 0x97, 13: byte(w.balanced), 15: 1}))
	for range n {
		s.at = append(s.at, netip.AddrPortFrom(vip, 80).String())
		vip = vip.Next()
	}
	w.balanced++

	return balanced{w.add(t, s), w, way}
}

// begin has n flows begin, one after the other, and returns the backend of each. Each is to another one of the service's
// addresses, as far as there are several, and from another client: the first one and those after it, or what the kernel chooses.
func (b balanced) begin(t *testing.T, n int, client netip.Addr) (got []uint32) {
	t.Helper()
	call := "connect"
	if b.way.unconnected {
		call = "sendto"
	}
	from := ""
	if client.IsValid() {
		from = client.String()
	}
	played := b.w.play(t, b.w.client.Namespace, "exchange", strconv.Itoa(n), b.way.network[:3], call, b.at[0], strconv.Itoa(len(b.at)), from)
	for _, backend := range strings.Fields(played) {
		i := slices.Index(b.to, backend)
		if i < 0 {
			t.Fatalf("the scene says %q", played[max(0, len(played)-200):])
		}
		got = append(got, b.backends[i])
	}
	if len(got) != n {
		t.Fatalf("there were %d flows, want %d", len(got), n)
	}

	return got
}

// sharesBeside are the shares of backends with these loads, of which one is a suspect: who would get that gets another one, by
// the algorithm if it compares loads, else any.
func sharesBeside(algorithm uint8, loads []int32, suspect int) []float64 {
	shares, others, avoided := mapstest.Shares(algorithm, loads), lab.Even(len(loads)-1), slices.Clone(loads)
	others = slices.Insert(others, suspect, 0)
	if algorithm >= maps.AlgorithmLC && algorithm <= maps.AlgorithmNQ {
		avoided[suspect] = math.MaxInt32
		others = mapstest.Shares(algorithm, avoided)
	}
	lost := shares[suspect]
	shares[suspect] = 0
	for i := range shares {
		shares[i] += lost * others[i]
	}

	return shares
}

// suspectFor makes a backend a suspect that gets no probe meanwhile.
func (w *world) suspectFor(t *testing.T, id uint32) {
	t.Helper()
	now, hour := monotonic(t), uint64(time.Hour)
	lab.Must(t, w.Maps().Health.Put(maps.Index(id), maps.BackendHealth{Id: id, Suspected: now, Until: now + hour, Level: 1}))
}

// Each algorithm gives every backend its share of what begins at sockets: connections and datagrams, in both families, when
// a backend has left, when it is back, and beside a suspect. Hashed ones go by the address of the client, or of the VIP;
// round robin counts.
func TestFairAtSockets(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Heal = true })
	for i, pod := range w.answers[:fairBackends-len(w.answers)] {
		lab.MustServe(t, pod.Namespace, colours[i], pod.At(serverPort+1)...)
	}
	clients := w.addClients(t, fairFlows)
	idle := make([]int32, fairBackends)
	for _, row := range []struct {
		name      string
		algorithm uint8
		loads     []int32
	}{
		{"random", maps.AlgorithmRandom, idle},
		{"rr", maps.AlgorithmRR, idle},
		{"lc, all idle", maps.AlgorithmLC, idle},
		{"lc, two busy ones", maps.AlgorithmLC, []int32{9, 0, 3, 0, 0}},
		{"sed, all idle", maps.AlgorithmSED, idle},
		{"sed, two busy ones", maps.AlgorithmSED, []int32{0, 9, 9, 0, 0}},
		{"sed, all busy", maps.AlgorithmSED, []int32{9, 7, 7, 7, 8}},
		{"nq, all idle", maps.AlgorithmNQ, idle},
		{"nq, two busy ones", maps.AlgorithmNQ, []int32{0, 1, 1, 0, 0}},
		{"sh", maps.AlgorithmSH, idle},
		{"dh", maps.AlgorithmDH, idle},
		{"maglev", maps.AlgorithmMaglev, idle},
	} {
		for _, way := range ways {
			t.Run(row.name+", "+way.name, func(t *testing.T) {
				vips, client := 1, netip.Addr{}
				switch row.algorithm {
				case maps.AlgorithmSH:
					client = way.ofFamily(clients[0], clients[1])
				case maps.AlgorithmDH:
					vips = fairFlows
				}
				b := w.balanceMany(t, way, row.algorithm, vips)
				for i, load := range row.loads {
					w.Maps().Loads.AddFlows(b.backends[i], load)
				}
				for _, state := range []struct {
					name    string
					left    int // how many backends have left
					suspect int // which backend is one, -1 for none
				}{{"one has left", 1, -1}, {"it is back", 0, -1}, {"one is a suspect", 0, fairBackends - 1}} {
					members, loads := b.backends[state.left:], row.loads[state.left:]
					w.publish(t, b.service, members...)
					shares, suspect := mapstest.Shares(row.algorithm, loads), uint32(0)
					if state.suspect >= 0 {
						if !w.Features().Tracing {
							continue // this kernel shows of no backend that it does not answer
						}
						suspect, shares = members[state.suspect], sharesBeside(row.algorithm, loads, state.suspect)
						w.suspectFor(t, suspect)
					}
					counts, hashed := make([]int, len(members)), client
					for i, got := range b.begin(t, fairFlows, client) {
						counts[slices.Index(members, got)]++
						if row.algorithm == maps.AlgorithmDH {
							hashed = netip.MustParseAddrPort(b.at[i]).Addr()
						}
						if hashed.IsValid() && got != b.hashedTo(hashed) && b.hashedTo(hashed) != suspect {
							t.Fatalf("%s: %s leads to backend %d, want that of its hash", state.name, hashed, got)
						}
						if client.IsValid() {
							hashed = hashed.Next()
						}
					}
					lab.MustBeFair(t, state.name, counts, shares)
					differ := 1
					if way.network[:3] == "udp" && !way.unconnected {
						differ = 2 // parts of two rounds, each of which begins with another backend
					}
					if row.algorithm == maps.AlgorithmRR && suspect == 0 && slices.Max(counts)-slices.Min(counts) > differ {
						t.Errorf("%s: rr gives %v, want the same to each", state.name, counts)
					}
				}
			})
		}
	}
}

// sceneExchange asks args[0] times, on a socket of args[1] (tcp or udp) each, by connect() or sendto() as args[2] says, and
// prints which address has answered. It asks args[4] addresses in turn, from args[3] on, and each time from the next
// address from args[5] on, if that is not "".
func sceneExchange(args []string) (string, error) {
	n, _ := strconv.Atoi(args[0])
	first, _ := netip.ParseAddrPort(args[3])
	count, _ := strconv.Atoi(args[4])
	from, _ := netip.ParseAddr(args[5])
	kind := map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM}[args[1]]
	var answers strings.Builder
	at := first
	for i := range n {
		if i%count == 0 {
			at = first
		}
		answer, err := exchange(kind, args[2] == "connect", from, at)
		if err != nil {
			return answers.String() + at.String() + ": ", err
		}
		fmt.Fprintln(&answers, answer.Local)
		at = netip.AddrPortFrom(at.Addr().Next(), at.Port())
		if from.IsValid() {
			from = from.Next()
		}
	}

	return answers.String(), nil
}

// exchange asks once, from an address unless that is not valid.
func exchange(kind int, connects bool, from netip.Addr, at netip.AddrPort) (answer lab.Answer, err error) {
	to := sockaddr(at.String())
	fd, err := unix.Socket(family(at.String()), kind, 0)
	if err != nil {
		return answer, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		return answer, err
	}
	if from.IsValid() {
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0).String())); err != nil {
			return answer, err
		}
	}
	if connects {
		if err := unix.Connect(fd, to); err != nil {
			return answer, err
		}
		to = nil
	}
	if err := unix.Sendto(fd, []byte("who\n"), 0, to); err != nil {
		return answer, err
	}
	b := make([]byte, 200)
	size, err := unix.Read(fd, b)
	for err == unix.EINTR { // Go's own signals: the kernel resumes no call that has a timeout
		size, err = unix.Read(fd, b)
	}
	if err != nil {
		return answer, err
	}

	return lab.ParseAnswer(string(b[:size]))
}
