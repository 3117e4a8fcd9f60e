package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// deviceNode is a node that has an agent and no Services: tests of its
// devices use it.
type deviceNode struct {
	*sluice.Node
	t   testing.TB
	lab *lab.Node
}

// mustDeviceNode makes the first node of a cluster such a node, with an
// agent that is ready.
func mustDeviceNode(t testing.TB, cluster lab.Config, args ...string) *deviceNode {
	t.Helper()
	n := &deviceNode{t: t, lab: lab.MustNew(t, cluster).Nodes[0]}
	n.Node = sluice.MustNode(t, sluice.Config{
		Namespace: n.lab.Namespace,
		Cgroup:    lab.MustCgroup(t, "devices"),
		Manifests: t.TempDir(),
		Args:      args,
	})

	return n
}

// device is one in `sluice status`; it is empty if there is none.
func (n *deviceNode) device(name string) datapath.DeviceState {
	n.t.Helper()
	state, err := n.Status()
	lab.Must(n.t, err)
	i := slices.IndexFunc(state.Devices, func(d datapath.DeviceState) bool { return d.Name == name })
	if i < 0 {
		return datapath.DeviceState{}
	}

	return state.Devices[i]
}

// deviceTimeout is long: the programs of each kind of device are verified when
// the first one appears.
const deviceTimeout = time.Minute

// becomes waits until a device is of a class, and attached to, or neither.
func (n *deviceNode) becomes(name, class string) {
	n.t.Helper()
	lab.EventuallyIn(n.t, deviceTimeout, fmt.Sprintf("%s of class %q", name, class), func() error {
		if d := n.device(name); d.Name != name || d.Class != class || (d.Attached != "") != (class != "") || d.Problem != "" {
			return fmt.Errorf("it is %+v", d)
		}

		return nil
	})
}

func (n *deviceNode) veth(name string, peer *lab.Namespace) {
	n.t.Helper()
	lab.MustVeth(n.t, lab.End{Namespace: n.lab.Namespace, Device: name}, lab.End{Namespace: peer, Device: name})
}

// The defaults are right with the devices of every kind of CNI plugin.
func TestDeviceDefaults(t *testing.T) {
	const uplinks = "eth0 uplink veth with the network of 192.168.50.1/24\n" +
		"eth1 uplink veth with the network of 192.168.51.1/24\n"
	for _, test := range []struct {
		name   string
		config lab.Config
		want   string
	}{
		{"bridge", lab.Config{Attachment: lab.Bridged}, uplinks +
			"br0  bridge: its ports are attached\n" +
			"pod0 pods host end of a veth pair, port of br0\n" +
			"pod1 pods host end of a veth pair, port of br0\n"},
		{"Calico", lab.Config{Attachment: lab.Routed}, uplinks +
			"pod0 pods host end of a veth pair\n" +
			"pod1 pods host end of a veth pair\n"},
		{"kindnet", lab.Config{Attachment: lab.PointToPoint}, uplinks +
			"pod0 pods host end of a veth pair\n" +
			"pod1 pods host end of a veth pair\n"},
		{"flannel", lab.Config{Attachment: lab.Bridged, OverlayMTU: 1450}, uplinks +
			"vxlan0 uplink vxlan device\n" +
			"br0  bridge: its ports are attached\n" +
			"pod0 pods host end of a veth pair, port of br0\n" +
			"pod1 pods host end of a veth pair, port of br0\n"},
	} {
		t.Run("of "+test.name, func(t *testing.T) {
			t.Parallel()
			test.config.Nodes, test.config.PodsPerNode, test.config.SecondUplink = 2, 2, true
			n := mustDeviceNode(t, test.config)
			status, err := n.Status()
			lab.Must(t, err)
			var got []string
			for _, d := range status.Devices {
				got = append(got, strings.Join([]string{d.Name, d.Class, d.Reason}, " "))
				if (d.Attached != "") != (d.Class != "") || d.Problem != "" {
					t.Errorf("device %+v", d)
				}
			}
			want := strings.Split("lo  loopback\n"+strings.TrimSpace(test.want), "\n")
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			if out, err := n.Run("status"); err != nil || t.Failed() {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// eachAttachment runs a test with each way to attach that the kernel has.
func eachAttachment(t *testing.T, test func(t *testing.T, attach string)) {
	t.Helper()
	features, err := datapath.ProbeFeatures()
	lab.Must(t, err)
	for _, attach := range []string{"tcx", "clsact"} {
		t.Run(attach, func(t *testing.T) {
			if attach == "tcx" && !features.TCX {
				t.Skip("this kernel has no tcx (Linux 6.6)")
			}
			t.Parallel()
			test(t, attach)
		})
	}
}

// Devices appear, a hundred at once, and change in every way in which devices can.
func TestDevicesComeAndGo(t *testing.T) {
	eachAttachment(t, func(t *testing.T, attach string) {
		n := mustDeviceNode(t, lab.Config{Nodes: 1}, "--device-attach", attach)
		pod := lab.MustNamespace(t, "pod")
		handle := n.lab.Netlink()
		n.becomes("eth0", "uplink")

		n.veth("veth1", pod)
		n.becomes("veth1", "pods")
		if d := n.device("veth1"); string(d.Attached) != attach {
			t.Errorf("veth1 is attached by %s, want %s", d.Attached, attach)
		}
		lab.Must(t, n.lab.AddAddress("veth1", netip.MustParsePrefix("10.9.0.1/24")))
		n.becomes("veth1", "uplink")
		lab.Must(t, n.lab.RemoveAddress("veth1", netip.MustParsePrefix("10.9.0.1/24")))
		n.becomes("veth1", "pods")

		link, err := handle.LinkByName("veth1")
		lab.Must(t, err, n.lab.SetDown("veth1"), handle.LinkSetName(link, "veth2"))
		n.becomes("veth2", "pods")
		lab.Must(t, handle.LinkSetNsFd(link, int(pod.Handle())))
		lab.Eventually(t, "veth2 is gone", func() bool { return n.device("veth2").Name == "" })
		link, err = pod.Netlink().LinkByName("veth2")
		lab.Must(t, err, pod.Netlink().LinkSetNsFd(link, int(n.lab.Handle())))
		n.becomes("veth2", "pods")
		lab.Must(t, n.lab.RemoveDevice("veth2"))
		lab.Eventually(t, "veth2 is gone", func() bool { return n.device("veth2").Name == "" })

		const count = 100
		start := time.Now()
		for i := range count {
			n.veth(fmt.Sprintf("many%d", i), pod)
		}
		made := time.Since(start)
		n.becomes(fmt.Sprintf("many%d", count-1), "pods")
		sluice.MustWait(t, n.Node)
		t.Logf("%d devices: made in %v, attached after %v", count, made, time.Since(start))
		for i := range count {
			lab.Must(t, n.lab.RemoveDevice(fmt.Sprintf("many%d", i)))
		}
		lab.Eventually(t, "all are gone", func() bool { return n.device(fmt.Sprintf("many%d", count-1)).Name == "" })
		sluice.MustWait(t, n.Node)
		if !strings.Contains(n.Log(), "msg=device name=veth1") {
			t.Error("no decision is logged")
		}
	})
}

// Flags select devices and how they are attached; another agent may have other flags.
func TestDeviceFlags(t *testing.T) {
	eachAttachment(t, func(t *testing.T, attach string) {
		other := map[string]string{"tcx": "clsact", "clsact": "tcx"}[attach]
		n := mustDeviceNode(t, lab.Config{Nodes: 1, PodsPerNode: 2}, "--device-attach", attach)
		n.becomes("pod0", "pods")

		sluice.MustRestart(n.t, n.Node, "--device-attach", attach, "--exclude-devices", "pod1,x*")
		n.becomes("pod0", "pods")
		n.becomes("pod1", "")
		if reason := n.device("pod1").Reason; reason != "excluded by --exclude-devices pod1" {
			t.Errorf("pod1: %q", reason)
		}
		sluice.MustRestart(n.t, n.Node, "--device-attach", attach, "--devices", "eth*,pod1=uplink", "--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "eth")
		n.becomes("eth0", "uplink")
		n.becomes("pod0", "")
		n.becomes("pod1", "uplink")

		if features, err := datapath.ProbeFeatures(); err != nil || !features.TCX {
			return // there is no other
		}
		sluice.MustRestart(n.t, n.Node, "--device-attach", other)
		for _, name := range []string{"eth0", "pod0", "pod1"} {
			if d := n.device(name); string(d.Attached) != other || d.Problem != "" {
				t.Errorf("%s is %+v, want %s", name, d, other)
			}
		}
	})
}

// Programs stay attached without an agent, and `sluice cleanup` detaches them.
func TestDevicesWithoutAnAgent(t *testing.T) {
	eachAttachment(t, func(t *testing.T, attach string) {
		n := mustDeviceNode(t, lab.Config{Nodes: 1, PodsPerNode: 1}, "--device-attach", attach)
		n.becomes("pod0", "pods")
		lab.Must(t, n.Kill())
		for _, name := range []string{"eth0", "pod0"} {
			if d := n.device(name); string(d.Attached) != attach || d.Problem != "" || d.Class != "" {
				t.Errorf("%s is %+v, want %s", name, d, attach)
			}
		}
		_, err := n.Run("cleanup")
		lab.Must(t, err)
		status, err := n.Status()
		lab.Must(t, err)
		for _, d := range status.Devices {
			if d.Attached != "" || d.Problem != "" {
				t.Errorf("%+v is left", d)
			}
		}
	})
}

// Another program detaches ours: the status reports it, and the agent attaches them again.
func TestDevicesAreAttachedAgain(t *testing.T) {
	t.Parallel() // it waits for the agent's next check, 30 s
	n := mustDeviceNode(t, lab.Config{Nodes: 1, PodsPerNode: 1}, "--device-attach", "clsact")
	n.becomes("pod0", "pods")
	link, err := n.lab.Netlink().LinkByName("pod0")
	lab.Must(t, err)
	qdiscs, err := n.lab.Netlink().QdiscList(link)
	lab.Must(t, err)
	for _, qdisc := range qdiscs {
		if qdisc.Type() == "clsact" {
			lab.Must(t, n.lab.Netlink().QdiscDel(qdisc))
		}
	}
	status, err := n.Status()
	lab.Must(t, err)
	if d := n.device("pod0"); d.Problem != "not attached" || status.Well() {
		t.Errorf("pod0 is %+v; all is well: %t", d, status.Well())
	}
	lab.Eventually(t, "pod0 is attached again", func() bool { return n.device("pod0").Attached != "" })
}
