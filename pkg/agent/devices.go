package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	stdmaps "maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/node"
)

// Device is one device of the node, with its class and what is attached to it.
type Device struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	// Class is what the device leads to, "pods" or "uplink", if programs are to be
	// attached to it. Only an agent knows it.
	Class string `json:"class,omitempty"`
	// Attached is how our programs are attached: "tcx", "clsact", or empty if
	// they are not.
	Attached string `json:"attached,omitempty"`
	// Reason is why the device is of its class, or of none.
	Reason  string `json:"reason,omitempty"`
	Problem string `json:"problem,omitempty"`
	// Ahead are other programs that run before ours, as "egress: NAME". Packets
	// that they drop, or pass without running later programs, do not reach ours.
	Ahead []string `json:"ahead,omitempty"`
}

// deviceMonitor keeps programs attached to the devices for which that was decided. It has a
// goroutine of its own, because the kernel takes long for each of them.
type deviceMonitor struct {
	datapath *datapath.Datapath
	log      *slog.Logger
	interval time.Duration // from one check to the next
	changed  chan struct{}
	record   func(kube.Event)
	failFast bool               // a first try that fails is the end
	reaches  func(uplinks bool) // called after each try
	free     []bpf.PortRange    // for masqueraded flows; nil: not known yet

	mu        sync.Mutex
	decisions []node.Decision
	failed    map[int]string // what went wrong, by index
	unreached map[int]string // where packets pass that our programs do not see, by index
	attached  bool           // to all, once
}

// deviceRetry is how long after a failure the next try comes: the device may be
// about to go, or another program may be changing it.
const deviceRetry = time.Second

func newDeviceMonitor(dp *datapath.Datapath, log *slog.Logger, interval time.Duration, record func(kube.Event)) *deviceMonitor {
	return &deviceMonitor{datapath: dp, log: log, interval: interval, record: record, changed: make(chan struct{}, 1)}
}

// run attaches programs once attached is closed, after each change, and at each interval,
// because another program may have detached them. It starts to load them before.
func (m *deviceMonitor) run(ctx context.Context, attached <-chan struct{}) error {
	for waiting := true; waiting; {
		select {
		case <-ctx.Done():
			return nil
		case <-m.changed:
			// attach tries both again, and logs.
			_ = m.followPorts(m.datapath.SetMasqueradePorts)
			_ = m.datapath.LoadDevices(devicesOf(m.decided()))
		case <-attached:
			waiting = false
		}
	}
	check := time.NewTicker(m.interval)
	defer check.Stop()
	retry := time.NewTimer(0)
	defer retry.Stop()

	for {
		due := true
		select {
		case <-ctx.Done():
			return nil
		case <-m.changed:
			due = false
		case <-check.C:
		case <-retry.C:
		}
		if m.attach() {
			if due && m.checkUnreached(ctx) {
				retry.Reset(0)
			}

			continue
		}
		if m.failFast && !m.everAttached() {
			return errors.New("--fail-fast: " + strings.Join(m.obstacles(), "; "))
		}
		retry.Reset(deviceRetry)
	}
}

// set replaces the decisions about devices, and logs those that are new.
func (m *deviceMonitor) set(decisions []node.Decision) {
	m.mu.Lock()
	known := m.decisions
	m.decisions = decisions
	m.mu.Unlock()

	for _, d := range decisions {
		same := func(o node.Decision) bool {
			return o.Index == d.Index && o.Name == d.Name && o.Class == d.Class && o.Reason == d.Reason
		}
		if !slices.ContainsFunc(known, same) {
			m.log.Info("device", "name", d.Name, "index", d.Index, "class", d.Class, "reason", d.Reason)
		}
	}
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// decided returns the decisions about devices, nil if there are none yet.
func (m *deviceMonitor) decided() []node.Decision {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.decisions
}

// attach attaches and detaches programs as was decided, and reports whether all of that
// succeeded.
func (m *deviceMonitor) attach() bool {
	m.mu.Lock()
	decisions, known := m.decisions, m.failed
	m.mu.Unlock()
	if decisions == nil {
		return true // nothing is decided yet: what an earlier agent attached stays
	}
	devices, names := devicesOf(decisions), make(map[int]string)
	for _, d := range decisions {
		names[d.Index] = d.Name
	}
	begin := time.Now()
	if err := m.followPorts(m.datapath.SetMasqueradePorts); err != nil {
		m.log.Error("ports of masqueraded flows stay as they are", "error", err)
	}
	errs, err := m.datapath.AttachDevices(devices)
	failed := make(map[int]string, len(errs))
	for index, err := range errs {
		failed[index] = err.Error()
	}
	if err != nil {
		names[noDevice], failed[noDevice] = "all", err.Error()
	}
	for index, text := range failed {
		if known[index] != text {
			m.log.Error("not all is attached to a device as it should be; trying again", "name", names[index], "error", text)
		}
	}
	m.mu.Lock()
	first := len(failed) == 0 && !m.attached
	m.failed, m.attached = failed, m.attached || first
	m.mu.Unlock()
	m.reaches(reachesUplinks(devices, failed))
	if first {
		if err := m.datapath.DevicesNotKept(); err != nil {
			m.log.Warn("programs could not be kept; the next agent takes longer to start", "error", err)
		}
		m.log.Info("attached to devices", "devices", len(devices), "by", m.datapath.Attachment(), "took", time.Since(begin))
	}

	return len(failed) == 0
}

// probeTime is how long packets are counted where other programs run before ours.
const probeTime = 300 * time.Millisecond

// checkUnreached finds the hooks where packets pass that our programs do not see, because
// another program before them ends the chain. It reports whether attaching again may help.
func (m *deviceMonitor) checkUnreached(ctx context.Context) (again bool) {
	found, again, err := m.datapath.FindUnreached(devicesOf(m.decided()), func() {
		select {
		case <-ctx.Done():
		case <-time.After(probeTime):
		}
	})
	if err != nil {
		m.log.Error("where packets pass that no program sees is not known", "error", err)

		return false
	}
	if ctx.Err() == nil {
		m.setUnreached(found)
	}

	return again
}

// setUnreached replaces the hooks where packets pass that our programs do not see. It logs and
// records what is new.
func (m *deviceMonitor) setUnreached(found []datapath.Unreached) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.unreached
	m.unreached = make(map[int]string)
	for _, u := range found {
		text := u.String()
		if m.unreached[u.Index] != "" {
			text = m.unreached[u.Index] + "; " + text
		}
		m.unreached[u.Index] = text
	}
	for _, index := range slices.Sorted(stdmaps.Keys(m.unreached)) {
		if known[index] != m.unreached[index] {
			note := fmt.Sprintf("device %s: %s", m.nameOf(index), m.unreached[index])
			m.log.Error("a device is not effective", "name", m.nameOf(index), "problem", m.unreached[index])
			m.record(kube.Event{Reason: kube.ReasonUnreached, Action: actionCheck, Note: note})
		}
	}
	if len(known) > 0 && len(m.unreached) == 0 {
		m.log.Info("all devices are effective again")
		m.record(kube.Event{Reason: kube.ReasonReached, Action: actionCheck, Normal: true, Note: "all devices are effective again"})
	}
}

// nameOf returns the name of a device. The caller holds mu.
func (m *deviceMonitor) nameOf(index int) string {
	if at := slices.IndexFunc(m.decisions, func(d node.Decision) bool { return d.Index == index }); at >= 0 {
		return m.decisions[at].Name
	}

	return "all"
}

// everAttached reports whether all devices were attached once.
func (m *deviceMonitor) everAttached() bool {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.attached
}

// obstacles returns why not all devices are attached or effective. Any goroutine may call it.
func (m *deviceMonitor) obstacles() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.failed) == 0 && !m.attached {
		return []string{"devices are not attached yet"}
	}
	var reasons []string
	for _, problems := range []map[int]string{m.failed, m.unreached} {
		for _, index := range slices.Sorted(stdmaps.Keys(problems)) {
			reasons = append(reasons, fmt.Sprintf("device %s: %s", m.nameOf(index), problems[index]))
		}
	}

	return reasons
}

// reachesUplinks reports whether no uplink has failed. Devices of pods do not count: they may
// be about to go, and concern that pod only.
func reachesUplinks(devices []datapath.Device, failed map[int]string) bool {
	if _, all := failed[noDevice]; all {
		return false
	}

	return !slices.ContainsFunc(devices, func(d datapath.Device) bool {
		_, failed := failed[d.Index]

		return failed && d.Class == maps.DeviceUplink
	})
}

// noDevice is the index of a failure that concerns no device in particular.
const noDevice = 0

// devicesOf returns the devices to attach programs to.
func devicesOf(decisions []node.Decision) []datapath.Device {
	var devices []datapath.Device
	for _, d := range decisions {
		if d.Class != node.ClassNone {
			devices = append(devices, deviceOf(d))
		}
	}

	return devices
}

func deviceOf(d node.Decision) datapath.Device {
	device := datapath.Device{
		Index:      d.Index,
		Class:      maps.DeviceUplink,
		NoEthernet: d.LinkLayer == node.LinkIP,
		BridgePort: d.Bridge != 0,
	}
	if d.Class == node.ClassPods {
		device.Class = maps.DevicePods
	}

	return device
}

// status returns every device as the kernel has it now, with the decisions about it.
func (m *deviceMonitor) status() ([]Device, error) {
	devices, err := devicesIn(m.datapath.Devices)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range devices {
		d := &devices[i]
		at := slices.IndexFunc(m.decisions, func(o node.Decision) bool { return o.Index == d.Index })
		if at < 0 {
			continue // it has just come
		}
		decision := m.decisions[at]
		d.Class, d.Reason = decision.Class.String(), decision.Reason
		problems := []string{d.Problem, m.failed[d.Index], m.unreached[d.Index]}
		wanted, attached := decision.Class != node.ClassNone, d.Attached != ""
		switch {
		case wanted && !attached:
			problems = append(problems, "not attached")
		case !wanted && attached:
			problems = append(problems, "still attached")
		}
		d.Problem = strings.Join(slices.DeleteFunc(problems, func(p string) bool { return p == "" }), "; ")
	}

	return devices, nil
}

// devicesIn returns all devices with their state in the kernel.
func devicesIn(query func() ([]datapath.DeviceState, error)) ([]Device, error) {
	states, err := query()
	if err != nil {
		return nil, err
	}
	devices := make([]Device, 0, len(states))
	for _, s := range states {
		devices = append(devices, Device{
			Index: s.Index, Name: s.Name, Attached: string(s.Attached), Problem: s.Problem, Ahead: s.Ahead,
		})
	}

	return devices, nil
}

// throughStack returns why packets to backends on other nodes have to pass the network stack, or
// "" if they need not.
func throughStack(always, knowsMTU bool, concern string) string {
	switch {
	case always:
		return "--forwarding stack"
	case !knowsMTU:
		return "the kernel's lookup of routes knows no MTU (Linux 5.12)"
	default:
		return concern
	}
}

// decideForwarding decides whether packets to backends on other nodes pass the network stack, and
// logs that if it has changed.
func (a *agent) decideForwarding() {
	why := throughStack(a.cfg.ThroughStack, a.datapath.Features().FIBMTU, a.model.concern)
	if a.throughStack == nil || *a.throughStack != why {
		a.cfg.Log.Info("forwarding to backends on other nodes", "stack", why != "", "because", why)
	}
	a.throughStack = &why
}

// deviceEntries returns the entries of the devices map. With turns, packets may leave by uplinks
// without passing the network stack.
func deviceEntries(decisions []node.Decision, turns bool) map[uint32]maps.Device {
	entries := make(map[uint32]maps.Device, len(decisions))
	for _, d := range decisions {
		entry := maps.Device{Bridge: uint32(d.Bridge)}
		if d.SourceV4.IsValid() {
			entry.SourceV4 = maps.AddrOf(d.SourceV4)
		}
		if d.SourceV6.IsValid() {
			entry.SourceV6 = maps.AddrOf(d.SourceV6)
		}
		if turns && d.Class == node.ClassUplink && d.TakesFrames {
			entry.Flags = maps.DeviceTurns
		}
		entries[uint32(d.Index)] = entry
	}

	return entries
}

// deviceRules returns the configured rules with those of the local mode.
func deviceRules(cfg Config) (node.Rules, error) {
	rules := cfg.Devices
	switch cfg.Local.Effective() {
	case LocalBridgeInterface:
		rules.PodBridge = cfg.Local.BridgeInterface
	case LocalInterfaceNamePrefix:
		rules.PodPrefix = cfg.Local.InterfaceNamePrefix
	}
	if err := rules.Validate(); err != nil {
		return rules, fmt.Errorf("config: Devices: %w", err)
	}

	return rules, nil
}

// followPorts sets the ports of masqueraded flows, at first and whenever sysctls have changed
// which ports are free.
func (m *deviceMonitor) followPorts(set func(ports, more bpf.PortRange) error) error {
	free, err := node.MasqueradePorts()
	if err != nil || m.free != nil && slices.Equal(free, m.free) {
		return err
	}
	ports, more := bpf.DefaultMasqueradePorts, bpf.PortRange{}
	if len(free) > 0 {
		ports = free[0]
		m.log.Info("ports of masqueraded flows", "ports", free)
	} else {
		m.log.Warn("every port is for node ports or handed out to sockets of the node, which masqueraded flows "+
			"can collide with; narrow net.ipv4.ip_local_port_range, or reserve ports in net.ipv4.ip_local_reserved_ports",
			"masquerade", ports)
	}
	if len(free) > 1 {
		more = free[1]
	}
	m.free = append([]bpf.PortRange{}, free...) // not nil

	return set(ports, more)
}
