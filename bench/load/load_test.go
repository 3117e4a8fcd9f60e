package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	Main()
	lab.Main()
	if os.Getenv(parentVariable) != "" {
		beParent()
	}
	os.Exit(m.Run())
}

const port = 8080

// pair is a client and a server at the two ends of a veth pair. The server answers
// at every address of 100.64.0.0/12.
//
//	client 10.0.0.1 ┄┄ 10.0.0.2 server
type pair struct {
	client, server *lab.Namespace
}

func mustPair(t testing.TB) pair {
	t.Helper()
	p := pair{client: lab.MustNamespace(t, "client"), server: lab.MustNamespace(t, "server")}
	lab.MustVeth(t,
		lab.End{Namespace: p.client, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}},
		lab.End{Namespace: p.server, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/24")}})
	prefix := netip.MustParsePrefix("100.64.0.0/12")
	lab.Must(t, Own(p.server, prefix), p.client.AddRoute(prefix, netip.MustParseAddr("10.0.0.2")))

	return p
}

// targets are addresses of the test's port.
func targets(addresses ...string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, address := range addresses {
		all = append(all, netip.AddrPortFrom(netip.MustParseAddr(address), port))
	}

	return all
}

func mustServe(t testing.TB, ns *lab.Namespace) *Server {
	t.Helper()
	server, err := Serve(ns, port)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, server.Close()) })

	return server
}

func mustRun(t testing.TB, ns *lab.Namespace, w Work) Result {
	t.Helper()
	w.Clients = max(w.Clients, 1)
	result, err := Run(t.Context(), ns, nil, w)
	lab.Must(t, err)
	t.Logf("%s: %d of %d, %.0f/s, p50 %v, p99 %v, %+v %s", w.Kind, result.Succeeded, result.Started,
		result.PerSecond(), result.Latencies.Quantile(0.5), result.Latencies.Quantile(0.99), result.Machine, result.FirstError)

	return result
}

var kinds = []Kind{Connect, Exchange, UDPConnected, UDPUnconnected, UDPNew}

// Every client of every kind gets answers, and no exchange is lost from the count.
func TestKinds(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			result := mustRun(t, p.client, Work{
				Kind:     kind,
				Targets:  targets("100.64.0.7", "100.65.1.2", "10.0.0.2"),
				Clients:  4,
				Pause:    5 * time.Millisecond,
				WarmUp:   20 * time.Millisecond,
				Duration: time.Second,
			})
			if result.Succeeded == 0 || result.Failed != 0 {
				t.Errorf("%d succeeded, %d failed (%s), want some and none", result.Succeeded, result.Failed, result.FirstError)
			}
			if result.Started != result.Succeeded || result.Latencies.Count() != result.Succeeded || result.Elapsed != time.Second {
				t.Errorf("%d started, %d succeeded in %v, with %d latencies", result.Started, result.Succeeded, result.Elapsed, result.Latencies.Count())
			}
		})
	}
}

// With a rate, the exchanges that are due in the window are counted, exactly, also on a
// machine that is behind.
func TestRateIsExact(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			result := mustRun(t, p.client, Work{
				Kind:     kind,
				Targets:  targets("100.64.0.7", "100.64.0.8"),
				Clients:  3,
				Rate:     700,
				WarmUp:   100 * time.Millisecond,
				Duration: 300 * time.Millisecond,
			})
			if result.Started != 210 || result.Succeeded != 210 || result.Lateness.Count() != 210 {
				t.Errorf("%d started, %d succeeded, %d were late: want 210 each (%s)",
					result.Started, result.Succeeded, result.Lateness.Count(), result.FirstError)
			}
			for q := range 101 {
				late, latency := result.Lateness.Quantile(float64(q)/100), result.Latencies.Quantile(float64(q)/100)
				if late < 0 || late > latency {
					t.Fatalf("%d %% of the latenesses are up to %v, of the latencies up to %v", q, late, latency)
				}
			}
		})
	}
}

// The counts are those of the work.
func TestCounts(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	mustLose(t, p)
	// The second target does not answer. The client asks it in its second turn, and when it has waited
	// for that, time is over.
	inTurn := Work{Targets: targets("100.64.0.7", "100.96.0.1"), Pause: time.Millisecond, Duration: 900 * time.Millisecond}
	ofKind := func(kind Kind, w Work) Work { w.Kind = kind; return w }
	for _, test := range []struct {
		name              string
		work              Work
		succeeded, failed int
	}{
		{"targets of connections are taken in turn", ofKind(Connect, inTurn), 1, 1},
		{"targets of an unconnected socket are taken in turn", ofKind(UDPUnconnected, inTurn), 1, 1},
		{"targets of new sockets are taken in turn", ofKind(UDPNew, inTurn), 1, 1},
		{"many clients have a connection open all the time: none waits for another",
			Work{Kind: Exchange, Targets: targets("10.0.0.2"), Clients: conversations - acceptors, Rate: 920, Duration: 500 * time.Millisecond}, 460, 0},
		{"each connection takes one of few ports", Work{Kind: Connect, Targets: targets("10.0.0.2"), Rate: 100, Duration: 500 * time.Millisecond}, 50, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			lab.Must(t, p.client.Sysctl("net/ipv4/ip_local_port_range", "50000 50009")) // Run widens it
			result := mustRun(t, p.client, test.work)
			if result.Succeeded != test.succeeded || result.Failed != test.failed {
				t.Errorf("%d succeeded and %d failed, want %d and %d (%s)", result.Succeeded, result.Failed, test.succeeded, test.failed, result.FirstError)
			}
		})
	}
}

// mustLose makes packets to 100.96.0.0/12 get lost.
func mustLose(t testing.TB, p pair) {
	t.Helper()
	lab.Must(t, p.client.AddRoute(netip.MustParsePrefix("100.96.0.0/12"), netip.MustParseAddr("10.0.0.2")))
}

// The end of a context ends what runs, and returns its cause; what is killed returns an error.
func TestRunEnds(t *testing.T) {
	p := mustPair(t)
	mustServe(t, p.server)
	bulk := mustServeBulk(t, p.server)
	enough := errors.New("enough")
	work := func(ctx context.Context, cgroup *lab.Cgroup) error {
		_, err := Run(ctx, p.client, cgroup, Work{
			Kind: Exchange, Targets: targets("10.0.0.2"), Clients: 1, Pause: time.Millisecond, Duration: time.Hour,
		})

		return err
	}
	for _, test := range []struct {
		name string
		run  func(ctx context.Context, cgroup *lab.Cgroup) error
		kill unix.Signal // 0: its context ends
	}{
		{"work", work, 0},
		{"work that is ended", work, unix.SIGTERM},
		{"work that is killed", work, unix.SIGKILL},
		{"iperf3", func(ctx context.Context, cgroup *lab.Cgroup) error {
			_, err := Bulk(ctx, p.client, cgroup, bulk, "--time", "3600", "--bitrate", "1M")

			return err
		}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			cgroup := lab.MustCgroup(t, "load")
			ctx, cancel := context.WithCancelCause(t.Context())
			ended := make(chan error)
			go func() { ended <- test.run(ctx, cgroup) }()
			pids := mustHaveProcesses(t, cgroup, 1)
			if test.kill != 0 {
				lab.Must(t, unix.Kill(pids[0], test.kill))
			} else {
				cancel(enough)
			}
			if err := <-ended; err == nil || test.kill == 0 && !errors.Is(err, enough) {
				t.Errorf("error is %v, want %v", err, enough)
			}
			mustHaveProcesses(t, cgroup, 0)
			cancel(nil)
		})
	}
}

// mustHaveProcesses waits until a cgroup has so many processes.
func mustHaveProcesses(t testing.TB, cgroup *lab.Cgroup, want int) (pids []int) {
	t.Helper()
	lab.Eventually(t, "the cgroup has its processes", func() (err error) {
		if pids, err = cgroup.Processes(); err == nil && len(pids) != want {
			err = fmt.Errorf("there are %v, want %d", pids, want)
		}

		return err
	})

	return pids
}

// The side that closes a connection first keeps it in TIME_WAIT, and a reset leaves no state.
// Connections come from all sources.
func TestClosings(t *testing.T) {
	for closing, want := range map[Closing][2]bool{ClientCloses: {true, false}, ServerCloses: {false, true}, ClientResets: {}} {
		t.Run(string(closing), func(t *testing.T) {
			p := mustPair(t)
			mustServe(t, p.server)
			result := mustRun(t, p.client, Work{
				Kind: Connect, Closing: closing, Targets: targets("10.0.0.2"), Clients: 2, Pause: time.Millisecond, Duration: 200 * time.Millisecond,
				Sources: mustOwnSources(t, p),
			})
			if result.Succeeded == 0 || result.Failed > 0 {
				t.Fatalf("%d succeeded, %d failed: %s", result.Succeeded, result.Failed, result.FirstError)
			}
			for i, ns := range []*lab.Namespace{p.client, p.server} {
				checkSources(t, ns, want[i])
			}
		})
	}
}

// mustOwnSources gives the client two further addresses.
func mustOwnSources(t *testing.T, p pair) []netip.Addr {
	t.Helper()
	prefix := netip.MustParsePrefix("198.18.0.0/30")
	lab.Must(t, Own(p.client, prefix), p.server.AddRoute(prefix, netip.MustParseAddr("10.0.0.1")))

	return []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("198.18.0.2")}
}

// checkSources checks whether a namespace remembers connections of both of these addresses.
func checkSources(t *testing.T, ns *lab.Namespace, want bool) {
	t.Helper()
	remembered := mustReadTCP(t, ns, timeWait)
	for _, source := range []string{"010012C6:", "020012C6:"} { // as the kernel writes them
		if got := strings.Contains(remembered, source); got != want {
			t.Errorf("%s has TIME_WAIT connections of %s: %v, want %v", ns.Name(), source, got, want)
		}
	}
}

// The states of connections, as /proc has them.
const established, timeWait = " 01 ", " 06 "

// mustReadTCP returns the connections of a namespace that are in a state.
func mustReadTCP(t *testing.T, ns *lab.Namespace, state string) string {
	t.Helper()
	found := ""
	lab.Must(t, ns.Do(func() error {
		table, err := os.ReadFile("/proc/thread-self/net/tcp")
		for line := range strings.Lines(string(table)) {
			if strings.Contains(line, state) {
				found += line
			}
		}

		return err
	}))

	return found
}

func TestRunRefusesWorkThatMakesNoSense(t *testing.T) {
	fine := Work{Kind: Connect, Targets: targets("10.0.0.2"), Clients: 1, Duration: time.Second}
	lab.Must(t, fine.validate())
	for name, spoil := range map[string]func(*Work){
		"unknown kind":                  func(w *Work) { w.Kind = "tcp" },
		"no targets":                    func(w *Work) { w.Targets = nil },
		"a target of IPv6":              func(w *Work) { w.Targets = targets("10.0.0.2", "fd00::2") },
		"no clients":                    func(w *Work) { w.Clients = 0 },
		"no duration":                   func(w *Work) { w.Duration = 0 },
		"a rate and a pause":            func(w *Work) { w.Rate, w.Pause = 1, 1 },
		"closing of no connection":      func(w *Work) { w.Kind, w.Closing = Exchange, ServerCloses },
		"sources of an open connection": func(w *Work) { w.Kind, w.Sources = Exchange, []netip.Addr{netip.MustParseAddr("10.0.0.1")} },
		"too many clients":              func(w *Work) { w.Clients = 257 },
		"negative rate":                 func(w *Work) { w.Rate = -1 },
		"target without port":           func(w *Work) { w.Targets = []netip.AddrPort{netip.AddrPortFrom(w.Targets[0].Addr(), 0)} },
	} {
		w := fine
		spoil(&w)
		if _, err := Run(t.Context(), nil, nil, w); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
