package datapath

import (
	"bytes"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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

func TestMasqueradePortsAreChosen(t *testing.T) {
	for _, test := range []struct {
		name       string
		ephemeral  string
		want, more bpf.PortRange
		log        string
	}{
		{"those that are free", "32768 60999", bpf.PortRange{Low: 1024, High: 29999}, bpf.PortRange{Low: 61000, High: 65535}, "1024-29999 61000-65535"},
		{"the default, with a warning, if none is", "1024 65535", bpf.DefaultMasqueradePorts, bpf.PortRange{}, "level=WARN"},
		{"the only range that is free", "1024 29999", bpf.PortRange{Low: 32768, High: 65535}, bpf.PortRange{}, "32768-65535"},
	} {
		t.Run("they are "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			m, out, _ := recordingMonitor()
			calls := 0
			follow := func() {
				t.Helper()
				lab.MustDo(t, ns, func() error {
					return m.followPorts(func(got, more bpf.PortRange) error {
						calls++
						if got != test.want || more != test.more {
							t.Errorf("ports are %v and %v, want %v and %v", got, more, test.want, test.more)
						}

						return nil
					})
				})
			}
			set := func(ephemeral string) {
				t.Helper()
				lab.Must(t, ns.Sysctl("net/ipv4/ip_local_port_range", ephemeral))
			}
			set(test.ephemeral)
			follow()
			follow()
			if text := out.String(); calls != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, test.log) {
				t.Errorf("ports were set %d times, want once; log is %q, want %q", calls, text, test.log)
			}
			set("40000 50000")
			test.want, test.more = bpf.PortRange{Low: 1024, High: 29999}, bpf.PortRange{Low: 50001, High: 65535}
			follow()
			if calls != 2 {
				t.Error("a change was not followed")
			}
		})
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
