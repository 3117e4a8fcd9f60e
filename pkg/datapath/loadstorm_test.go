package datapath

import (
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Many processes at once make all kinds of calls on sockets, threads share sockets,
// backends are chosen by their load, and some processes are killed in between: at the
// end, no backend has a connection.
func TestLoadAfterStorm(t *testing.T) {
	w := newWorld(t)
	algorithms := []uint8{maps.AlgorithmLC, maps.AlgorithmSED, maps.AlgorithmNQ, maps.AlgorithmRR}
	var services []*service
	for i, algorithm := range algorithms {
		at := "10.96.0." + strconv.Itoa(i+1) + ":80"
		for _, proto := range []string{"tcp", "udp"} {
			services = append(services, w.add(t, service{
				proto: proto, at: []string{at}, algorithm: algorithm, to: append(w.all4(), "198.51.100.9:80", "127.0.0.1:1"),
			}))
		}
	}
	var storms []*runningScene
	for seed := range 4 {
		storms = append(storms, w.start(t, w.client.Namespace, "storm", strconv.Itoa(seed), strconv.Itoa(len(algorithms))))
	}
	for i, storm := range storms {
		if printed := storm.line(t); printed != "half" {
			t.Fatal(printed)
		}
		if i%2 == 0 {
			lab.Must(t, storm.cmd.Process.Kill())
		}
	}
	busy := 0
	for i, storm := range storms {
		if i%2 == 0 {
			continue
		}
		for _, s := range services {
			for _, id := range s.backends {
				busy += w.load(id)
			}
		}
		if printed := storm.rest(t); printed != "" {
			t.Error(printed)
		}
	}
	if busy == 0 {
		t.Error("there never was a connection: the test shows nothing")
	}
	for _, s := range services {
		w.mustRest(t, s, 0, 0, 0, 0, 0)
		if n := w.countOf(t, s.id); n == 0 {
			t.Errorf("no client dialled %s", s.at[0])
		}
	}
}

// sceneStorm dials args[1] Services in all ways, from some threads with the random
// numbers of args[0]. In the middle it waits, with sockets open.
func sceneStorm(args []string) (string, error) {
	seed, _ := strconv.ParseUint(args[0], 10, 64)
	count, _ := strconv.Atoi(args[1])
	shared, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	var half, all sync.WaitGroup
	goOn := make(chan struct{})
	for thread := range uint64(4) {
		half.Add(1)
		all.Go(func() {
			s := stormer{Rand: rand.New(rand.NewPCG(seed, thread)), services: count, shared: shared}
			for range 150 {
				s.step()
			}
			half.Done()
			<-goOn
			for range 150 {
				s.step()
			}
		})
	}
	half.Wait()
	pause("half")
	close(goOn)
	all.Wait()

	return "", nil
}

// stormer is a thread that makes random calls and ignores their results.
type stormer struct {
	*rand.Rand
	services int
	shared   int
	open     []int
}

func (s *stormer) to() unix.Sockaddr {
	host := byte(1 + s.IntN(s.services+1)) // the last one is no Service
	if int(host) > s.services {
		return sockaddr("127.0.0.1:9")
	}

	return &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, host}, Port: 80}
}

func (s *stormer) step() {
	switch n := s.IntN(12); {
	case n < 4:
		s.dial(unix.SOCK_STREAM)
	case n < 6:
		s.dial(unix.SOCK_DGRAM)
	case n == 6:
		_ = unix.Connect(s.shared, s.to())
	case n == 7:
		_ = unix.Sendto(s.shared, []byte("who"), unix.MSG_DONTWAIT, s.to())
	case n == 8 && len(s.open) > 0:
		_ = unix.Connect(s.open[s.IntN(len(s.open))], s.to())
	case n == 9 && len(s.open) > 0:
		_ = disconnect(s.open[s.IntN(len(s.open))])
	default:
		s.close()
	}
}

func (s *stormer) dial(kind int) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return
	}
	_ = unix.Connect(fd, s.to())
	if s.IntN(3) == 0 {
		wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, _ = unix.Poll(wait, 20)
		_, _ = unix.Write(fd, []byte("who\n"))
	}
	s.open = append(s.open, fd)
	if len(s.open) > 20 {
		s.close()
	}
}

func (s *stormer) close() {
	if len(s.open) == 0 {
		return
	}
	i := s.IntN(len(s.open))
	if s.IntN(3) == 0 {
		_ = unix.SetsockoptLinger(s.open[i], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	_ = unix.Close(s.open[i])
	s.open = append(s.open[:i], s.open[i+1:]...)
}
