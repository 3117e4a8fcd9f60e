package datapath

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// The kernel gives an element of a hash map to the next writer as soon as it is
// replaced (Linux 6.1 and later), whoever reads it at that moment. A client of
// one Service must not meet another's backend for that.
func TestReplacedElements(t *testing.T) {
	w := newWorld(t)
	w.serviceCIDRs(t, "10.96.0.0/16")
	mine := w.add(t, service{proto: "udp", at: []string{"10.96.0.1:53"}, to: []string{"127.0.0.1:9"}})
	other := w.add(t, service{proto: "udp", at: []string{"10.96.0.2:53"}, to: []string{w.v4(0)}})

	for _, test := range []struct {
		name    string
		rewrite func() error
	}{
		{"frontends", func() error {
			for _, s := range []*service{mine, other} {
				if err := w.Maps().Frontends.Put(s.key(s.at[0]), s.frontend()); err != nil {
					return err
				}
			}

			return nil
		}},
		{"backends", func() error {
			for _, s := range []*service{mine, other} {
				be := maps.BackendOf(netip.MustParseAddrPort(s.to[0]), s.id, 0)
				if err := w.Maps().Backends.Put(s.backends[0], be); err != nil {
					return err
				}
			}

			return nil
		}},
	} {
		t.Run(test.name+" never lead astray", func(t *testing.T) {
			var clients []*runningScene
			for range 3 { // so that they are interrupted, too
				clients = append(clients, w.start(t, w.client.Namespace, "connect again", mine.at[0], "127.0.0.1"))
			}
			rewritten := 0
			for deadline := time.Now().Add(1500 * time.Millisecond); time.Now().Before(deadline); rewritten++ {
				must(t, test.rewrite())
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
