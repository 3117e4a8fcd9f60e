package datapath

import (
	"fmt"
	"math"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

var extentSizes = []int{1, 2, 3, 1000, 10000}

// addLarge publishes a UDP service with n backends that need not exist: connects of UDP
// sockets send nothing.
func (w *world) addLarge(t testing.TB, n int, s service) *service {
	t.Helper()
	for i := range n {
		s.to = append(s.to, fmt.Sprintf("10.250.%d.%d:53", i/250, i%250+1))
	}
	s.proto = "udp"

	return w.add(t, s)
}

// Every slot is chosen equally often. The bound is six standard deviations of
// the chi-square distribution above its mean.
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

			total, chi2, expected := 0, 0.0, float64(connects)/float64(size)
			for _, id := range s.backends {
				total += chosen[id]
				chi2 += math.Pow(float64(chosen[id])-expected, 2) / expected
			}
			if total != connects {
				t.Fatalf("%d of %d sockets have a backend of the service", total, connects)
			}
			if bound := chiSquareBound(size - 1); size > 1 && chi2 > bound {
				t.Errorf("chi-square %.1f, want at most %.1f", chi2, bound)
			}
		})
	}
}

// chiSquareBound is exceeded by chance once in some 10⁹ times, by the approximation of Wilson
// and Hilferty, which holds for few degrees of freedom as well.
func chiSquareBound(freedom int) float64 {
	const deviations = 6
	spread := 2 / (9 * float64(freedom))

	return float64(freedom) * math.Pow(1-spread+deviations*math.Sqrt(spread), 3)
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
