package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	stdmaps "maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

// DeviceMonitor keeps programs attached to the devices for which that was decided. It has a
// goroutine of its own, because the kernel takes long for each of them.
type DeviceMonitor struct {
	datapath *Datapath
	cfg      DeviceMonitorConfig
	changed  chan struct{}
	ports    *node.MasqueradePorts // nil: not known yet
	uplinks  bool                  // attached, when it was last tried
	pause    func(context.Context) // between the counts of a trial

	mu        sync.Mutex
	inForce   *node.MasqueradePorts // of the programs that are attached; nil: not known yet
	decisions []node.Decision
	appeared  map[int]time.Time // when devices came, by index; zero: before this agent
	failed    map[int]string    // what went wrong, by index
	leftOut   map[int]string    // why devices of pods stay without our programs, by index
	unreached map[int]string    // where packets pass that our programs do not see, by index
	attached  bool              // to all, once
	replaced  bool              // no device that is not in failed has programs of an earlier agent
}

// DeviceMonitorConfig configures a [DeviceMonitor].
type DeviceMonitorConfig struct {
	// HooksTried is closed when the programs of hooks are attached, or cannot be. Those of devices are attached
	// after them if they can: clients outside need no hook.
	HooksTried <-chan struct{}
	// Interval is the time between checks.
	Interval time.Duration
	// FailFast ends Run with an error if the first try does not attach all.
	FailFast bool
	// UplinksAttached is called after each try with whether all uplinks are attached, as far as is known.
	UplinksAttached func(bool)
	// Record is called with each change that operators should see.
	Record func(Event)
	Log    *slog.Logger
}

// deviceRetry is how long after a failure the next try comes: the device may be
// about to go, or another program may be changing it.
const deviceRetry = time.Second

// settleTime is how long the device of a new pod is left alone where our programs are filters. A plugin of the CNI that
// runs after the one that made the device may add a qdisc, which it cannot if clsact is there: see errNoRoom.
const settleTime = 2 * time.Second

// NewDeviceMonitor returns a monitor without decisions.
func NewDeviceMonitor(d *Datapath, cfg DeviceMonitorConfig) *DeviceMonitor {
	pause := func(ctx context.Context) {
		select {
		case <-ctx.Done():
		case <-time.After(probeTime):
		}
	}

	return &DeviceMonitor{datapath: d, cfg: cfg, changed: make(chan struct{}, 1), pause: pause}
}

// Run attaches programs once [DeviceMonitorConfig.HooksTried] is closed, after each change, and at each interval,
// because another program may have detached them. It starts to load them before.
func (m *DeviceMonitor) Run(ctx context.Context) error {
	for waiting := true; waiting; {
		select {
		case <-ctx.Done():
			return nil
		case <-m.changed:
			// attach tries both again, and logs.
			_ = m.followPorts(m.datapath.SetMasqueradePorts)
			_ = m.datapath.LoadDevices(devicesOf(m.decided()))
		case <-m.cfg.HooksTried:
			waiting = false
		}
	}
	check := time.NewTicker(m.cfg.Interval)
	defer check.Stop()
	retry := time.NewTimer(0)
	defer retry.Stop()
	// A trial takes almost a second, in which the devices of new pods do not wait.
	trials, trying := make(chan *trial, 1), false
	var counting sync.WaitGroup
	defer func() {
		counting.Wait()
		close(trials)
		for t := range trials {
			_ = t.close() // what it has found is of no use any more
		}
	}()

	for {
		due := true
		select {
		case <-ctx.Done():
			return nil
		case t := <-trials:
			trying = false
			if m.endTrial(t) {
				retry.Reset(0)
			}

			continue
		case <-m.changed:
			due = false
		case <-check.C:
		case <-retry.C:
		}
		ok := m.attach()
		if _, wait := m.settled(time.Now()); wait > 0 {
			retry.Reset(wait)
		}
		switch {
		case !ok && !m.attached && m.cfg.FailFast: // only this goroutine writes it
			return errors.New("--fail-fast: " + strings.Join(m.Problems(), "; "))
		case !ok:
			retry.Reset(deviceRetry)
		case due:
			if err := node.ConfirmNeighbours(bridgesOf(m.decided())); err != nil {
				m.cfg.Log.Warn("addresses of pods behind bridges are not confirmed", "error", err)
			}
			if trying {
				continue
			}
			t, err := m.datapath.beginTrial(devicesOf(m.decided()))
			switch {
			case err != nil:
				m.cfg.Log.Error(unreachedUnknown, "error", err)
			case t == nil:
				m.setUnreached(nil)
			default:
				trying = true
				counting.Go(func() {
					t.count(func() { m.pause(ctx) })
					trials <- t
				})
			}
		}
	}
}

// unreachedUnknown is logged when a trial fails.
const unreachedUnknown = "where packets pass that no program sees is not known"

// endTrial notes what a trial has found, and reports whether programs have to be attached again because of it.
func (m *DeviceMonitor) endTrial(t *trial) (again bool) {
	found, again, err := m.datapath.endTrial(t)
	if err != nil {
		m.cfg.Log.Error(unreachedUnknown, "error", err)
	} else {
		m.setUnreached(found)
	}

	return again
}

// Set replaces the decisions about devices, and logs those that are new.
func (m *DeviceMonitor) Set(decisions []node.Decision) {
	m.mu.Lock()
	known := m.decisions
	m.decisions = decisions
	m.noteAppeared(known)
	m.mu.Unlock()

	for _, d := range decisions {
		same := func(o node.Decision) bool {
			return o.Index == d.Index && o.Name == d.Name && o.Class == d.Class && o.Reason == d.Reason
		}
		if !slices.ContainsFunc(known, same) {
			m.cfg.Log.Info("device", "name", d.Name, "index", d.Index, "class", d.Class, "reason", d.Reason)
		}
	}
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// noteAppeared notes which devices have come since these decisions. The caller holds mu.
func (m *DeviceMonitor) noteAppeared(known []node.Decision) {
	appeared := make(map[int]time.Time)
	for _, d := range m.decisions {
		same := func(o node.Decision) bool { return o.Index == d.Index }
		switch {
		case slices.ContainsFunc(known, same):
			appeared[d.Index] = m.appeared[d.Index]
		case known != nil:
			appeared[d.Index] = time.Now()
		}
	}
	m.appeared = appeared
}

// settled returns the decisions about devices to which programs are attached now, and after what time there will be
// more, 0 if there is none.
func (m *DeviceMonitor) settled(now time.Time) (decisions []node.Decision, wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.decisions {
		left := m.settlesAfter(d, now)
		if left <= 0 {
			decisions = append(decisions, d)
		} else if wait == 0 || left < wait {
			wait = left
		}
	}

	return decisions, wait
}

// settlesAfter returns after what time programs are attached to a device, not more than 0 if that is now. The caller
// holds mu.
func (m *DeviceMonitor) settlesAfter(d node.Decision, now time.Time) time.Duration {
	if d.Class != node.ClassPods || m.datapath.Attachment() != Clsact {
		return 0
	}

	return m.appeared[d.Index].Add(settleTime).Sub(now)
}

// decided returns the decisions about devices, nil if there are none yet.
func (m *DeviceMonitor) decided() []node.Decision {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.decisions
}

// attach attaches and detaches programs as was decided, and reports whether all of that
// succeeded.
func (m *DeviceMonitor) attach() bool {
	if m.decided() == nil {
		return true // nothing is decided yet: what an earlier agent attached stays
	}
	decisions, _ := m.settled(time.Now())
	m.mu.Lock()
	known, leftOutBefore := m.failed, m.leftOut
	m.mu.Unlock()
	devices, names := devicesOf(decisions), make(map[int]string)
	for _, d := range decisions {
		names[d.Index] = d.Name
	}
	begin := time.Now()
	if err := m.followPorts(m.datapath.SetMasqueradePorts); err != nil {
		m.cfg.Log.Error("ports of masqueraded flows stay as they are", "error", err)
	}
	errs, err := m.datapath.AttachDevices(devices)
	m.datapath.reportTakenOver(m.cfg.Log, m.cfg.Record)
	failed, leftOut := make(map[int]string, len(errs)), make(map[int]string)
	for _, d := range devices {
		switch err := errs[d.Index]; {
		case err == nil:
		case !d.isLeftOut(err):
			failed[d.Index] = err.Error()
		default:
			leftOut[d.Index] = err.Error()
			if leftOutBefore[d.Index] == "" {
				m.cfg.Log.Warn("the device of a pod stays without programs", "name", names[d.Index], "because", err)
			}
		}
	}
	if err != nil {
		names[noDevice], failed[noDevice] = "all", err.Error()
	}
	for index, text := range failed {
		if known[index] != text {
			m.cfg.Log.Error("not all is attached to a device as it should be; trying again", "name", names[index], "error", text)
		}
	}
	ok := len(failed) == 0
	m.mu.Lock()
	first := ok && !m.attached
	if ok {
		m.inForce = m.ports
	}
	m.failed, m.leftOut, m.attached, m.replaced = failed, leftOut, m.attached || ok, m.replaced || err == nil
	m.mu.Unlock()
	// Devices of pods do not count: they may be about to go, and concern that pod only. Nor do other failures: what is
	// attached stays then.
	if errs != nil {
		m.uplinks = !slices.ContainsFunc(devices, func(d Device) bool { return d.Class == maps.DeviceUplink && errs[d.Index] != nil })
	}
	m.cfg.UplinksAttached(m.uplinks)
	if first {
		if err := m.datapath.DevicesNotKept(); err != nil {
			m.cfg.Log.Warn("programs could not be kept; the next agent takes longer to start", "error", err)
		}
		m.cfg.Log.Info("attached to devices", "devices", len(devices), "by", m.datapath.Attachment(), "took", time.Since(begin))
	}

	return ok
}

// probeTime is how long packets are counted where other programs run before ours.
const probeTime = 300 * time.Millisecond

// setUnreached replaces the hooks where packets pass that our programs do not see. It logs and
// records what is new.
func (m *DeviceMonitor) setUnreached(found []Unreached) {
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
			m.cfg.Log.Error("a device is not effective", "name", m.nameOf(index), "problem", m.unreached[index])
			m.cfg.Record(Event{Kind: DevicesNotEffective, Note: note})
		}
	}
	if len(known) > 0 && len(m.unreached) == 0 {
		m.cfg.Log.Info("all devices are effective again")
		m.cfg.Record(Event{Kind: DevicesEffective, Note: "all devices are effective again"})
	}
}

// nameOf returns the name of a device. The caller holds mu.
func (m *DeviceMonitor) nameOf(index int) string {
	if at := slices.IndexFunc(m.decisions, func(d node.Decision) bool { return d.Index == index }); at >= 0 {
		return m.decisions[at].Name
	}

	return "all"
}

// Problems returns why not all devices are attached or effective. Any goroutine may call it.
func (m *DeviceMonitor) Problems() []string {
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

// noDevice is the index of a failure that concerns no device in particular.
const noDevice = 0

// devicesOf returns the devices to attach programs to.
func devicesOf(decisions []node.Decision) []Device {
	var devices []Device
	for _, d := range decisions {
		if d.Class == node.ClassNone {
			continue
		}
		device := Device{Index: d.Index, Class: maps.DeviceUplink, NoEthernet: d.LinkLayer == node.LinkIP, BridgePort: d.Bridge != 0}
		if d.Class == node.ClassPods {
			device.Class = maps.DevicePods
		}
		devices = append(devices, device)
	}

	return devices
}

// bridgesOf returns the bridges of pods: see bypass_node in bpf/lib/route.h.
func bridgesOf(decisions []node.Decision) []int {
	var bridges []int
	for _, d := range decisions {
		if d.Class == node.ClassPods && d.Bridge != 0 && !slices.Contains(bridges, d.Bridge) {
			bridges = append(bridges, d.Bridge)
		}
	}

	return bridges
}

// Status returns every device as the kernel has it now, with the decision about it.
func (m *DeviceMonitor) Status() ([]DeviceState, error) {
	devices, err := m.datapath.Devices()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range devices {
		d := &devices[i]
		at := slices.IndexFunc(m.decisions, func(o node.Decision) bool { return o.Index == d.Index })
		if at >= 0 {
			decision := m.decisions[at]
			d.Class, d.Reason = decision.Class.String(), decision.Reason
			problems := []string{d.Problem, m.failed[d.Index], m.leftOut[d.Index], m.unreached[d.Index]}
			wanted, attached := decision.Class != node.ClassNone, d.Attached != ""
			switch {
			case m.leftOut[d.Index] != "":
			case wanted && !attached && m.settlesAfter(decision, time.Now()) > 0:
			case wanted && !attached:
				problems = append(problems, "not attached")
			case wanted && !m.replaced: // they may use maps that no agent writes any more
				problems = append(problems, "programs of an earlier agent are not replaced yet")
			case !wanted && attached:
				problems = append(problems, "still attached")
			}
			d.Problem = strings.Join(slices.DeleteFunc(problems, func(p string) bool { return p == "" }), "; ")
		}
	}

	return devices, nil
}

// Count returns how many devices there are of each class, and how many have a problem.
func (m *DeviceMonitor) Count() (classes map[string]int, problems int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	classes = map[string]int{"pods": 0, "uplink": 0, "none": 0}
	for _, d := range m.decisions {
		class := "none"
		if d.Class != node.ClassNone {
			class = d.Class.String()
		}
		classes[class]++
	}

	return classes, len(m.failed) + len(m.unreached)
}

// followPorts sets the ports of masqueraded flows, at first and whenever sysctls have changed which
// there are. It logs and records what is worse than it could be, or was.
func (m *DeviceMonitor) followPorts(set func(ports, more bpf.PortRange) error) error {
	now, err := node.ReadMasqueradePorts()
	if err != nil || m.ports != nil && reflect.DeepEqual(now, *m.ports) {
		return err
	}
	note := "masqueraded flows have the ports " + now.String()
	if m.ports != nil {
		note += ", which were " + m.ports.String()
	}
	problem, remedy := now.Problem()
	switch {
	case problem != "":
		m.cfg.Log.Warn(note, "problem", problem, "remedy", remedy)
		m.cfg.Record(Event{Kind: MasqueradePortsLimited, Note: note + ": " + problem})
	case m.ports != nil && now.Len() < m.ports.Len():
		m.cfg.Log.Warn(note)
		m.cfg.Record(Event{Kind: MasqueradePortsLimited, Note: note})
	default:
		m.cfg.Log.Info(note)
		if m.ports != nil {
			m.cfg.Record(Event{Kind: MasqueradePortsExtended, Note: note})
		}
	}
	m.ports = &now
	more := bpf.PortRange{}
	if len(now.Ranges) > 1 {
		more = now.Ranges[1]
	}

	return set(now.Ranges[0], more)
}

// MasqueradePorts returns the ports of masqueraded flows, as a text, and what of them is not as it
// should be, if anything. Both are "" if they are not known yet. Any goroutine may call it.
func (m *DeviceMonitor) MasqueradePorts() (ports, problem string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inForce == nil {
		return "", ""
	}
	problem, _ = m.inForce.Problem()

	return m.inForce.String(), problem
}
