package datapath

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// called is what an event reports of a call.
type called struct {
	Kind             uint8
	Reason           maps.Reason
	Proto            uint8
	Client, To       string
	Service, Backend uint32
	PID              uint32
	Comm             string
	Cgroup, Netns    uint64
}

func calledOf(e maps.MonitorEvent) called {
	var comm strings.Builder
	for _, c := range e.Comm {
		if c != 0 {
			comm.WriteByte(byte(c))
		}
	}

	return called{
		Kind: e.Kind, Reason: maps.Reason(e.Reason), Proto: e.Proto,
		Client: e.Client.IP().String(), To: netip.AddrPortFrom(e.OriginalDst.IP(), maps.Port(e.OriginalPort)).String(),
		Service: e.ServicePortId, Backend: e.BackendId, PID: e.Pid, Comm: comm.String(), Cgroup: e.CgroupId, Netns: e.NetnsCookie,
	}
}

// A socket hook reports each new flow with the backend that it got, and each refusal, with the process
// that called. A datagram of a flow that lives is not reported, nor is other traffic.
func TestEventsAtSockets(t *testing.T) {
	w := newWorld(t)
	w.needsErrors(t)
	w.addRefusals(t)
	w.mark(t, w.node.IPv4, maps.AddrNode)
	tcp := w.add(t, service{proto: "tcp", at: []string{"10.96.1.1:80", "[fd00:96::11]:80"}, to: w.all4()[:1]})
	udp := w.add(t, service{proto: "udp", at: []string{"10.96.1.1:80", "[fd00:96::11]:80"}, to: w.all4()[:1]})
	listener, err := w.Maps().Listen()
	lab.Must(t, err)
	defer listener.Close()
	client, host := w.pod(t), w.host(t)
	cgroup, err := w.cgroup.ID()
	lab.Must(t, err)
	of := map[*lab.Caller]called{
		client: {PID: uint32(client.PID()), Client: w.client.IPv4.String(), Netns: mustCookie(t, w.client.Namespace), Cgroup: cgroup},
		host:   {PID: uint32(host.PID()), Client: "::", Netns: mustCookie(t, w.node.Namespace), Cgroup: cgroup},
	}
	connect := func(c *lab.Caller, network, at string) { _ = mustSocket(t, c, network).Connect(at) }
	twice := func(c *lab.Caller, network, at string) {
		s := mustSocket(t, c, network)
		_, _ = s.SendTo("who", at), s.SendTo("who", at)
	}
	const translated, refused = maps.MonitorTranslated, maps.MonitorRefused

	for _, test := range []struct {
		name    string
		call    func(*lab.Caller, string, string)
		from    *lab.Caller
		network string
		at      string
		want    []called
	}{
		{"connect of a pod", connect, client, "tcp4", "10.96.1.1:80",
			[]called{{Kind: translated, Reason: maps.ReasonTranslated, Service: tcp.id, Backend: tcp.backends[0]}}},
		{"connect of the node", connect, host, "tcp4", "10.96.1.1:80",
			[]called{{Kind: translated, Reason: maps.ReasonTranslated, Service: tcp.id, Backend: tcp.backends[0]}}},
		{"connect over IPv6", connect, client, "tcp6", "[fd00:96::11]:80",
			[]called{{Kind: translated, Reason: maps.ReasonTranslated, Service: tcp.id, Backend: tcp.backends[0], Client: w.client.IPv6.String()}}},
		{"connect of UDP", connect, client, "udp4", "10.96.1.1:80",
			[]called{{Kind: translated, Reason: maps.ReasonTranslated, Service: udp.id, Backend: udp.backends[0]}}},
		{"the first datagram of two", twice, client, "udp4", "10.96.1.1:80",
			[]called{{Kind: translated, Reason: maps.ReasonTranslated, Service: udp.id, Backend: udp.backends[0]}}},
		{"a refused connect", connect, client, "tcp4", "10.96.0.2:80",
			[]called{{Kind: refused, Reason: maps.ReasonRejectNoBackend, Service: w.idOf(t, "tcp", "10.96.0.2:80")}}},
		{"a connect to an unallocated address over IPv6", connect, host, "tcp6", "[fd00:96::7]:80",
			[]called{{Kind: refused, Reason: maps.ReasonDropUnallocated}}},
		{"each refused datagram", twice, client, "udp4", "10.96.0.3:80", []called{
			{Kind: refused, Reason: maps.ReasonDropNoLocalBackend, Service: w.idOf(t, "udp", "10.96.0.3:80")},
			{Kind: refused, Reason: maps.ReasonDropNoLocalBackend, Service: w.idOf(t, "udp", "10.96.0.3:80")},
		}},
		{"no other traffic", connect, client, "tcp4", w.v4(1), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			begin := now()
			test.call(test.from, test.network, test.at)
			var got []called
			for {
				e, ok, err := listener.Read(time.Now().Add(10 * time.Millisecond))
				lab.Must(t, err)
				if !ok {
					break
				}
				if e.Time < begin || e.Time > now() {
					t.Errorf("it happened at %d, after %d and before %d", e.Time, begin, now())
				}
				one := calledOf(e)
				if one.Comm == "" {
					t.Error("the process has no name")
				}
				one.Comm = ""
				got = append(got, one)
			}
			for i := range test.want {
				want, base := &test.want[i], of[test.from]
				want.Proto, want.To = protocol(test.network[:3]), test.at
				want.PID, want.Netns, want.Cgroup = base.PID, base.Netns, base.Cgroup
				if want.Client == "" {
					want.Client = base.Client
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

// idOf returns the service port id of a frontend.
func (w *world) idOf(t testing.TB, proto, at string) uint32 {
	t.Helper()
	a := netip.MustParseAddrPort(at)
	_, pool, ok, err := w.Maps().FrontendOf(maps.FrontendKeyOf(a.Addr(), a.Port(), protocol(proto), maps.ScopeInternal))
	lab.Must(t, err)
	if !ok {
		t.Fatalf("no frontend at %s", at)
	}

	return pool.ServicePortId
}

// Refusals of sockets are kept while no one listens, but for those of the agent's own probes.
func TestRefusalsAtSocketsAreKept(t *testing.T) {
	w := newWorld(t)
	w.addRefusals(t)
	probe := netip.AddrPortFrom(ProbeAddr, CommonProbePort).String()
	w.add(t, service{proto: "tcp", at: []string{probe}})
	client := w.pod(t)
	for _, at := range []string{probe, "10.96.0.2:80", "10.96.7.7:80"} {
		if err := mustSocket(t, client, "tcp4").Connect(at); err == nil {
			t.Fatalf("connect to %s succeeds", at)
		}
	}
	recent, err := w.Maps().RecentRefusals()
	lab.Must(t, err)
	var got []string
	for _, e := range recent {
		got = append(got, calledOf(e).Client+" to "+calledOf(e).To+": "+maps.Reason(e.Reason).Label())
	}
	want := []string{
		w.client.IPv4.String() + " to 10.96.0.2:80: reject_no_backend",
		w.client.IPv4.String() + " to 10.96.7.7:80: drop_unallocated",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
}

// now is the clock of programs.
func now() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)

	return uint64(now.Nano())
}
