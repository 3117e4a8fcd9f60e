package datapath

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The agent refuses to run where its clock is not that of programs.
func TestOtherClock(t *testing.T) {
	lab.NeedsRoot(t)
	for shift, want := range map[time.Duration]bool{0: false, 5 * time.Second: true, -5 * time.Second: true, 100 * 24 * time.Hour: true} {
		other, err := hasOtherClock(func() uint64 { return maps.Now() + uint64(shift) })
		if err != nil || other != want {
			t.Errorf("a clock that is %v ahead is another one: %t, %v; want %t", shift, other, err, want)
		}
	}
}

// A time in a map may be later than the clock that a program has read, if another CPU wrote it: what has it was used
// now, and not in the year 2600.
func TestTimesOfOtherCPUs(t *testing.T) {
	w := newDatagramWorld(t)
	vip := []string{"10.96.0.8:80"}
	sticky := w.add(t, service{proto: "udp", at: vip, to: w.all4(), affinity: 1000})
	client := w.pod(t)

	t.Run("a client keeps its backend", func(t *testing.T) {
		first := w.connected(t, client, vip[0])
		key := affinityKey(w.client.IPv4, sticky)
		for range 20 {
			had, ok, err := w.Maps().Affinity.Lookup(key)
			if !ok || err != nil {
				t.Fatalf("nothing remembered: %v", err)
			}
			had.LastUsed += uint64(time.Second)
			lab.Must(t, w.Maps().Affinity.Put(key, had))
			if got := w.connected(t, client, vip[0]); got != first {
				t.Fatalf("backend %d, want %d", got, first)
			}
		}
	})
	t.Run("a socket keeps its backend", func(t *testing.T) {
		info, err := w.Maps().Replacements()["sl_udp_dials"].Info()
		lab.Must(t, err)
		id, _ := info.ID()
		answers := strings.Fields(w.play(t, w.client.Namespace, "dial ahead", dns, fmt.Sprint(id)))
		if len(answers) != 20 || len(slices.Compact(answers)) != 1 || !strings.HasSuffix(answers[0], "@"+dns) {
			t.Errorf("answers are %v, want 20 of one backend from %s", answers, dns)
		}
	})
}

// stressVariable names how long each part of TestTwoCPUsAtOnce lasts, if longer than in CI.
const stressVariable = "SLUICE_TEST_STRESS"

// Two CPUs use one time at once, so the clock of one is behind what the other has just written: a socket whose answers
// arrive while it sends keeps its backend, and so does a known client that connects from both.
func TestTwoCPUsAtOnce(t *testing.T) {
	const vip, sticky = "10.96.0.9:53", "10.96.0.10:53"
	lasts := cmp.Or(os.Getenv(stressVariable), "1500ms")
	w := newWorld(t)
	var ten []string
	for i := range uint16(10) {
		ten = append(ten, netip.AddrPortFrom(w.client.IPv4, 9000+i).String())
	}
	w.add(t, service{proto: "udp", at: []string{vip}, to: ten})
	w.add(t, service{proto: "udp", at: []string{sticky}, to: ten, affinity: 1000})

	t.Run("one socket has answers of one backend, from the VIP", func(t *testing.T) {
		answers := strings.Fields(w.play(t, w.client.Namespace, "two threads", append([]string{vip, lasts}, ten...)...))
		if len(answers) != 2 || !strings.HasSuffix(answers[1], "@"+vip) {
			t.Fatalf("answers are %v, want those of one backend from %s", answers, vip)
		}
		t.Logf("%s answers", answers[0])
	})
	t.Run("a known client has one backend", func(t *testing.T) {
		reached := strings.Fields(w.play(t, w.client.Namespace, "sticky connects", append([]string{sticky, lasts}, ten...)...))
		if len(reached) != 2 {
			t.Fatalf("connections and backends are %v, want one backend", reached)
		}
		t.Logf("%s connections", reached[0])
	})
}

// onCPU runs f in a thread of its own on one of the CPUs that this process may use.
func onCPU(number int, f func() error) error {
	runtime.LockOSThread() // for good: the thread ends with its goroutine
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	number %= all.Count()
	for cpu := 0; ; cpu++ {
		if !all.IsSet(cpu) {
			continue
		}
		if number == 0 {
			one.Set(cpu)

			break
		}
		number--
	}

	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}

	return f()
}

// datagramsAt returns a socket that is bound to an address, or not if that is empty.
func datagramsAt(at string) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err == nil && at != "" {
		err = unix.Bind(fd, sockaddr(at))
	}

	return fd, err
}

// sceneTwoThreads sends to args[0] by one socket for as long as args[1] says, while another thread reads the answers on
// another CPU. The backends are at the rest of args; each answers many times, so that both threads are busy. It prints how
// many answers there were, and by which backends, and from where.
func sceneTwoThreads(args []string) (string, error) {
	lasts, err := time.ParseDuration(args[1])
	if err != nil {
		return "", err
	}
	for _, at := range args[2:] {
		fd, err := datagramsAt(at)
		if err != nil {
			return "", err
		}
		go func() {
			for b := make([]byte, 10); ; {
				_, from, err := unix.Recvfrom(fd, b, 0)
				for range 8 {
					if err == nil {
						err = unix.Sendto(fd, []byte(at), 0, from)
					}
				}
			}
		}()
	}
	fd, err := datagramsAt("")
	if err == nil {
		err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20))
	}
	if err != nil {
		return "", err
	}
	to := sockaddr(args[0])
	var threads errgroup.Group
	threads.Go(func() error {
		return onCPU(0, func() error {
			for end := time.Now().Add(lasts); time.Now().Before(end); {
				if err := unix.Sendto(fd, []byte("who"), 0, to); err != nil {
					return err
				}
			}

			return nil
		})
	})
	var answers []string
	count := 0
	threads.Go(func() error {
		return onCPU(1, func() error {
			for b := make([]byte, 100); ; {
				n, from, err := unix.Recvfrom(fd, b, 0)
				switch {
				case errors.Is(err, unix.EINTR): // by Go's scheduler
					continue
				case errors.Is(err, unix.EAGAIN): // the last one is read
					return nil
				case err != nil:
					return err
				}
				count++
				if answer := string(b[:n]) + "@" + addrPort(from).String(); !slices.Contains(answers, answer) {
					answers = append(answers, answer)
				}
			}
		})
	})
	err = threads.Wait()

	return fmt.Sprint(count, " ", strings.Join(answers, " ")), err
}

// sceneStickyConnects connects sockets to args[0] on two CPUs for as long as args[1] says, each after the other, and sends
// a datagram by each. It prints how many there were, and which of its backends, at the rest of args, got one.
func sceneStickyConnects(args []string) (string, error) {
	lasts, err := time.ParseDuration(args[1])
	if err != nil {
		return "", err
	}
	backends := make(map[string]int)
	for _, at := range args[2:] {
		if backends[at], err = datagramsAt(at); err != nil {
			return "", err
		}
	}
	to := sockaddr(args[0])
	connects := func() error {
		fd, err := datagramsAt("")
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, to); err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte("here"))

		return err
	}
	if err := connects(); err != nil { // the client is known from now on
		return "", err
	}
	var threads errgroup.Group
	var count [2]int
	for cpu := range count {
		threads.Go(func() error {
			return onCPU(cpu, func() error {
				for end := time.Now().Add(lasts); time.Now().Before(end); count[cpu]++ {
					if err := connects(); err != nil {
						return err
					}
				}

				return nil
			})
		})
	}
	err = threads.Wait()
	reached := fmt.Sprint(count[0] + count[1])
	for _, at := range args[2:] {
		if _, _, err := unix.Recvfrom(backends[at], make([]byte, 10), unix.MSG_DONTWAIT); err == nil {
			reached += " " + at
		}
	}

	return reached, err
}

// sceneDialAhead sends 20 questions to args[0] by one socket, and prints the names that answer, and from where.
// Before each but the first another CPU seems to have used what the socket has in the map args[1], a second later.
func sceneDialAhead(args []string) (string, error) {
	id, err := strconv.Atoi(args[1])
	if err != nil {
		return "", err
	}
	dials, err := ebpf.NewMapFromID(ebpf.MapID(id))
	if err != nil {
		return "", err
	}
	defer dials.Close()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	}
	if err != nil {
		return "", err
	}
	var answers []string
	for range 20 {
		if len(answers) > 0 {
			if err := useLater(dials, fd); err != nil {
				return "", err
			}
		}
		if err := unix.Sendto(fd, []byte("who\n"), 0, sockaddr(args[0])); err != nil {
			return "", err
		}
		answer, err := answerAt(fd)
		if err != nil {
			return "", err
		}
		answers = append(answers, answer)
	}

	return strings.Join(answers, " "), nil
}

// useLater adds a second to the times of the dials of a socket.
func useLater(dials *ebpf.Map, fd int) error {
	const dial, lastUsed, count = 64, 48, 4
	value, err := dials.LookupBytes(int32(fd))
	if err != nil {
		return err
	}
	for i := range count {
		at := value[i*dial+lastUsed:]
		if used := binary.NativeEndian.Uint64(at); used != 0 {
			binary.NativeEndian.PutUint64(at, used+uint64(time.Second))
		}
	}

	return dials.Put(int32(fd), value)
}

// answerAt returns who has answered a socket, and from where: "blue@10.96.0.1:53".
func answerAt(fd int) (string, error) {
	b := make([]byte, 200)
	n, from, err := unix.Recvfrom(fd, b, 0)
	if err != nil {
		return "", err
	}
	answer, err := lab.ParseAnswer(string(b[:n]))

	return answer.Name + "@" + addrPort(from).String(), err
}
