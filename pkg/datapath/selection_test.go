package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

var extentSizes = []int{1, 2, 3, 1000, 10000}

// addLarge publishes a UDP service with n backends that need not exist: connects of UDP
// sockets send nothing.
func (w *world) addLarge(t testing.TB, n int, s service) *service {
	t.Helper()
	format := "10.250.%d.%d:53"
	if family(s.at[0]) == unix.AF_INET6 {
		format = "[fd00:250::%x:%x]:53"
	}
	for i := range n {
		s.to = append(s.to, fmt.Sprintf(format, i/250, i%250+1))
	}
	s.proto = "udp"

	return w.add(t, s)
}

// Every slot is chosen equally often.
func TestRandomSelection(t *testing.T) {
	w := newWorld(t)
	const connects = 10000
	for i, size := range extentSizes {
		t.Run(fmt.Sprintf("uniform over %d slots", size), func(t *testing.T) {
			at := fmt.Sprintf("10.96.0.%d:53", i+1)
			s := w.addLarge(t, size, service{at: []string{at}})
			many := w.start(t, w.client.Namespace, "connect many", at, strconv.Itoa(connects))
			many.line(t)
			chosen := w.chosen(t, s)
			many.rest(t)

			counts, total := make([]int, size), 0
			for i, id := range s.backends {
				counts[i] = chosen[id]
				total += chosen[id]
			}
			if total != connects {
				t.Fatalf("%d of %d sockets have a backend of the service", total, connects)
			}
			lab.MustBeFair(t, "of connect()", counts, lab.Even(size))
		})
	}
}

// A program that dials a name connects a UDP socket to each address first, to sort them (RFC 6724), and sends
// nothing: round robin gives its connections to all backends all the same.
func TestSortedNames(t *testing.T) {
	w := newWorld(t)
	const sockets = 200
	for i, row := range []struct {
		way, format string
		less        int // than half of the sockets, at most, for one of two backends: parts of rounds
	}{
		{"connect", "10.96.0.%d:53", 2}, {"send", "10.96.0.%d:53", 0},
		{"connect", "[fd00:96::%x]:53", 2}, {"send", "[fd00:96::%x]:53", 0},
	} {
		at := fmt.Sprintf(row.format, i+1)
		t.Run(fmt.Sprintf("then it %ss to %s", row.way, at), func(t *testing.T) {
			s := w.addLarge(t, 2, service{at: []string{at}, algorithm: maps.AlgorithmRR})
			sorted := w.start(t, w.client.Namespace, "sort names", s.at[0], strconv.Itoa(sockets), row.way)
			sorted.line(t)
			one, two := w.load(s.backends[0]), w.load(s.backends[1])
			sorted.rest(t)
			if one+two != sockets || min(one, two) < sockets/2-row.less {
				t.Errorf("of %d sockets, the backends have %d and %d", sockets, one, two)
			}
		})
	}
}

// Round robin has a turn for each frontend: who dials two in turn gets all backends of both.
func TestTurnOfEachFrontend(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			off := 0
			if way.network[:3] == "udp" && !way.unconnected {
				off = 1 // parts of two rounds: see testRounds
			}
			b := w.balance(t, way, maps.AlgorithmRR, 0)
			counts := map[string]map[uint32]int{b.at[0]: {}, b.at[1]: {}, b.at[2]: {}}
			for i := range 27 {
				at := b.at[i%3]
				counts[at][b.ask(t, client, at)]++
			}
			for at, got := range counts {
				for _, id := range b.backends {
					if got[id] < 3-off || got[id] > 3+off {
						t.Errorf("of 9 flows to %s, in turn with two other frontends, the backends get %v", at, got)
					}
				}
			}
		})
	}
}

// Of backends that are equally idle each has the same chance, whichever are side by side: five have been busy
// since before the other five came.
func TestIdleBesideBusy(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	for i, algorithm := range []uint8{maps.AlgorithmSED, maps.AlgorithmNQ} {
		s := w.addLarge(t, 10, service{at: []string{fmt.Sprintf("10.96.0.%d:53", i+1)}, algorithm: algorithm})
		for _, id := range s.backends[:5] {
			w.Maps().Loads.AddFlows(id, 1000)
		}
		counts, shares := make([]int, 10), make([]float64, 10)
		for i := range 5 {
			shares[5+i] = 0.2
		}
		for range 300 {
			counts[slices.Index(s.backends, w.connected(t, client, s.at[0]))]++
		}
		lab.MustBeFair(t, fmt.Sprintf("by algorithm %d", algorithm), counts, shares)
	}
}

// chosen returns how many sockets each backend of s was given.
func (w *world) chosen(t testing.TB, s *service) map[uint32]int {
	t.Helper()
	socks, err := w.TranslatedSocks()
	lab.Must(t, err)
	chosen := make(map[uint32]int)
	for _, sock := range socks {
		if sock.State.ServicePortId == s.id {
			chosen[sock.State.BackendId]++
		}
	}

	return chosen
}

// sceneConnectMany connects args[1] UDP sockets to args[0] and keeps them until
// its input ends.
func sceneConnectMany(args []string) (string, error) {
	n, _ := strconv.Atoi(args[1])
	limit := unix.Rlimit{Cur: uint64(n) + 100, Max: uint64(n) + 100}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return "", err
	}
	to := sockaddr(args[0])
	for range n {
		fd, err := unix.Socket(family(args[0]), unix.SOCK_DGRAM, 0)
		if err != nil {
			return "", err
		}
		if err := unix.Connect(fd, to); err != nil {
			return "", err
		}
	}
	pause("connected")

	return "", nil
}

// sceneSortNames connects a UDP socket to args[0], and then to another address, as a program that sorts two
// addresses does. Then it begins a flow to args[0] with another socket, by connect() or sendto() as args[2]
// says. It does so args[1] times, and keeps the sockets with flows until its input ends.
func sceneSortNames(args []string) (string, error) {
	n, _ := strconv.Atoi(args[1])
	to, other, question := sockaddr(args[0]), sockaddr("10.250.250.250:53"), []byte("who\n")
	if family(args[0]) == unix.AF_INET6 {
		other = sockaddr("[fd00:250::250:250]:53")
	}
	sorts, err := unix.Socket(family(args[0]), unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	for range n {
		if err := errors.Join(unix.Connect(sorts, to), unix.Connect(sorts, other)); err != nil {
			return "", err
		}
		fd, err := unix.Socket(family(args[0]), unix.SOCK_DGRAM, 0)
		if err != nil {
			return "", err
		}
		if args[2] == "connect" {
			err = unix.Connect(fd, to)
		} else {
			err = unix.Sendto(fd, question, 0, to)
		}
		if err != nil {
			return "", err
		}
	}
	pause("sorted")

	return "", nil
}
