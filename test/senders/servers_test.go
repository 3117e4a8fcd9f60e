package senders

import (
	"net"
	"net/netip"
	"regexp"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// servers are those of all backends.
type servers struct {
	mu       sync.Mutex
	received map[string][]string // names of the backends that have received a line, by its text
}

var lineText = regexp.MustCompile(`<line [^>]*>`)

// mustServe has a pod receive datagrams on its addresses, and answer each with the pod's name and the line.
func (s *servers) mustServe(t *testing.T, pod *lab.Pod, port uint16) {
	t.Helper()
	for _, ip := range []netip.Addr{pod.IPv4, pod.IPv6} {
		conn, err := pod.ListenPacket("udp", netip.AddrPortFrom(ip, port).String())
		lab.Must(t, err)
		var serving sync.WaitGroup
		serving.Go(func() { s.serve(conn, pod.Name) })
		t.Cleanup(func() {
			_ = conn.Close() // what was received is received
			serving.Wait()
		})
	}
}

func (s *servers) serve(conn net.PacketConn, name string) {
	buffer := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return // closed
		}
		text := lineText.FindString(string(buffer[:n]))
		s.mu.Lock()
		s.received[text] = append(s.received[text], name)
		s.mu.Unlock()
		// Not all programs receive answers: the next read may return an ICMP error for this one.
		_, _ = conn.WriteTo([]byte(answerOf(name, text)+"\n"), from)
	}
}

func answerOf(backend, text string) string { return backend + " got " + text }

// by returns the backends that have received a line.
func (s *servers) by(text string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return slices.Clone(s.received[text])
}
