package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// The way to an address has what the kernel's routes and neighbours have, and a client behind a veth
// or a bridge is found with its device and its network namespace.
func TestWays(t *testing.T) {
	here, pod := lab.MustNamespace(t, "here"), lab.MustNamespace(t, "pod")
	bridged, silent := lab.MustNamespace(t, "bridged"), lab.MustNamespace(t, "silent")
	one := func(text string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(text)} }
	lab.Must(t, here.AddBridge("br0", one("10.244.1.1/24")...),
		lab.Veth(lab.End{Namespace: here, Device: "eth0", Addresses: one("192.168.50.1/24")}, lab.End{Namespace: pod, Device: "eth0", Addresses: one("192.168.50.7/24")}),
		lab.Veth(lab.End{Namespace: here, Device: "port0", Bridge: "br0"}, lab.End{Namespace: bridged, Device: "eth0", Addresses: one("10.244.1.2/24")}),
		lab.Veth(lab.End{Namespace: here, Device: "port1", Bridge: "br0"}, lab.End{Namespace: silent, Device: "eth0", Addresses: one("10.244.1.4/24")}))
	caller := lab.MustCaller(t, bridged, nil)
	_, err := caller.Exchange(lab.Exchange{Network: "tcp", Address: "10.244.1.1:9"}) // refused, but then the bridge knows it
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatal(err)
	}
	lab.Must(t, bridged.Netfilter("table ip nat { chain ISTIO_OUTPUT { }; }"), silent.Netfilter("table ip nat { chain KUMA_OUTBOUND { }; }"))
	lab.MustCaller(t, silent, nil)
	lab.MustDo(t, here, func() error {
		if way, err := WayTo(netip.MustParseAddr("192.168.50.1")); err != nil || !way.Local {
			t.Errorf("to itself: %+v, %v", way, err)
		}
		way, err := WayTo(netip.MustParseAddr("192.168.50.9"))
		if err != nil || way.Device != "eth0" || way.Source != netip.MustParseAddr("192.168.50.1") || way.Neighbour != "none" || way.Gateway.IsValid() {
			t.Errorf("to a neighbour: %+v, %v", way, err)
		}
		if _, err := WayTo(netip.MustParseAddr("203.0.113.1")); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("to nowhere: %v", err)
		}
		client := netip.MustParseAddr("10.244.1.2")
		at, err := ArrivalOf(client)
		if err != nil || at.Name != "port0" || len(at.MAC) != 6 {
			t.Fatalf("the client arrives at %+v, %v", at, err)
		}
		found, ok, err := at.Namespace(client)
		if err != nil || !ok || found.Mesh != "nftables ip nat ISTIO_OUTPUT" {
			t.Errorf("the client is in %+v, %t, %v; want the one with the chain of Istio", found, ok, err)
		}
		if at, err := ArrivalOf(netip.MustParseAddr("10.244.1.4")); err != nil || at.Name != "port1" {
			t.Errorf("a client that the bridge has not seen arrives at %+v, %v", at, err)
		}
		if _, err := ArrivalOf(netip.MustParseAddr("10.244.1.3")); err == nil {
			t.Error("a client that is nowhere is behind a port")
		}
		meshes := make(map[string][]Route)
		err = OtherNamespaces(func(of Namespace, routes []Route) {
			if of.Mesh != "" {
				meshes[of.Mesh] = append(meshes[of.Mesh], routes...)
			}
		})
		want := Route{netip.MustParsePrefix("10.244.1.0/24"), "eth0"}
		if err != nil || !slices.Contains(meshes["nftables ip nat ISTIO_OUTPUT"], want) || !slices.Contains(meshes["nftables ip nat KUMA_OUTBOUND"], want) {
			t.Errorf("of other namespaces these have a mesh: %v, %v", meshes, err)
		}

		return nil
	})
}

// A name without a namespace, as it is for a moment while another program makes one, hides no namespace.
func TestNameWithoutNamespace(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	name, err := os.CreateTemp("/run/netns", fmt.Sprintf("sluice-%d-", os.Getpid())) // as those of the lab, which are swept
	lab.Must(t, err, name.Close())
	t.Cleanup(func() { lab.Must(t, os.Remove(name.Name())) })
	var own uint64
	lab.MustDo(t, ns, func() (err error) { own, err = inodeOf("/proc/thread-self/ns/net"); return err })
	found := false
	lab.Must(t, EachNamespace(func(inode uint64, ns netns.NsHandle) (bool, error) {
		_, err := netlink.GetNetNsIdByFd(int(ns))
		found = found || inode == own

		return false, err
	}))
	if !found {
		t.Error("a namespace was not visited")
	}
}
