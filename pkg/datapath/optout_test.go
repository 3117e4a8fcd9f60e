package datapath

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	optedOutUID = "0b62f5c4-7d0e-4a3e-9d51-6a1f0c2b9e8f"
	otherUID    = "0b62f5c4-7d0e-4a3e-9d51-6a1f0c2b9e80"
)

// optOut makes a pod's sockets be left alone, as the agent does.
func (w *world) optOut(t testing.TB, uid string) {
	t.Helper()
	for _, text := range []string{uid, strings.ReplaceAll(uid, "-", "_")} {
		pod, ok := maps.PodUIDOf(text)
		if !ok {
			t.Fatalf("%q is no UID", text)
		}
		lab.Must(t, w.Maps().OptedOut.Put(pod, 1))
	}
}

// A pod that has opted out is recognized by the cgroup of its processes, as kubelets name it.
func TestPodOptOut(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PodOptOut = true })
	const vip4, vip6 = "10.96.0.1:80", "[fd00:96::1]:80"
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{vip4}, to: []string{w.v4(0)}})
		w.add(t, service{proto: proto, at: []string{vip6}, to: []string{w.v6(0)}})
	}
	w.optOut(t, optedOutUID)
	systemd := func(uid string) string {
		return "kubelet-kubepods-besteffort-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"
	}
	scope := "cri-containerd-" + strings.Repeat("0123456789abcdef", 4) + ".scope"

	for _, test := range []struct {
		name   string
		cgroup string
		ns     *lab.Namespace
		left   bool
	}{
		{"left alone, with cgroupfs", "kubepods-1/burstable/pod" + optedOutUID + "/" + strings.Repeat("0123456789abcdef", 4), w.client.Namespace, true},
		{"left alone, with systemd", "kubepods-2.slice/" + systemd(optedOutUID) + "/" + scope, w.client.Namespace, true},
		{"left alone in a cgroup that a container has made", "kubepods-3.slice/" + systemd(optedOutUID) + "/" + scope + "/system.slice/x.service", w.client.Namespace, true},
		{"left alone in a pod of a cluster in it", "kubepods-8/pod" + optedOutUID + "/x/kubelet/kubepods/burstable/pod" + otherUID + "/y", w.client.Namespace, true},
		{"left alone far below", "kubepods-9/pod" + optedOutUID + strings.Repeat("/x", 40), w.client.Namespace, true},
		{"translated in another pod, with cgroupfs", "kubepods-4/pod" + otherUID + "/x", w.client.Namespace, false},
		{"translated in another pod, with systemd", "kubepods-5.slice/" + systemd(otherUID) + "/" + scope, w.client.Namespace, false},
		{"translated in no pod", "kubepods-6/" + optedOutUID, w.client.Namespace, false},
		{"translated in the network of the node", "kubepods-7/pod" + optedOutUID + "/x", w.node.Namespace, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.ns == w.node.Namespace {
				w.needsNode(t)
			}
			cgroup := w.cgroup
			for name := range strings.SplitSeq(test.cgroup, "/") {
				child, err := cgroup.Child(name)
				lab.Must(t, err)
				cgroup = child
			}
			client := lab.MustCaller(t, test.ns, cgroup)
			want := map[maps.Reason]uint64{maps.ReasonTranslated: 1}
			if test.left {
				want = map[maps.Reason]uint64{maps.ReasonPassDisabled: 1}
			}
			for _, at := range []string{vip4, vip6} {
				for act, dial := range map[string]func(*lab.Socket) error{
					"tcp connect": func(s *lab.Socket) error { return s.Connect(at) },
					"udp connect": func(s *lab.Socket) error { return s.Connect(at) },
					"udp sendto":  func(s *lab.Socket) error { return s.SendTo("who\n", at) },
				} {
					counted := w.counted(t, func() {
						s := mustSocket(t, client, network(act[:3], at))
						lab.Must(t, s.SetTimeout(50*time.Millisecond)) // what is left alone gets no answer here
						_ = dial(s)
					})
					if diff := cmp.Diff(want, counted); diff != "" {
						t.Errorf("%s to %s (-want +got):\n%s", act, at, diff)
					}
				}
			}
		})
	}
}

// Pods whose UID no cgroup has cannot be recognized.
func TestPodsWithCgroup(t *testing.T) {
	root := lab.MustCgroup(t, "kubelet")
	for _, name := range []string{"kubepods-pod" + strings.ReplaceAll(optedOutUID, "-", "_") + ".slice", otherUID} {
		_, err := root.Child(name)
		lab.Must(t, err)
	}
	found, err := PodsWithCgroup(root.Path(), []string{optedOutUID, otherUID})
	lab.Must(t, err)
	if diff := cmp.Diff(map[string]bool{optedOutUID: true}, found); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A socket that got a backend keeps it when its pod opts out.
func TestPodOptOutLater(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PodOptOut = true })
	const vip = "10.96.0.1:80"
	w.add(t, service{proto: "udp", at: []string{vip}, to: []string{w.v4(0)}})
	cgroup, err := w.cgroup.Child("pod" + optedOutUID)
	lab.Must(t, err)
	s := mustSocket(t, lab.MustCaller(t, w.client.Namespace, cgroup), "udp4")
	lab.Must(t, s.SetTimeout(10*time.Second), s.Connect(vip))
	w.optOut(t, optedOutUID)

	for _, send := range []func() error{
		func() error { return s.Send("who\n") },
		func() error { return s.SendTo("who\n", vip) },
	} {
		lab.Must(t, send())
		text, from, err := s.Recv()
		lab.Must(t, err)
		if name := mustAnswer(t, text).Name; name != "red" || from.String() != vip {
			t.Errorf("%s answered from %s, want red from %s", name, from, vip)
		}
	}
}

// Sockets of pods are left alone if the Service has opted out; those of the node are not.
func TestServiceOptOut(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	const vip = "10.96.0.1:80"
	w.add(t, service{proto: "udp", at: []string{vip}, to: []string{w.v4(0)}, flags: maps.PoolOptedOut})
	for _, test := range []struct {
		name   string
		client *lab.Caller
		want   maps.Reason
	}{
		{"left alone in a pod", w.pod(t), maps.ReasonPassDisabled},
		{"translated on the node", w.host(t), maps.ReasonTranslated},
	} {
		t.Run(test.name, func(t *testing.T) {
			counted := w.counted(t, func() { lab.Must(t, mustSocket(t, test.client, "udp4").Connect(vip)) })
			if diff := cmp.Diff(map[maps.Reason]uint64{test.want: 1}, counted); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
		})
	}
}

// A ClusterIP that the node has as an address is served by the sockets of the node that are bound
// to it.
func TestClusterIPOfNode(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	lab.MustServe(t, w.node.Namespace, "wildcard", ":54")
	for _, vip := range []string{"10.96.0.10", "fd00:96::10"} {
		addr := netip.MustParseAddr(vip)
		at := func(port uint16) string { return netip.AddrPortFrom(addr, port).String() }
		to := w.v4(0)
		if addr.Is6() {
			to = w.v6(0)
		}
		lab.Must(t, w.node.AddAddress("lo", netip.PrefixFrom(addr, addr.BitLen())))
		w.mark(t, addr, maps.AddrNode)
		lab.MustServe(t, w.node.Namespace, "cache", at(53))
		for _, proto := range []string{"tcp", "udp"} {
			w.add(t, service{proto: proto, at: []string{at(53), at(54), at(55)}, to: []string{to}})
			w.add(t, service{proto: proto, at: []string{at(0)}})
			host, pod := w.host(t), w.pod(t)
			for port, want := range map[uint16]string{53: "cache", 54: "red", 55: "red"} {
				t.Run(proto+" to "+at(port)+" is answered by "+want, func(t *testing.T) {
					reply, err := host.Request(network(proto, at(port)), at(port))
					lab.Must(t, err)
					if name := mustAnswer(t, reply.Text).Name; name != want {
						t.Errorf("%s answered", name)
					}
				})
			}
			t.Run(proto+" from a pod to "+vip+" is left to the device", func(t *testing.T) {
				counted := w.counted(t, func() {
					s := mustSocket(t, pod, network(proto, at(55)))
					lab.Must(t, s.SetTimeout(50*time.Millisecond))
					_ = s.Connect(at(55))
				})
				if diff := cmp.Diff(map[maps.Reason]uint64{maps.ReasonPassDisabled: 1}, counted); diff != "" {
					t.Errorf("reasons (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// A connection of the agent is left alone at an address that is a Service's as well, and carries no mark: TCP sockets of the
// node's own namespace alone. At an address that is no Service's, the agent takes the mark off itself.
func TestConnectionOfTheAgent(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	w.add(t, service{proto: "tcp", at: []string{w.v4(2)}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "udp", at: []string{w.v4(2)}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{w.v6(2)}, to: []string{w.v6(0)}})
	mapped := "[::ffff:" + w.answers[2].IPv4.String() + "]:8080"

	for _, test := range []struct {
		name, network, address string
		from                   *lab.Caller
		mark                   int
		apart                  bool
	}{
		{"left alone", "tcp4", w.v4(2), w.host(t), bpf.AgentMark, true},
		{"left alone, by IPv6", "tcp6", w.v6(2), w.host(t), bpf.AgentMark, true},
		{"left alone, by an IPv6 socket", "tcp6", mapped, w.host(t), bpf.AgentMark, true},
		{"translated without a mark", "tcp4", w.v4(2), w.host(t), 0, false},
		{"translated with another mark", "tcp4", w.v4(2), w.host(t), 0x4000, false},
		{"translated in a pod", "tcp4", w.v4(2), w.pod(t), bpf.AgentMark, false},
		{"translated over UDP", "udp4", w.v4(2), w.host(t), bpf.AgentMark, false},
		{"marked at an address that is no Service's", "tcp4", w.v4(0), w.host(t), bpf.AgentMark, false},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			socket, err := test.from.Socket(test.network)
			lab.Must(t, err)
			defer socket.Close()
			lab.Must(t, socket.SetOption(unix.SOL_SOCKET, unix.SO_MARK, test.mark), socket.Connect(test.address), socket.Send("who\n"))
			text, _, err := socket.Recv()
			lab.Must(t, err)
			if got, want := mustAnswer(t, text).Name, map[bool]string{true: colours[2], false: colours[0]}[test.apart]; got != want {
				t.Errorf("%s answers, want %s", got, want)
			}
			want := test.mark
			if test.apart {
				want = 0
			}
			if mark, err := socket.Option(unix.SOL_SOCKET, unix.SO_MARK); err != nil || mark != want {
				t.Errorf("the mark is %#x, %v, want %#x", mark, err, want)
			}
		})
	}
}
