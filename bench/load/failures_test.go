package load

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestFailuresAreCounted(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	mustLose(t, p)
	// Otherwise only the first datagrams are refused, and the others lost.
	lab.Must(t, p.server.Sysctl("net/ipv4/icmp_ratelimit", "0"))
	for _, test := range []struct {
		name, target, why string
	}{
		{"refused", "10.0.0.2:9", "10.0.0.2:9: connection refused"},
		{"lost", "100.96.0.1:8080", "100.96.0.1:8080: connection timed out"},
		{"without a route", "192.0.2.1:8080", "192.0.2.1:8080: network is unreachable"},
	} {
		for _, kind := range kinds {
			for _, rate := range []int{0, 10} {
				t.Run(string(kind)+" "+test.name, func(t *testing.T) {
					t.Parallel()
					result := mustRun(t, p.client, Work{
						Kind:     kind,
						Targets:  []netip.AddrPort{netip.MustParseAddrPort(test.target)},
						Clients:  2,
						Rate:     rate,
						Duration: 500 * time.Millisecond,
					})
					if result.Succeeded != 0 || result.Failed == 0 || result.Started != result.Failed || result.Latencies.Count() != 0 {
						t.Errorf("%d started, %d succeeded, %d failed, want all failed", result.Started, result.Succeeded, result.Failed)
					}
					if rate > 0 && result.Started != 5 {
						t.Errorf("%d started, want the 5 that were due", result.Started)
					}
					if test.name == "refused" && kind == UDPUnconnected {
						return // the kernel does not report it to such a socket
					}
					if !strings.HasSuffix(result.FirstError, test.why) {
						t.Errorf("first error is %q, want …%s", result.FirstError, test.why)
					}
				})
			}
		}
	}
}

func TestAnswerFromElsewhereIsAFailure(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	lab.Must(t, p.server.Netfilter(`
table ip elsewhere {
	chain output {
		type filter hook output priority 0
		ip saddr 100.64.0.7 udp sport 8080 ip saddr set 100.64.0.8
	}
}
`))
	result := mustRun(t, p.client, Work{
		Kind: UDPUnconnected, Targets: targets("100.64.0.7", "100.64.0.8"), Rate: 100, Duration: 100 * time.Millisecond,
	})
	if result.Failed != 5 || result.Succeeded != 5 || !strings.HasSuffix(result.FirstError, "100.64.0.7:8080: remote address changed") {
		t.Errorf("%d failed (%s) and %d succeeded, want 5 and 5", result.Failed, result.FirstError, result.Succeeded)
	}
}

func TestAnswerToSomethingElseIsAFailure(t *testing.T) {
	p := mustPair(t)
	var listener net.Listener
	lab.Must(t, p.server.Do(func() (err error) {
		listener, err = net.Listen("tcp4", "0.0.0.0:8080")

		return err
	}))
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			// All that is asked, but for the number.
			request := make([]byte, requestSize)
			_, _ = io.ReadFull(conn, request)
			setNumber(request, 0)
			_, _ = conn.Write(append(request, make([]byte, responseSize-requestSize)...))
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	result := mustRun(t, p.client, Work{Kind: Connect, Targets: targets("10.0.0.2"), Rate: 50, Duration: 100 * time.Millisecond})
	if result.Failed != 5 || !strings.HasSuffix(result.FirstError, "10.0.0.2:8080: bad message") {
		t.Errorf("%d of %d failed (%s), want 5 of 5", result.Failed, result.Started, result.FirstError)
	}
}
