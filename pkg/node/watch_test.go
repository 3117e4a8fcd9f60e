package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

func mustAdd(t testing.TB, ns *lab.Namespace, device, address string) {
	t.Helper()
	if err := ns.AddAddress(device, netip.MustParsePrefix(address)); err != nil {
		t.Fatal(err)
	}
}

func mustRemove(t testing.TB, ns *lab.Namespace, device, address string) {
	t.Helper()
	if err := ns.RemoveAddress(device, netip.MustParsePrefix(address)); err != nil {
		t.Fatal(err)
	}
}

func TestWatchReportsEveryChange(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")

	mustAdd(t, ns, "lo", "192.0.2.1/32")
	watch.want("127.0.0.1", "192.0.2.1", "::1")
	mustAdd(t, ns, "eth0", "10.0.0.1/24")
	watch.want("10.0.0.1", "127.0.0.1", "192.0.2.1", "::1")
	mustAdd(t, ns, "eth0", "fd00::1/64")
	watch.want("10.0.0.1", "127.0.0.1", "192.0.2.1", "::1", "fd00::1")
	mustRemove(t, ns, "lo", "192.0.2.1/32")
	watch.want("10.0.0.1", "127.0.0.1", "::1", "fd00::1")

	if err := peer.RemoveDevice("eth0"); err != nil {
		t.Fatal(err)
	}
	watch.want("127.0.0.1", "::1")
}

func TestWatchReportsTheDeviceOfAnAddress(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})
	for _, device := range []string{"lo", "eth0"} {
		mustAdd(t, ns, device, "10.0.0.1/32")
	}
	mustAdd(t, ns, "eth0", "10.0.0.1/24") // again, with another prefix
	link, err := ns.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}

	addresses := slices.DeleteFunc((<-mustWatch(t, ns, Config{}).updates).Addresses, func(a Address) bool {
		return a.Addr != netip.MustParseAddr("10.0.0.1")
	})
	want := []Address{
		{Addr: netip.MustParseAddr("10.0.0.1"), IfIndex: 1, IsLoopback: true},
		{Addr: netip.MustParseAddr("10.0.0.1"), IfIndex: link.Attrs().Index},
	}
	if !slices.Equal(addresses, want) {
		t.Errorf("addresses are %+v, want %+v", addresses, want)
	}
}

// kube-proxy in IPVS mode leaves the addresses of Services behind.
func TestWatchOmitsAddressesOfIPVS(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	if err := ns.AddBridge(ipvsDevice); err != nil {
		t.Fatal(err)
	}
	mustAdd(t, ns, ipvsDevice, "10.96.0.10/32")
	mustWatch(t, ns, Config{}).want("127.0.0.1", "::1")
}

func TestWatchReportsALinkLocalAddress(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})

	watch.until("a link-local address", func(state State) bool {
		return slices.ContainsFunc(state.Addresses, func(a Address) bool { return a.Addr.IsLinkLocalUnicast() })
	})
}

func TestWatchOmitsUnusableAddresses(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	lab.MustVeth(t,
		lab.End{Namespace: ns, Device: "eth0"},
		lab.End{Namespace: peer, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("fd00::bad/64")}},
	)
	for _, name := range []string{"all", "eth0"} {
		if err := ns.Sysctl("net/ipv6/conf/"+name+"/accept_dad", "1"); err != nil {
			t.Fatal(err)
		}
	}
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")
	addDetected := func(address string) {
		t.Helper()
		addr, err := netlink.ParseAddr(address)
		if err != nil {
			t.Fatal(err)
		}
		link, err := ns.Netlink().LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		if err := ns.Netlink().AddrAdd(link, addr); err != nil {
			t.Fatal(err)
		}
	}

	start := time.Now()
	addDetected("fd00::bad/64")  // the peer has it
	addDetected("fd00::900d/64") // no other host has it
	watch.want("127.0.0.1", "::1", "fd00::900d")
	if time.Since(start) < 100*time.Millisecond {
		t.Error("the address appeared before duplicate address detection can have ended")
	}
}

func TestWatchReportsABurstTogether(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")

	const count = 500
	want := []string{}
	start := time.Now()
	for i := range count {
		address := fmt.Sprintf("10.9.%d.%d", i/250, i%250)
		mustAdd(t, ns, "lo", address+"/32")
		want = append(want, address)
	}
	burst := time.Since(start)
	slices.SortFunc(want, func(a, b string) int { return netip.MustParseAddr(a).Compare(netip.MustParseAddr(b)) })
	want = append(want, "127.0.0.1", "::1")

	updates := 0
	for last := (State{}); len(last.Addresses) != len(want); updates++ {
		select {
		case last = <-watch.updates:
		case <-time.After(5 * time.Second):
			t.Fatalf("%d of %d addresses reported", len(last.Addresses), len(want))
		}
	}
	if most := int(burst/quietTime) + 3; updates > most {
		t.Errorf("reported %d times in %v, want at most %d", updates, burst, most)
	}
	watch.wantNoUpdate(2 * quietTime)
}

// A change that comes when there was none for the quiet time does not wait for
// another quiet time.
func TestWatchReportsTheFirstChangeAtOnce(t *testing.T) {
	const quiet = 4 * time.Second // much more than a look takes
	ns := lab.MustNamespace(t, "node")
	watch := mustWatch(t, ns, Config{quietTime: quiet})
	watch.want("127.0.0.1", "::1")
	time.Sleep(quiet)
	start := time.Now()
	mustAdd(t, ns, "lo", "10.0.0.1/32")
	<-watch.updates
	if took := time.Since(start); took > quiet/2 {
		t.Errorf("a change took %v, want less than %v", took, quiet/2)
	}
}

func TestWatchSurvivesAnOverrun(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	watch := mustWatch(t, ns, Config{receiveBuffer: 1}) // the kernel makes it its smallest
	watch.want("127.0.0.1", "::1")
	for deadline := time.Now().Add(5 * time.Second); !strings.Contains(watch.log.String(), "overrun=true"); {
		if time.Now().After(deadline) {
			t.Fatalf("no overrun; log is %s", watch.log)
		}
		lab.MustDo(t, ns, churn)
	}
	mustAdd(t, ns, "lo", "10.1.1.1/32")
	watch.want("10.1.1.1", "127.0.0.1", "::1")
}

// churn adds and removes an address a few hundred times.
func churn() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr("10.2.2.2/32")
	if err != nil {
		return err
	}
	for range 200 {
		if err := netlink.AddrAdd(lo, addr); err != nil {
			return err
		}
		if err := netlink.AddrDel(lo, addr); err != nil {
			return err
		}
	}

	return nil
}

func TestWatchStaysInTheNamespaceOfItsThread(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	mustAdd(t, ns, "lo", "10.3.3.3/32")
	watch := startWatch(t, Config{receiveBuffer: 1}, func(watch func()) {
		runtime.LockOSThread() // and never unlock: the thread ends with us
		if err := netns.Set(ns.Handle()); err != nil {
			t.Error(err)
		}
		watch()
	})
	watch.want("10.3.3.3", "127.0.0.1", "::1")

	mustAdd(t, ns, "lo", "10.3.3.4/32")
	watch.want("10.3.3.3", "10.3.3.4", "127.0.0.1", "::1")
}

func TestWatchFindsAChangeWithoutNotification(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	updates := make(chan State, 10)
	w := watcher{config: Config{
		Update:     func(state State) { updates <- state },
		relistTime: 10 * time.Millisecond,
	}}
	silent := &subscription{handle: ns.Netlink(), forwarding: mustForwarding(t, ns), changed: make(chan struct{}), broken: make(chan error)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.listOnChange(ctx, silent) }()
	watch := observer{t: t, updates: updates}
	watch.want("127.0.0.1", "::1")

	mustAdd(t, ns, "lo", "10.4.4.4/32")
	watch.want("10.4.4.4", "127.0.0.1", "::1")
	watch.wantNoUpdate(50 * time.Millisecond)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestWatchRefusesInvalidConfig(t *testing.T) {
	if err := Watch(t.Context(), Config{}); err == nil {
		t.Error("no error without Update")
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := Watch(t.Context(), Config{Netns: file, Update: func(State) {}}); err == nil {
		t.Error("no error for a file that is no namespace")
	}
}
