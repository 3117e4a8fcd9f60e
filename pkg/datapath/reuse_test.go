package datapath

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// While frontends and their pools are added and removed, a client of one that stays gets only its
// backends, and no connect fails.
func TestChangesUnderReaders(t *testing.T) {
	w := newWorld(t)
	w.serviceCIDRs(t, "10.96.0.0/16")
	mine := w.add(t, service{proto: "udp", at: []string{"10.96.0.1:53"}, to: []string{"127.0.0.1:9", "127.0.0.1:10"}})
	other := w.add(t, service{proto: "udp", at: []string{"10.96.0.2:53"}, to: []string{w.v4(0)}})

	for _, test := range []struct {
		name    string
		rewrite func()
	}{
		{"of its own pool", func() {
			w.publish(t, mine, mine.backends...)
			w.publish(t, mine, mine.backends[1])
		}},
		{"of another's frontend", func() {
			lab.Must(t, w.Maps().FrontendIDs.Delete(other.key(other.at[0])))
			w.publish(t, other, other.backends...)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var clients []*runningScene
			for range 3 { // so that they are interrupted, too
				clients = append(clients, w.start(t, w.client.Namespace, "connect again", mine.at[0], "127.0.0.1"))
			}
			rewritten := 0
			for deadline := time.Now().Add(1500 * time.Millisecond); time.Now().Before(deadline); rewritten++ {
				test.rewrite()
			}
			var connects, astray, failed int
			for _, client := range clients {
				var c, a, f int
				fmt.Sscanf(client.rest(t), "ready\n%d %d %d", &c, &a, &f)
				connects, astray, failed = connects+c, astray+a, failed+f
			}
			t.Logf("%d connects during %d rewrites", connects, rewritten)
			if connects < 1000 || astray+failed > 0 {
				t.Errorf("%d connects: %d went astray, %d failed", connects, astray, failed)
			}
		})
	}
}

// sceneConnectAgain connects a UDP socket to args[0] again and again, until its
// input ends. It prints how often, how often the source was not args[1], and
// how often it failed.
func sceneConnectAgain(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	ended := make(chan struct{})
	go func() {
		pause("ready")
		close(ended)
	}()
	to := sockaddr(args[0])
	connects, astray, failed := 0, 0, 0
	for ; ; connects++ {
		select {
		case <-ended:
			return fmt.Sprintln(connects, astray, failed), nil
		default:
		}
		if err := unix.Connect(fd, to); err != nil {
			failed++

			continue
		}
		local, err := unix.Getsockname(fd)
		if err != nil {
			return "", err
		}
		if addrPort(local).Addr().String() != args[1] {
			astray++
		}
		if err := disconnect(fd); err != nil {
			return "", err
		}
	}
}
