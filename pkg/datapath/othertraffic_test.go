package datapath

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Sockets that do not dial a Service are not touched.
func TestOtherTraffic(t *testing.T) {
	w := newWorld(t)
	w.serviceCIDRs(t, "10.96.0.0/16", "fd00:96::/112")
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{"10.96.0.1:8080"}, to: w.all4()})
		w.add(t, service{proto: proto, at: []string{"203.0.113.1:80"}, to: w.all4()})
	}
	client := w.pod(t)

	for _, proto := range []string{"tcp", "udp"} {
		for _, at := range []string{w.v4(0), w.v6(0), "[::ffff:" + w.answers[0].IPv4.String() + "]:8080"} {
			t.Run(proto+" to "+at, func(t *testing.T) {
				counted := w.counted(t, func() {
					reply, err := client.Request(network(proto, at), at)
					lab.Must(t, err)
					if name := mustAnswer(t, reply.Text).Name; name != "red" || reply.Peer.String() != at {
						t.Errorf("%s answered, and getpeername is %s", name, reply.Peer)
					}
				})
				if diff := cmp.Diff(map[maps.Reason]uint64{maps.ReasonPassNoFrontend: 1}, counted); diff != "" {
					t.Errorf("reasons (-want +got):\n%s", diff)
				}
			})
		}
	}
	for name, proto := range map[string]string{"TCP": "tcp4", "UDP": "udp4"} {
		t.Run(name+" to another port of an external address", func(t *testing.T) {
			counted := w.counted(t, func() {
				s := mustSocket(t, client, proto)
				lab.Must(t, s.SetTimeout(1)) // no answer comes
				_ = s.Connect("203.0.113.1:81")
			})
			if diff := cmp.Diff(map[maps.Reason]uint64{maps.ReasonPassNoFrontend: 1}, counted); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
		})
	}
}

// Other protocols at the address of a Service are not touched.
func TestOtherProtocols(t *testing.T) {
	w := newWorld(t)
	const at = "10.96.0.1:80"
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{at}, to: w.all4()})
	}
	lab.Must(t, w.client.Sysctl("net/ipv4/ping_group_range", "0 0"))

	for _, test := range []struct {
		name           string
		kind, protocol int
		reasons        map[maps.Reason]uint64
	}{
		{"passed: ping", unix.SOCK_DGRAM, unix.IPPROTO_ICMP, map[maps.Reason]uint64{maps.ReasonPassProtocol: 1}},
		{"not seen: UDP-Lite", unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE, map[maps.Reason]uint64{}},
		{"not seen: raw UDP", unix.SOCK_RAW, unix.IPPROTO_UDP, map[maps.Reason]uint64{}},
		{"not seen: SCTP", unix.SOCK_STREAM, unix.IPPROTO_SCTP, map[maps.Reason]uint64{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.protocol == unix.IPPROTO_ICMP && !w.Features().SetRetval {
				t.Skip("connects of ping sockets have hooks since Linux 6.1, as has bpf_set_retval")
			}
			counted := w.counted(t, func() {
				printed := w.play(t, w.client.Namespace, "datagram of", at, strconv.Itoa(test.kind), strconv.Itoa(test.protocol))
				if strings.HasPrefix(printed, "no socket") {
					t.Skip(printed)
				}
				if !strings.HasPrefix(printed, "connected to 10.96.0.1:") {
					t.Errorf("got %q, want it connected to the address as it is", printed)
				}
			})
			if diff := cmp.Diff(test.reasons, counted); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
		})
	}
}

// sceneDatagramOf connects a socket of type args[1] and protocol args[2].
func sceneDatagramOf(args []string) (string, error) {
	kind, _ := strconv.Atoi(args[1])
	protocol, _ := strconv.Atoi(args[2])
	fd, err := unix.Socket(unix.AF_INET, kind, protocol)
	if err != nil {
		return fmt.Sprintf("no socket: this kernel has no protocol %d: ", protocol), err
	}
	if err := unix.Connect(fd, sockaddr(args[0])); err != nil {
		return "", err
	}
	peer, err := unix.Getpeername(fd)
	if err != nil {
		return "", err
	}

	return "connected to " + addrPort(peer).String(), nil
}
