package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Addresses of Services, in both families: one that also the network of a pod has, one that no Service has, and
// one that only the node knows.
var (
	nestedVIPs      = []string{"10.96.0.7:80", "[fd00:96::7]:80"}
	unallocatedVIPs = []string{"10.96.0.9:80", "[fd00:96::9]:80"}
	outerVIPs       = []string{"10.96.0.1:80", "[fd00:96::1]:80"}
)

// newNested makes a world with devices, in which a container is behind the client pod, as a cluster in a pod has
// them. In the network of that pod, "nested" serves addresses of which the node has other Services.
//
//	node ─┬─ client 10.244.1.2, lo: 10.96.0.7, 10.96.0.9 ── container 172.18.0.2
//	      └─ red, green, blue
func newNested(t *testing.T) (w *world, container *lab.Namespace) {
	t.Helper()
	w = buildWorldBy(t, lab.Routed)
	w.Datapath = w.mustOpen(t, w.cfg)
	w.needsNode(t)
	w.mustAttach(t)
	w.mustAttachPods(t)
	for _, proto := range []string{"tcp", "udp"} {
		for _, vips := range [][]string{outerVIPs, nestedVIPs} {
			w.add(t, service{proto: proto, at: []string{vips[0]}, to: []string{w.v4(0)}})
			w.add(t, service{proto: proto, at: []string{vips[1]}, to: []string{w.v6(0)}})
		}
	}
	w.serviceCIDRs(t, "10.96.0.0/12", "fd00:96::/112")
	for _, at := range append(nestedVIPs, unallocatedVIPs...) {
		addr := netip.MustParseAddrPort(at).Addr()
		lab.Must(t, w.client.AddAddress("lo", netip.PrefixFrom(addr, addr.BitLen())))
		lab.MustServe(t, w.client.Namespace, "nested", at)
	}
	// As Docker does, the pod forwards what the container sends, by its own address.
	lab.Must(t, w.client.Sysctl("net/ipv4/ip_forward", "1"), w.client.Sysctl("net/ipv6/conf/all/forwarding", "1"),
		w.client.Netfilter(`table inet nat { chain post { type nat hook postrouting priority 100; oifname "eth0" masquerade; }; }`))

	return w, w.behind(t, w.client.Namespace, "container", "172.18.0")
}

// behind makes a namespace whose only way out is another one. The network is the first three bytes of its IPv4 addresses.
func (w *world) behind(t *testing.T, pod *lab.Namespace, name, network string) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, name)
	v6 := "fd00:" + network[len(network)-1:] + "::"
	lab.MustVeth(t,
		lab.End{Namespace: ns, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(network + ".2/24"), netip.MustParsePrefix(v6 + "2/64")}},
		lab.End{Namespace: pod, Device: name, Addresses: []netip.Prefix{netip.MustParsePrefix(network + ".1/24"), netip.MustParsePrefix(v6 + "1/64")}})
	lab.Must(t, ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(network+".1")),
		ns.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr(v6+"1")))

	return ns
}

// What a container in a pod dials is what the pod makes of it, and so is an address of the pod itself. What leaves
// the pod is the node's to translate, at the pod's device.
func TestBehindPod(t *testing.T) {
	w, container := newNested(t)
	inContainer, inPod := lab.MustCaller(t, container, w.cgroup), w.pod(t)
	for _, test := range []struct {
		name   string
		client *lab.Caller
		dial   []string
		answer string
		left   bool // the socket is left alone
	}{
		{"a Service of the pod's network, from the container", inContainer, nestedVIPs, "nested", true},
		{"an address that no Service has, from the container", inContainer, unallocatedVIPs, "nested", true},
		{"a Service, from the container", inContainer, outerVIPs, "red", true},
		{"an address of the pod, from the pod", inPod, nestedVIPs, "nested", true},
		{"an address of the pod that no Service has, from the pod", inPod, unallocatedVIPs, "nested", true},
		{"a Service, from the pod", inPod, outerVIPs, "red", false},
		{"a Service that an address of the pod hides, from another pod", lab.MustCaller(t, w.answers[1].Namespace, w.cgroup), nestedVIPs, "red", false},
		{"a Service, from the node", w.host(t), nestedVIPs, "red", false},
	} {
		for _, at := range test.dial {
			for _, proto := range []string{"tcp", "udp"} {
				t.Run(test.name+", "+network(proto, at), func(t *testing.T) {
					counted := w.counted(t, func() {
						reply, err := test.client.Request(network(proto, at), at)
						lab.Must(t, err)
						if name := mustAnswer(t, reply.Text).Name; name != test.answer {
							t.Errorf("%s answered, want %s", name, test.answer)
						}
					})
					if left := counted[maps.ReasonPassDisabled] == 1; left != test.left {
						t.Errorf("the socket is left alone: %v, want %v: %v", left, test.left, counted)
					}
				})
			}
			t.Run(test.name+", by sendto to "+at, func(t *testing.T) {
				s := mustSocket(t, test.client, network("udp", at))
				lab.Must(t, s.SetTimeout(10*time.Second), s.SendTo("who\n", at))
				text, from, err := s.Recv()
				lab.Must(t, err)
				if name := mustAnswer(t, text).Name; name != test.answer || from.String() != at {
					t.Errorf("%s answered from %s, want %s from %s", name, from, test.answer, at)
				}
			})
		}
	}
}

// A pod gets an address that a Service has, and loses it again, while it dials that all the time.
func TestAddressOfPodComesAndGoes(t *testing.T) {
	w, _ := newNested(t)
	pod := w.pod(t)
	for _, at := range outerVIPs {
		addr := netip.MustParseAddrPort(at).Addr()
		own := netip.PrefixFrom(addr, addr.BitLen())
		answers := func(name string) {
			t.Helper()
			lab.Eventually(t, name+" answers at "+at, func() bool {
				reply, err := pod.Request(network("tcp", at), at)

				return err == nil && mustAnswer(t, reply.Text).Name == name
			})
		}
		answers("red")
		lab.Must(t, w.client.AddAddress("lo", own))
		server := lab.MustServe(t, w.client.Namespace, "own", at)
		answers("own")
		lab.Must(t, server.Close(), w.client.RemoveAddress("lo", own))
		answers("red")
	}
}

// Whether a socket is translated depends on where the devices of its namespace lead.
func TestWhereNamespacesLead(t *testing.T) {
	w, container := newNested(t)
	nowhere := lab.MustNamespace(t, "nowhere")

	// A namespace to which hardware leads, or a device above one of the node (macvlan, ipvlan, a VLAN: here a
	// tunnel), has no device on the node that translates.
	above := w.behind(t, w.client.Namespace, "above", "172.19.1")
	w.mustPutAbove(t, above)

	// Idle devices come before the one that counts, and that is down.
	late := lab.MustNamespace(t, "late")
	for i := range 12 {
		lab.Must(t, late.AddBridge(fmt.Sprintf("idle%d", i)))
	}
	lab.MustVeth(t, lab.End{Namespace: late, Device: "eth0"}, lab.End{Namespace: w.node.Namespace, Device: "late"})
	lab.Must(t, late.SetDown("eth0"))

	deeper := w.behind(t, container, "deeper", "172.19.2")
	for _, test := range []struct {
		name string
		ns   *lab.Namespace
		want maps.Reason
	}{
		{"a pod", w.client.Namespace, maps.ReasonTranslated},
		{"a container in a pod", container, maps.ReasonPassDisabled},
		{"a container in a container", deeper, maps.ReasonPassDisabled},
		{"a namespace above a device of the node", above, maps.ReasonTranslated},
		{"a pod with idle devices", late, maps.ReasonTranslated},
		{"a namespace that no known device leads to", nowhere, maps.ReasonTranslated},
	} {
		for _, at := range outerVIPs {
			t.Run(test.name+", "+at, func(t *testing.T) {
				client := lab.MustCaller(t, test.ns, w.cgroup)
				counted := w.counted(t, func() { _ = mustSocket(t, client, network("udp", at)).Connect(at) })
				delete(counted, maps.ReasonPassOtherTraffic) // neighbours are looked for at any time
				if diff := cmp.Diff(map[maps.Reason]uint64{test.want: 1}, counted); diff != "" {
					t.Errorf("reasons (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// A device with more addresses than are looked at may have any: IPVS gives a node in a pod those of all its Services.
func TestPodWithManyAddresses(t *testing.T) {
	w, _ := newNested(t)
	for i := range 40 {
		lab.Must(t, w.client.AddAddress("lo", netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 97, 0, byte(i)}), 32)),
			w.client.AddAddress("lo", netip.MustParsePrefix(fmt.Sprintf("fd00:97::%x/128", i+1))))
	}
	pod := w.pod(t)
	for _, at := range outerVIPs {
		reply, err := pod.Request(network("tcp", at), at) // by the device
		lab.Must(t, err)
		if name := mustAnswer(t, reply.Text).Name; name != "red" {
			t.Errorf("%s answered at %s", name, at)
		}
	}
}

// mustAttachPods attaches programs to the devices of all pods, as an agent does.
func (w *world) mustAttachPods(t testing.TB) {
	t.Helper()
	lab.MustDo(t, w.node.Namespace, func() error {
		var devices []Device
		for _, pod := range w.node.Pods {
			device, err := net.InterfaceByName(pod.Device)
			if err != nil {
				return err
			}
			devices = append(devices, Device{Index: device.Index, Class: maps.DevicePods})
		}
		failed, err := w.AttachDevices(devices)
		if len(failed) > 0 {
			return fmt.Errorf("devices failed: %v", failed)
		}

		return err
	})
}

// mustPutAbove makes a device in ns that is above the node's one of the client pod.
func (w *world) mustPutAbove(t testing.TB, ns *lab.Namespace) {
	t.Helper()
	lab.MustDo(t, w.node.Namespace, func() error {
		lower, err := netlink.LinkByName(w.client.Device)
		if err != nil {
			return err
		}

		return netlink.LinkAdd(&netlink.Vxlan{
			LinkAttrs: netlink.LinkAttrs{Name: "above", NetNsID: -1, Namespace: netlink.NsFd(ns.Handle())}, VxlanId: 7, VtepDevIndex: lower.Attrs().Index,
		})
	})
}
