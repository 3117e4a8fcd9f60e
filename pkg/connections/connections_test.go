package connections

import (
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
)

// A socket of this process is found by its inode number, and others are not looked for.
func TestProcesses(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		t.Fatal(err)
	}
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
		if err := Sort(all, order); err != nil {
			t.Fatal(err)
		}
		if got := all[0].Service + all[1].Service + all[2].Service; got != want {
			t.Errorf("by %s: %s, want %s", order, got, want)
		}
	}
}

func TestStates(t *testing.T) {
	want := "established, syn-sent, fin-wait-1, fin-wait-2, close-wait, last-ack, closing, connected, unconnected"
	if got := joined(States()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
