package connections

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// A socket of this process is found by its inode number, and others are not looked for.
func TestProcesses(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	lab.Must(t, err)
	defer file.Close()
	var stat unix.Stat_t
	lab.Must(t, unix.Fstat(int(file.Fd()), &stat))
	got, err := findProcesses(map[uint64]bool{stat.Ino: true, 1: true})
	comm, _ := os.ReadFile("/proc/self/comm")
	want := map[uint64]Process{stat.Ino: {PID: os.Getpid(), Command: strings.TrimSpace(string(comm))}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// What is largest comes first, and what has no age last.
func TestSort(t *testing.T) {
	of := func(service string, sent, since uint64) Connection {
		return Connection{Service: service, sock: maps.TranslatedSock{BytesSent: sent, State: maps.SockState{Since: since}}}
	}
	all := []Connection{of("b", 1, 0), of("a", 2, 30), of("c", 2, 20)}
	for order, want := range map[string]string{"service": "abc", "sent": "acb", "age": "cab"} {
		Sort(all, order)
		if got := all[0].Service + all[1].Service + all[2].Service; got != want {
			t.Errorf("by %s: %s, want %s", order, got, want)
		}
	}
}

// Addresses are compared as such, in whichever way they are written.
func TestFilterOfAddresses(t *testing.T) {
	backend4, backend6 := netip.MustParseAddrPort("10.244.1.3:8080"), netip.MustParseAddrPort("[fd00::1]:8080")
	for _, test := range []struct {
		want    string
		backend netip.AddrPort
		admits  bool
	}{
		{"", backend4, true},
		{"10.244.1.3", backend4, true},
		{"10.244.1.3:8080", backend4, true},
		{"::ffff:10.244.1.3", backend4, true},
		{"10.244.1.3:8081", backend4, false},
		{"10.244.1.30", backend4, false},
		{"FD00::1", backend6, true},
		{"[fd00:0::1]:8080", backend6, true},
		{"fd00::2", backend6, false},
	} {
		if got := (Filter{Backend: test.want}).admits(Connection{Backend: test.backend}, ""); got != test.admits {
			t.Errorf("--backend %s admits %s: %v, want %v", test.want, test.backend, got, test.admits)
		}
	}
}

func TestStates(t *testing.T) {
	want := "established, syn-sent, fin-wait-1, fin-wait-2, close-wait, last-ack, closing, connected, unconnected"
	if got := strings.Join(States(), ", "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
