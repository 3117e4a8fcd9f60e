package datapath

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/test/lab"
)

// recordingMonitor returns a monitor of devices, what it logs, and the events that it records.
func recordingMonitor() (*DeviceMonitor, *bytes.Buffer, *[]Event) {
	var log bytes.Buffer
	var events []Event

	return NewDeviceMonitor(nil, DeviceMonitorConfig{
		Log: slog.New(slog.NewTextHandler(&log, nil)), Record: func(e Event) { events = append(events, e) },
	}), &log, &events
}

// A decision about a device becomes a device of programs.
func TestDeviceOfDecision(t *testing.T) {
	for _, test := range []struct {
		name     string
		decision node.Decision
		device   Device
	}{
		{
			"an uplink with addresses",
			node.Decision{Device: node.Device{Index: 2, LinkLayer: node.LinkEthernet}, Class: node.ClassUplink},
			Device{Index: 2, Class: maps.DeviceUplink},
		},
		{
			"a pod's",
			node.Decision{Device: node.Device{Index: 5, LinkLayer: node.LinkEthernet}, Class: node.ClassPods},
			Device{Index: 5, Class: maps.DevicePods},
		},
		{
			"a tunnel without addresses",
			node.Decision{Device: node.Device{Index: 3, LinkLayer: node.LinkIP}, Class: node.ClassUplink},
			Device{Index: 3, Class: maps.DeviceUplink, NoEthernet: true},
		},
		{
			"a pod's on a bridge",
			node.Decision{Device: node.Device{Index: 4, LinkLayer: node.LinkEthernet}, Class: node.ClassPods, Bridge: 7},
			Device{Index: 4, Class: maps.DevicePods, BridgePort: true},
		},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			if diff := cmp.Diff([]Device{test.device}, devicesOf([]node.Decision{test.decision})); diff != "" {
				t.Errorf("programs (-want +got):\n%s", diff)
			}
		})
	}
}

// The ports of masqueraded flows follow the sysctls. Each change is logged, and one for the worse is an Event, as is
// the one that mends it.
func TestMasqueradePortsAreReported(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	m, out, events := recordingMonitor()
	calls := 0
	for _, step := range []struct {
		ephemeral  string
		want, more bpf.PortRange
		level      string
		event      *Event // only the first words of the note
	}{
		{ephemeral: "32768 60999", want: bpf.PortRange{Low: 1024, High: 29999}, more: bpf.PortRange{Low: 61000, High: 65535}, level: "INFO"},
		{
			ephemeral: "1024 60000", want: bpf.PortRange{Low: 60001, High: 65535}, level: "WARN",
			event: &Event{MasqueradePortsLimited, "masqueraded flows have the ports 60001-65535 (5535 ports), which were 1024-29999 and 61000-65535 (33512 ports)"},
		},
		{
			ephemeral: "1024 65000", want: bpf.PortRange{Low: 32768, High: 65535}, more: bpf.PortRange{Low: 1024, High: 29999}, level: "WARN",
			event: &Event{MasqueradePortsLimited, "masqueraded flows have the ports 32768-65535 and 1024-29999 (61744 ports), which were 60001-65535 (5535 ports): connections are masqueraded with ports that sockets"},
		},
		{
			ephemeral: "1024 29999", want: bpf.PortRange{Low: 32768, High: 65535}, level: "WARN",
			event: &Event{MasqueradePortsLimited, "masqueraded flows have the ports 32768-65535 (32768 ports)"},
		},
		{
			ephemeral: "40000 50000", want: bpf.PortRange{Low: 1024, High: 29999}, more: bpf.PortRange{Low: 50001, High: 65535}, level: "INFO",
			event: &Event{MasqueradePortsExtended, "masqueraded flows have the ports 1024-29999 and 50001-65535 (44511 ports), which were 32768-65535 (32768 ports)"},
		},
	} {
		lab.Must(t, ns.Sysctl("net/ipv4/ip_local_port_range", step.ephemeral))
		out.Reset()
		*events = nil
		calls = 0
		for range 2 { // the second time, nothing has changed
			lab.MustDo(t, ns, func() error {
				return m.followPorts(func(got, more bpf.PortRange) error {
					calls++
					if got != step.want || more != step.more {
						t.Errorf("%s: ports are %v and %v, want %v and %v", step.ephemeral, got, more, step.want, step.more)
					}

					return nil
				})
			})
		}
		if text := out.String(); calls != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, "level="+step.level) {
			t.Errorf("%s: ports were set %d times, want once; log is %q, want one line of level %s", step.ephemeral, calls, text, step.level)
		}
		if step.event == nil && len(*events) > 0 || step.event != nil && (len(*events) != 1 || (*events)[0].Kind != step.event.Kind || !strings.HasPrefix((*events)[0].Note, step.event.Note)) {
			t.Errorf("%s: events are %v, want %v", step.ephemeral, *events, step.event)
		}
	}
}

// Where packets pass that our programs do not see, the node is not ready, and an Event is recorded for what is new.
func TestUnreachedDevicesAreReported(t *testing.T) {
	m, _, events := recordingMonitor()
	m.attached = true
	m.Set([]node.Decision{{Device: node.Device{Index: 2, Name: "eth0"}, Class: node.ClassUplink}})
	in := Unreached{Index: 2, Hook: "ingress", Ahead: []string{"theirs"}}
	out := Unreached{Index: 2, Hook: "egress", Ahead: []string{"theirs"}}
	for _, found := range [][]Unreached{nil, {in}, {in}, {out, in}} {
		m.setUnreached(found)
	}
	if _, problems := m.Count(); problems != 1 {
		t.Errorf("%d devices have problems, want one", problems)
	}
	want := []string{"device eth0: " + out.String() + "; " + in.String()}
	if got := m.Problems(); !slices.Equal(got, want) {
		t.Errorf("problems are %q, want %q", got, want)
	}
	m.setUnreached(nil)
	if got := m.Problems(); len(got) > 0 {
		t.Errorf("problems are %q, want none", got)
	}
	if diff := cmp.Diff([]Event{
		{DevicesNotEffective, "device eth0: " + in.String()},
		{DevicesNotEffective, want[0]},
		{DevicesEffective, "all devices are effective again"},
	}, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Devices that come while a trial counts packets are attached to at once.
func TestDevicesDoNotWaitForATrial(t *testing.T) {
	p := newPort(t, TCX)
	p.attach(p.device())
	p.attachTheirs() // without programs of others there is no trial
	p.attach(p.device())
	lab.MustVeth(t, lab.End{Namespace: p.node, Device: "eth1"}, lab.End{Namespace: p.peer, Device: "eth1"})
	tried := make(chan struct{})
	close(tried)
	m := NewDeviceMonitor(p.Datapath, DeviceMonitorConfig{
		HooksTried: tried, Interval: time.Minute, UplinksAttached: func(bool) {}, Record: func(Event) {}, Log: slog.New(slog.DiscardHandler),
	})
	counting, counted := make(chan struct{}, 3), make(chan struct{})
	m.pause = func(context.Context) {
		counting <- struct{}{}
		<-counted
	}
	uplink := func(name string) node.Decision {
		return node.Decision{Device: node.Device{Index: p.indexOf(name), Name: name, LinkLayer: node.LinkEthernet}, Class: node.ClassUplink}
	}
	m.Set([]node.Decision{uplink("eth0")})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.node.Do(func() error { return m.Run(ctx) }) }()
	<-counting
	m.Set([]node.Decision{uplink("eth0"), uplink("eth1")})
	lab.Eventually(t, "the second device is attached to while a trial counts", func() (attached bool) {
		lab.MustDo(t, p.node, func() error {
			devices, err := m.Status()
			attached = slices.ContainsFunc(devices, func(d DeviceState) bool { return d.Name == "eth1" && d.Attached != "" })

			return err
		})

		return attached
	})
	close(counted)
	stop()
	lab.Must(t, <-ended)
}

// Until this agent's programs are attached, those of an earlier agent are a problem: they may use
// maps of another layout, which stay below the root of pins until then.
func TestDevicesOfAnEarlierAgent(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		p.attach(p.device())
		lab.Must(t, p.Close())
		p.open(by)
		m := NewDeviceMonitor(p.Datapath, DeviceMonitorConfig{
			UplinksAttached: func(bool) {}, Record: func(Event) {}, Log: slog.New(slog.DiscardHandler),
		})
		m.Set([]node.Decision{{
			Device: node.Device{Index: p.index, Name: "eth0", LinkLayer: node.LinkEthernet}, Class: node.ClassUplink,
		}})
		mustHave := func(want string) {
			t.Helper()
			lab.MustDo(t, p.node, func() error {
				devices, err := m.Status()
				for _, d := range devices {
					if d.Index == p.index && d.Problem != want {
						t.Errorf("the problem is %q, want %q", d.Problem, want)
					}
				}

				return err
			})
		}
		mustHave("programs of an earlier agent are not replaced yet")
		lab.MustDo(t, p.node, func() error {
			if !m.attach() {
				return errors.New("not attached")
			}

			return nil
		})
		mustHave("")
	})
}

// Each device that is not attached is a problem, and so are devices before the first try.
func TestDeviceProblems(t *testing.T) {
	m, _, _ := recordingMonitor()
	mustHave := func(want ...string) {
		t.Helper()
		if got := m.Problems(); !slices.Equal(got, want) {
			t.Errorf("problems are %q, want %q", got, want)
		}
	}
	mustHave("devices are not attached yet")
	m.attached = true
	mustHave()
	m.decisions = []node.Decision{{Device: node.Device{Index: 7, Name: "eth0"}}}
	m.failed = map[int]string{noDevice: "x", 7: "no room"}
	mustHave("device all: x", "device eth0: no room")
	m.failed = nil
	mustHave()
}

// The bandwidth plugin of CNI adds the qdisc ingress to the device of a new pod, with a filter. Where our programs are
// filters, they leave room for that until the pod's network is complete. A pod that has the qdisc keeps it, stays
// without our programs, and is no reason for the node not to be ready.
func TestRoomForBandwidthPlugin(t *testing.T) {
	p := newPort(t, Clsact)
	p.devices.loaded[p.devices.configOf(p.podDevice())] = p.devices.loaded[p.devices.configOf(p.device())]
	var log bytes.Buffer
	m := NewDeviceMonitor(p.Datapath, DeviceMonitorConfig{
		UplinksAttached: func(bool) {}, Record: func(Event) {}, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	eth0 := node.Decision{Device: node.Device{Index: p.index, Name: "eth0", LinkLayer: node.LinkEthernet}, Class: node.ClassPods}
	attach := func(want bool) {
		t.Helper()
		lab.MustDo(t, p.node, func() error {
			if got := m.attach(); got != want {
				t.Errorf("all is attached: %t", got)
			}

			return nil
		})
	}
	wait := func() { m.appeared[p.index] = time.Now().Add(-settleTime) }
	wantProblem := func(want string) {
		t.Helper()
		lab.MustDo(t, p.node, func() error {
			devices, err := m.Status()
			for _, d := range devices {
				if d.Index == p.index && d.Problem != want {
					t.Errorf("the problem is %q, want %q", d.Problem, want)
				}
			}

			return err
		})
	}
	m.Set([]node.Decision{})
	attach(true)

	m.Set([]node.Decision{eth0})
	attach(true)
	wantProblem("")
	if _, again := m.settled(time.Now()); again <= 0 || again > settleTime {
		t.Errorf("the next try is after %v", again)
	}
	// What the plugin does.
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: p.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
	lab.Must(t, p.node.Netlink().QdiscAdd(qdisc))
	filter := &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: p.index, Parent: qdisc.Handle, Priority: 1, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1),
	}
	lab.Must(t, p.node.Netlink().FilterAdd(filter))
	m.Set([]node.Decision{eth0})
	wait()
	for range 2 {
		attach(true)
		wantProblem("egress: there is a qdisc ingress, which leaves no room for clsact")
		if problems := m.Problems(); len(problems) > 0 {
			t.Errorf("the node is not ready: %q", problems)
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("there are %d warnings:\n%s", n, log.String())
	}
	filters, err := p.node.Netlink().FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: p.index}}, qdisc.Handle)
	if err != nil || !slices.ContainsFunc(filters, func(f netlink.Filter) bool { return f.Type() == "u32" }) {
		t.Errorf("the plugin's filters are %v, %v", filters, err)
	}

	eth0.Class = node.ClassUplink
	m.Set([]node.Decision{eth0})
	attach(false)
	if problems := m.Problems(); len(problems) != 1 {
		t.Errorf("an uplink without room: problems are %q", problems)
	}
	lab.Must(t, p.node.Netlink().QdiscDel(qdisc))
	attach(true)
	wantProblem("")
}

// A device that was there before the agent, and an uplink, are attached to at once.
func TestNoRoomIsLeftLater(t *testing.T) {
	m := NewDeviceMonitor(&Datapath{cfg: Config{Attachment: Clsact}}, DeviceMonitorConfig{Log: slog.New(slog.DiscardHandler)})
	pod := node.Decision{Device: node.Device{Index: 7}, Class: node.ClassPods}
	later := node.Decision{Device: node.Device{Index: 8}, Class: node.ClassPods}
	uplink := node.Decision{Device: node.Device{Index: 9}, Class: node.ClassUplink}
	for _, step := range []struct {
		set  []node.Decision
		want []int
		wait bool
	}{
		{[]node.Decision{pod}, []int{7}, false},
		{[]node.Decision{pod, later, uplink}, []int{7, 9}, true},
		{[]node.Decision{pod, uplink}, []int{7, 9}, false},
	} {
		m.Set(step.set)
		decisions, wait := m.settled(time.Now())
		var got []int
		for _, d := range decisions {
			got = append(got, d.Index)
		}
		if !slices.Equal(got, step.want) || (wait > 0) != step.wait {
			t.Errorf("devices are %v, and more after %v; want %v, and more: %t", got, wait, step.want, step.wait)
		}
	}
	m.datapath = &Datapath{cfg: Config{Attachment: TCX}}
	m.Set([]node.Decision{pod, later})
	if decisions, wait := m.settled(time.Now()); len(decisions) != 2 || wait != 0 {
		t.Errorf("with tcx, %d devices, and more after %v", len(decisions), wait)
	}
}

// Programs address frames to pods behind a bridge by themselves. The kernel confirms their Ethernet addresses, although
// it sends nothing there.
func TestNeighboursBehindABridgeAreConfirmed(t *testing.T) {
	p := newPort(t, Clsact)
	lab.Must(t, p.node.AddBridge("br0", netip.MustParsePrefix("10.244.0.1/24")))
	lab.MustVeth(t, lab.End{Namespace: p.node, Device: "port0", Bridge: "br0"},
		lab.End{Namespace: p.peer, Device: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.0.2/24")}})
	for name, value := range map[string]string{"delay_first_probe_time": "1", "retrans_time_ms": "100"} {
		lab.Must(t, p.node.Sysctl("net/ipv4/neigh/br0/"+name, value))
	}
	port, bridge := p.indexOf("port0"), p.indexOf("br0")
	p.count(Device{Index: port, Class: maps.DevicePods, BridgePort: true})
	m := NewDeviceMonitor(p.Datapath, DeviceMonitorConfig{
		HooksTried: closedChannel(), Interval: 50 * time.Millisecond,
		UplinksAttached: func(bool) {}, Record: func(Event) {}, Log: slog.New(slog.DiscardHandler),
	})
	m.Set([]node.Decision{{Device: node.Device{Index: port, Name: "port0", LinkLayer: node.LinkEthernet}, Class: node.ClassPods, Bridge: bridge}})
	former := &netlink.Neigh{ // of a pod that had the address before
		LinkIndex: bridge, State: netlink.NUD_STALE, IP: net.ParseIP("10.244.0.2"), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 99},
	}
	lab.Must(t, p.node.Netlink().NeighSet(former))
	lab.MustRun(t, func(ctx context.Context) error { return p.node.Do(func() error { return m.Run(ctx) }) })
	lab.Eventually(t, "the former Ethernet address is forgotten", func() bool {
		known, err := p.node.Netlink().NeighList(bridge, netlink.FAMILY_V4)
		lab.Must(t, err)

		return !slices.ContainsFunc(known, func(n netlink.Neigh) bool {
			return n.HardwareAddr.String() == former.HardwareAddr.String() && n.State != netlink.NUD_FAILED
		})
	})
}

func closedChannel() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)

	return closed
}
