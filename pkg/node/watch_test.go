package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
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
	lab.Must(t, ns.AddAddress(device, netip.MustParsePrefix(address)))
}

func mustRemove(t testing.TB, ns *lab.Namespace, device, address string) {
	t.Helper()
	lab.Must(t, ns.RemoveAddress(device, netip.MustParsePrefix(address)))
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

	lab.Must(t, peer.RemoveDevice("eth0"))
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
	lab.Must(t, err)

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

func TestWatchReportsLocalRoutes(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	lab.Must(t, ns.AddBridge("eth0"))
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")
	ip := func(args ...string) {
		t.Helper()
		_, err := lab.Output(ns, nil, "ip", args...)
		lab.Must(t, err)
	}

	ip("route", "add", "local", "192.0.2.1/32", "dev", "eth0", "proto", "66")
	watch.want("127.0.0.1", "192.0.2.1", "::1")
	ip("-6", "route", "add", "local", "2001:db8::1/128", "dev", "lo")
	watch.want("127.0.0.1", "192.0.2.1", "::1", "2001:db8::1")
	ip("route", "add", "local", "198.51.100.0/24", "dev", "lo") // a whole range
	ip("route", "del", "local", "192.0.2.1/32", "dev", "eth0")
	watch.want("127.0.0.1", "::1", "2001:db8::1")
}

// kube-proxy in IPVS mode leaves the addresses of Services behind.
func TestWatchOmitsAddressesOfIPVS(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	lab.Must(t, ns.AddBridge(ipvsDevice))
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
		lab.Must(t, ns.Sysctl("net/ipv6/conf/"+name+"/accept_dad", "1"))
	}
	watch := mustWatch(t, ns, Config{})
	watch.want("127.0.0.1", "::1")
	addDetected := func(address string) {
		t.Helper()
		addr, err := netlink.ParseAddr(address)
		lab.Must(t, err)
		link, err := ns.Netlink().LinkByName("eth0")
		lab.Must(t, err)
		lab.Must(t, ns.Netlink().AddrAdd(link, addr))
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
	watch.mustOverrun(ns)
	mustAdd(t, ns, "lo", "10.1.1.1/32")
	watch.want("10.1.1.1", "127.0.0.1", "::1")
}

// mustOverrun changes the node until the watch, which has a small buffer, is renewed once more.
func (o observer) mustOverrun(ns *lab.Namespace) {
	o.t.Helper()
	overruns := func() int { return strings.Count(o.log.String(), "overrun=true") }
	known := overruns()
	for deadline := time.Now().Add(5 * time.Second); overruns() == known; {
		if time.Now().After(deadline) {
			o.t.Fatalf("no overrun; log is %s", o.log)
		}
		lab.MustDo(o.t, ns, churn)
	}
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
	watch := startWatch(t, Config{receiveBuffer: 1}, func(watch func() error) error {
		runtime.LockOSThread() // and never unlock: the thread ends with us
		if err := netns.Set(ns.Handle()); err != nil {
			t.Error(err)
		}

		return watch()
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
		concern:    func() concern { return concern{} },
		relistTime: 10 * time.Millisecond,
	}, concerns: make(chan concern, 1)}
	silent := &subscription{reader: mustReader(t, ns), changed: make(chan struct{}), broken: make(chan error)}
	lab.MustRun(t, func(ctx context.Context) error { return w.listOnChange(ctx, silent) })
	watch := observer{t: t, updates: updates}
	watch.want("127.0.0.1", "::1")

	mustAdd(t, ns, "lo", "10.4.4.4/32")
	watch.want("10.4.4.4", "127.0.0.1", "::1")
	watch.wantNoUpdate(50 * time.Millisecond)
}

func TestWatchRefusesInvalidConfig(t *testing.T) {
	if err := Watch(t.Context(), Config{}); err == nil {
		t.Error("no error without Update")
	}
	file, err := os.Open(os.DevNull)
	lab.Must(t, err)
	defer file.Close()
	if err := Watch(t.Context(), Config{Netns: file, Update: func(State) {}}); err == nil {
		t.Error("no error for a file that is no namespace")
	}
}

// untilDevice waits until a device, which may be missing, fulfils a condition.
func (o observer) untilDevice(name, what string, is func(d Device, there bool) bool) {
	o.t.Helper()
	o.until(name+" "+what, func(state State) bool {
		d, there := byName(state)[name]

		return is(d, there)
	})
}

func TestWatchReportsDevices(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	watch := mustWatch(t, ns, Config{})
	watch.untilDevice("lo", "there", func(_ Device, there bool) bool { return there })

	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})
	watch.untilDevice("eth0", "there", func(d Device, there bool) bool { return there && d.IsUp && d.Peer == 0 })

	mustAdd(t, ns, "eth0", "192.168.50.1/24")
	watch.untilDevice("eth0", "with a network", func(d Device, _ bool) bool {
		return d.Network == netip.MustParsePrefix("192.168.50.1/24") && d.SourceV4 == d.Network.Addr()
	})
	mustRoute(t, ns, "0.0.0.0/0", "eth0", "192.168.50.254")
	watch.untilDevice("eth0", "with a gateway", func(d Device, _ bool) bool { return d.Gateway.IsValid() })
	lab.Must(t, ns.Netlink().RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}))
	watch.untilDevice("eth0", "without a gateway", func(d Device, _ bool) bool { return !d.Gateway.IsValid() })
	mustRoute(t, ns, "::/0", "eth0", "fe80::1")
	watch.untilDevice("eth0", "with a gateway", func(d Device, _ bool) bool { return d.Gateway.IsValid() })
	mustRemove(t, ns, "eth0", "192.168.50.1/24")
	watch.untilDevice("eth0", "without a network", func(d Device, _ bool) bool { return !d.Network.IsValid() })

	lab.Must(t, ns.AddBridge("br0"))
	link, err := ns.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	bridge, err := ns.Netlink().LinkByName("br0")
	lab.Must(t, err)
	for _, change := range []error{ns.Netlink().LinkSetMaster(link, bridge), ns.SetDown("eth0"), ns.Netlink().LinkSetName(link, "uplink")} {
		if change != nil {
			t.Fatal(change)
		}
	}
	watch.untilDevice("uplink", "below a bridge, and down", func(d Device, _ bool) bool {
		return d.Master == bridge.Attrs().Index && !d.IsUp
	})
	lab.Must(t, ns.RemoveDevice("uplink"))
	watch.untilDevice("uplink", "gone", func(_ Device, there bool) bool { return !there })
}

// The peer of a pair goes to another namespace, and comes back.
func TestWatchReportsThePeer(t *testing.T) {
	ns, pod := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "pod")
	watch := mustWatch(t, ns, Config{})
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "veth0"}, lab.End{Namespace: ns, Device: "veth1"})
	watch.untilDevice("veth0", "with its peer here", func(d Device, _ bool) bool { return d.Peer != 0 })
	move := func(from, to *lab.Namespace) {
		t.Helper()
		link, err := from.Netlink().LinkByName("veth1")
		if err == nil {
			err = from.Netlink().LinkSetNsFd(link, int(to.Handle()))
		}
		lab.Must(t, err)
	}
	move(ns, pod)
	watch.untilDevice("veth0", "with its peer elsewhere", func(d Device, _ bool) bool { return d.Peer == 0 })
	move(pod, ns)
	watch.untilDevice("veth0", "with its peer here again", func(d Device, _ bool) bool { return d.Peer != 0 })
}

func TestWatchReportsABurstOfDevicesTogether(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	watch := mustWatch(t, ns, Config{})
	const count = 100
	start := time.Now()
	for i := range count {
		name := fmt.Sprintf("veth%d", i)
		lab.MustVeth(t, lab.End{Namespace: ns, Device: name}, lab.End{Namespace: peer, Device: name})
	}
	burst := time.Since(start)
	updates := 0
	watch.until("complete list", func(state State) bool {
		updates++
		up := 0
		for _, d := range state.Devices {
			if d.Kind == "veth" && d.IsUp && d.SourceV6 == (netip.Addr{}) {
				up++
			}
		}

		return up == count
	})
	if most := int(burst/quietTime) + 3; updates > most {
		t.Errorf("reported %d times in %v, want at most %d", updates, burst, most)
	}
}

// A new device is reported while the rules of a firewall are read, however long that takes, and also after the watch was
// renewed; what they are is reported then.
func TestWatchReportsDevicesBesideAConcern(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	readings := 0
	reading, read := make(chan struct{}), make(chan struct{})
	var once sync.Once
	finish := func() { once.Do(func() { close(read) }) }
	watch := mustWatch(t, ns, Config{receiveBuffer: 1, concern: func() concern {
		if readings++; readings == 1 {
			return concern{}
		}
		if readings == 2 {
			close(reading)
			<-read
		}

		return concern{text: "a firewall"}
	}})
	t.Cleanup(finish)
	add := func(name string) {
		lab.MustVeth(t, lab.End{Namespace: ns, Device: name}, lab.End{Namespace: peer, Device: name})
		watch.until(name, func(s State) bool {
			return s.Concern == "" && slices.ContainsFunc(s.Devices, func(d Device) bool { return d.Name == name })
		})
	}
	add("veth0")
	<-reading
	add("veth1")
	watch.mustOverrun(ns)
	add("veth2")
	finish()
	watch.until("the concern", func(s State) bool { return s.Concern == "a firewall" })
}

// observer receives what a watch reports.
type observer struct {
	t       testing.TB
	updates chan State
	log     *lab.Log
}

// mustWatch watches a namespace until the test ends.
func mustWatch(t testing.TB, ns *lab.Namespace, config Config) observer {
	t.Helper()
	file, err := os.Open(ns.Path())
	lab.Must(t, err)
	t.Cleanup(func() { file.Close() })
	config.Netns = file

	return startWatch(t, config, func(watch func() error) error { return watch() })
}

// startWatch watches until the test ends, on a goroutine that on prepares.
func startWatch(t testing.TB, config Config, on func(watch func() error) error) observer {
	o := observer{t: t, updates: make(chan State, 1000), log: &lab.Log{}}
	config.Update = func(state State) { o.updates <- state }
	config.Log = slog.New(slog.NewTextHandler(o.log, nil))
	lab.MustRun(t, func(ctx context.Context) error { return on(func() error { return Watch(ctx, config) }) })

	return o
}

// want waits until exactly these addresses are reported, not counting link-local ones.
func (o observer) want(want ...string) {
	o.t.Helper()
	o.until(fmt.Sprintf("state with the addresses %v", want), func(state State) bool {
		var got []string
		for _, address := range state.Addresses {
			if !address.Addr.IsLinkLocalUnicast() {
				got = append(got, address.Addr.String())
			}
		}

		return slices.Equal(got, want)
	})
}

// until waits for a state that fulfils a condition.
func (o observer) until(what string, is func(State) bool) State {
	o.t.Helper()
	var last State
	for deadline := time.After(time.Minute); ; { // a list may take seconds on a busy machine
		select {
		case last = <-o.updates:
			if is(last) {
				return last
			}
		case <-deadline:
			o.t.Fatalf("no %s; the last state is %+v", what, last)
		}
	}
}

// wantNoUpdate waits a while and fails the test if anything is reported.
func (o observer) wantNoUpdate(while time.Duration) {
	o.t.Helper()
	select {
	case state := <-o.updates:
		o.t.Fatalf("reported %+v, want nothing", state)
	case <-time.After(while):
	}
}
