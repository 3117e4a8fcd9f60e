package datapath

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
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
