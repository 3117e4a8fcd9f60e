package datapath

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// addRefusals publishes services that refuse, for both protocols and families.
func (w *world) addRefusals(t testing.TB) {
	t.Helper()
	w.serviceCIDRs(t, "10.96.0.0/16", "fd00:96::/112")
	for _, at := range []string{"10.96.0.1:0", "[fd00:96::1]:0"} {
		w.add(t, service{proto: "tcp", at: []string{at}})
	}
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{"10.96.0.1:80"}, to: w.all4()})
		w.add(t, service{proto: proto, at: []string{"10.96.0.2:80", "[fd00:96::2]:80"}})
		w.add(t, service{proto: proto, at: []string{"10.96.0.3:80", "[fd00:96::3]:80"}, flags: maps.PoolDropIfEmpty})
		broken := w.add(t, service{proto: proto, at: []string{"10.96.0.4:80", "[fd00:96::4]:80"}, to: w.all4()})
		w.forget(t, broken.backends...)
	}
}

var refusals = []struct {
	name   string
	at     []string
	reason maps.Reason
	err    unix.Errno
}{
	{"no backend", []string{"10.96.0.2:80", "[fd00:96::2]:80"}, maps.ReasonRejectNoBackend, unix.ECONNREFUSED},
	{"no local backend", []string{"10.96.0.3:80", "[fd00:96::3]:80"}, maps.ReasonDropNoLocalBackend, unix.EHOSTUNREACH},
	{"another port of a ClusterIP", []string{"10.96.0.1:81", "[fd00:96::1]:81"}, maps.ReasonRejectNoPort, unix.ECONNREFUSED},
	{"port 0 of a ClusterIP", []string{"10.96.0.1:0", "[fd00:96::1]:0"}, maps.ReasonRejectNoPort, unix.ECONNREFUSED},
	{"an unallocated address", []string{"10.96.7.7:80", "[fd00:96::7]:80"}, maps.ReasonDropUnallocated, unix.EHOSTUNREACH},
	{"a slot without its backend", []string{"10.96.0.4:80", "[fd00:96::4]:80"}, maps.ReasonDropBackendMissing, unix.EHOSTUNREACH},
}

// System calls return an error if a Service refuses the client, but for a connect() of UDP, which sends nothing:
// devices refuse the datagrams.
func TestRefusals(t *testing.T) {
	w := newWorld(t)
	w.needsErrors(t)
	w.addRefusals(t)
	client := w.pod(t)

	for _, test := range refusals {
		for _, at := range append(test.at, "[::ffff:"+test.at[0][:9]+"]"+test.at[0][9:]) {
			for name, call := range map[string]func() error{
				"connect":        func() error { return mustSocket(t, client, network("tcp", at)).Connect(at) },
				"connect of UDP": func() error { return mustSocket(t, client, network("udp", at)).Connect(at) },
				"sendto":         func() error { return mustSocket(t, client, network("udp", at)).SendTo("who", at) },
			} {
				t.Run(test.name+" in "+name+" to "+at, func(t *testing.T) {
					err, reason := error(test.err), map[maps.Reason]uint64{test.reason: 1}
					switch {
					case name == "connect of UDP":
						err, reason = nil, map[maps.Reason]uint64{maps.ReasonPassDisabled: 1}
					case name == "sendto" && at[len(at)-2:] == ":0":
						err, reason = unix.EINVAL, map[maps.Reason]uint64{} // by the kernel
					}
					counted := w.counted(t, func() {
						if got := call(); !errors.Is(got, err) {
							t.Errorf("got %v, want %v", got, err)
						}
					})
					if diff := cmp.Diff(reason, counted); diff != "" {
						t.Errorf("reasons (-want +got):\n%s", diff)
					}
				})
			}
		}
	}
}

// Programs connect a UDP socket to learn which address they would have, without sending anything: to whatever
// address and port, the socket has that peer, and the client's address.
func TestConnectOfUDPTellsOwnAddress(t *testing.T) {
	w := newWorld(t)
	w.addRefusals(t)
	w.add(t, service{proto: "udp", at: []string{"10.96.0.5:80", "[fd00:96::5]:80"}, to: w.all4(), ranges: []string{"203.0.113.0/24"}})
	addresses := []string{"10.96.0.5:80", "[fd00:96::5]:80"}
	for _, test := range refusals {
		addresses = append(addresses, test.at...)
	}
	client := w.pod(t)
	for _, at := range addresses {
		own := w.client.IPv4
		if family(at) == unix.AF_INET6 {
			own = w.client.IPv6
		}
		s := mustSocket(t, client, network("udp", at))
		lab.Must(t, s.Connect(at))
		if local, err := s.Local(); err != nil || local.Addr() != own {
			t.Errorf("connected to %s: getsockname: %s, %v, want %s", at, local, err, own)
		}
		if peer, err := s.Peer(); netip.MustParseAddrPort(at).Port() != 0 && (err != nil || peer.String() != at) {
			t.Errorf("connected to %s: getpeername: %s, %v", at, peer, err)
		}
	}
}

// network is proto in the family of an address.
func network(proto, address string) string {
	if family(address) == unix.AF_INET {
		return proto + "4"
	}

	return proto + "6"
}

// Before Linux 6.1 a connect that is refused goes to a port at which nothing listens.
func TestRefusalsOfOldKernels(t *testing.T) {
	w := newOldWorld(t)
	w.addRefusals(t)
	client := w.pod(t)

	for _, test := range refusals {
		for _, at := range append(test.at, "[::ffff:"+test.at[0][:9]+"]"+test.at[0][9:]) {
			t.Run(test.name+" at "+at, func(t *testing.T) {
				if err := mustSocket(t, client, network("tcp", at)).Connect(at); lab.Errno(err) != unix.ECONNREFUSED {
					t.Errorf("connect: %v, want %v", err, unix.ECONNREFUSED)
				}
				if err := mustSocket(t, client, network("udp", at)).Connect(at); err != nil {
					t.Errorf("connect of UDP: %v, want it to succeed", err)
				}
			})
		}
	}
	t.Run("a datagram", func(t *testing.T) {
		if err := mustSocket(t, client, "udp4").SendTo("who", "10.96.0.2:80"); lab.Errno(err) != unix.EPERM {
			t.Errorf("sendto: %v, want %v", err, unix.EPERM)
		}
	})
	t.Run("nothing for a Service with backends", func(t *testing.T) {
		if _, err := client.Request("tcp4", "10.96.0.1:80"); err != nil {
			t.Error(err)
		}
	})
}

// One backend of many may be missing for a moment.
func TestMissingBackends(t *testing.T) {
	w := newWorld(t)
	s := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: w.all4()})
	w.forget(t, s.backends[0], s.backends[2])
	client := w.pod(t)
	for range 30 {
		reply, err := client.Request("tcp4", "10.96.0.1:80")
		if err != nil {
			t.Fatalf("with one backend of three: %v", err)
		}
		if name := mustAnswer(t, reply.Text).Name; name != "green" {
			t.Errorf("%s answered, want green", name)
		}
	}
}

// What dials the address of a Service that another proxy serves is left to that proxy.
func TestOtherProxy(t *testing.T) {
	w := newWorld(t)
	w.addRefusals(t)
	pod := w.pod(t)
	for _, at := range []string{"10.96.7.7:80", "[fd00:96::7]:80"} {
		lab.Must(t, w.hand().OtherProxy(netip.MustParseAddrPort(at).Addr()))
		counted := w.counted(t, func() { _ = mustSocket(t, pod, network("udp", at)).Connect(at) })
		if diff := cmp.Diff(map[maps.Reason]uint64{maps.ReasonPassNoFrontend: 1}, counted); diff != "" {
			t.Errorf("reasons of %s (-want +got):\n%s", at, diff)
		}
	}
}
