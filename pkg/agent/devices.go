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

// Device is one device of the node, and what became of it.
type Device struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	// Class is what the device leads to, "pods" or "uplink", if it is to be
	// attached to. Only an agent knows.
	Class string `json:"class,omitempty"`
	// Attached says how our programs are attached: "tcx", "clsact", or empty if
	// they are not.
	Attached string `json:"attached,omitempty"`
	// Reason says why the device is of its class, or of none.
	Reason  string `json:"reason,omitempty"`
	Problem string `json:"problem,omitempty"`
	// Ahead are programs of others that run before ours, as "egress: NAME". What
	// they drop, or keep from programs behind them, does not come to us.
	Ahead []string `json:"ahead,omitempty"`
}

// deviceKeeper keeps programs attached to the devices for which that was
// decided. It runs on its own: the kernel takes its time for each of them.
type deviceKeeper struct {
	datapath *datapath.Datapath
	log      *slog.Logger
	interval time.Duration // from one check to the next
	changed  chan struct{}
	record   func(kube.Event)
	failFast bool               // a first try that fails is the end
	reaches  func(uplinks bool) // told after each try
	free     []node.PortRange   // for masqueraded flows; nil: not known yet

	mu        sync.Mutex
	decisions []node.Decision
	failed    map[int]string // what went wrong, by index
	unreached map[int]string // where packets pass that our programs do not see, by index
	attached  bool           // to all, once
}

// deviceRetry is how long after a failure the next try comes: the device may be
// about to go, or somebody else at work on it.
const deviceRetry = time.Second

func newDeviceKeeper(dp *datapath.Datapath, log *slog.Logger, interval time.Duration, record func(kube.Event)) *deviceKeeper {
	return &deviceKeeper{datapath: dp, log: log, interval: interval, record: record, changed: make(chan struct{}, 1)}
}

// run attaches once attached is closed, after each change, and now and then,
// since another program may have undone it. The verifier begins before.
func (k *deviceKeeper) run(ctx context.Context, attached <-chan struct{}) error {
	for waiting := true; waiting; {
		select {
		case <-ctx.Done():
			return nil
		case <-k.changed:
			// attach tries both again, and logs.
			_ = k.followPorts(k.datapath.SetMasqueradePorts)
			_ = k.datapath.LoadDevices(devicesOf(k.decided()))
		case <-attached:
			waiting = false
		}
	}
	check := time.NewTicker(k.interval)
	defer check.Stop()
	retry := time.NewTimer(0)
	defer retry.Stop()

	for {
		due := true
		select {
		case <-ctx.Done():
			return nil
		case <-k.changed:
			due = false
		case <-check.C:
		case <-retry.C:
		}
		if k.attach() {
			if due && k.checkReached(ctx) {
				retry.Reset(0)
			}

			continue
		}
		if k.failFast && !k.everAttached() {
			return errors.New("--fail-fast: " + strings.Join(k.obstacles(), "; "))
		}
		retry.Reset(deviceRetry)
	}
}

// set tells what was decided of every device, and logs what is new.
func (k *deviceKeeper) set(decisions []node.Decision) {
	k.mu.Lock()
	known := k.decisions
	k.decisions = decisions
	k.mu.Unlock()

	for _, d := range decisions {
		same := func(o node.Decision) bool {
			return o.Index == d.Index && o.Name == d.Name && o.Class == d.Class && o.Reason == d.Reason
		}
		if !slices.ContainsFunc(known, same) {
			k.log.Info("device", "name", d.Name, "index", d.Index, "class", d.Class, "reason", d.Reason)
		}
	}
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// decided returns what was decided of every device; nil: nothing yet.
func (k *deviceKeeper) decided() []node.Decision {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.decisions
}

// attach makes the kernel's state that which was decided, and says whether all of
// it is.
func (k *deviceKeeper) attach() bool {
	k.mu.Lock()
	decisions, known := k.decisions, k.failed
	k.mu.Unlock()
	if decisions == nil {
		return true // not told yet: whatever an earlier agent attached stays
	}
	devices, names := devicesOf(decisions), make(map[int]string)
	for _, d := range decisions {
		names[d.Index] = d.Name
	}
	begin := time.Now()
	if err := k.followPorts(k.datapath.SetMasqueradePorts); err != nil {
		k.log.Error("ports of masqueraded flows stay as they are", "error", err)
	}
	errs, err := k.datapath.AttachDevices(devices)
	failed := make(map[int]string, len(errs))
	for index, err := range errs {
		failed[index] = err.Error()
	}
	if err != nil {
		names[noDevice], failed[noDevice] = "all", err.Error()
	}
	for index, text := range failed {
		if known[index] != text {
			k.log.Error("not all is attached to a device as it should be; trying again", "name", names[index], "error", text)
		}
	}
	k.mu.Lock()
	first := len(failed) == 0 && !k.attached
	k.failed, k.attached = failed, k.attached || first
	k.mu.Unlock()
	k.reaches(reachesUplinks(devices, failed))
	if first {
		if err := k.datapath.DevicesNotKept(); err != nil {
			k.log.Warn("programs could not be kept; the next agent takes longer to start", "error", err)
		}
		k.log.Info("attached to devices", "devices", len(devices), "by", k.datapath.Attachment(), "took", time.Since(begin))
	}

	return len(failed) == 0
}

// reachTime is how long packets are waited for where others run before our programs.
const reachTime = 300 * time.Millisecond

// checkReached finds out where packets pass that our programs do not see, since another one
// before them ends the chain, and reports whether another try to attach may mend it.
func (k *deviceKeeper) checkReached(ctx context.Context) (again bool) {
	found, again, err := k.datapath.FindUnreached(devicesOf(k.decided()), func() {
		select {
		case <-ctx.Done():
		case <-time.After(reachTime):
		}
	})
	if err != nil {
		k.log.Error("where packets pass that no program sees is not known", "error", err)

		return false
	}
	if ctx.Err() == nil {
		k.setUnreached(found)
	}

	return again
}

// setUnreached notes where packets pass that our programs do not see, and tells what is new.
func (k *deviceKeeper) setUnreached(found []datapath.Unreached) {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := k.unreached
	k.unreached = make(map[int]string)
	for _, u := range found {
		text := u.String()
		if k.unreached[u.Index] != "" {
			text = k.unreached[u.Index] + "; " + text
		}
		k.unreached[u.Index] = text
	}
	for _, index := range slices.Sorted(stdmaps.Keys(k.unreached)) {
		if known[index] != k.unreached[index] {
			note := fmt.Sprintf("device %s: %s", k.nameOf(index), k.unreached[index])
			k.log.Error("a device is not effective", "name", k.nameOf(index), "problem", k.unreached[index])
			k.record(kube.Event{Reason: kube.ReasonUnreached, Action: actionCheck, Note: note})
		}
	}
	if len(known) > 0 && len(k.unreached) == 0 {
		k.log.Info("all devices are effective again")
		k.record(kube.Event{Reason: kube.ReasonReached, Action: actionCheck, Normal: true, Note: "all devices are effective again"})
	}
}

// nameOf returns what a device is called. The caller holds mu.
func (k *deviceKeeper) nameOf(index int) string {
	if at := slices.IndexFunc(k.decisions, func(d node.Decision) bool { return d.Index == index }); at >= 0 {
		return k.decisions[at].Name
	}

	return "all"
}

// everAttached says that all was attached once.
func (k *deviceKeeper) everAttached() bool {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.attached
}

// obstacles says why not all is attached that should be, or not effective. Any goroutine may call it.
func (k *deviceKeeper) obstacles() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.failed) == 0 && !k.attached {
		return []string{"devices are not attached yet"}
	}
	var reasons []string
	for _, problems := range []map[int]string{k.failed, k.unreached} {
		for _, index := range slices.Sorted(stdmaps.Keys(problems)) {
			reasons = append(reasons, fmt.Sprintf("device %s: %s", k.nameOf(index), problems[index]))
		}
	}

	return reasons
}

// reachesUplinks says whether no uplink is among what failed. A pod's device may be
// about to go, and is that pod's trouble.
func reachesUplinks(devices []datapath.Device, failed map[int]string) bool {
	if _, all := failed[noDevice]; all {
		return false
	}

	return !slices.ContainsFunc(devices, func(d datapath.Device) bool {
		_, failed := failed[d.Index]

		return failed && d.Class == maps.DeviceUplink
	})
}

// noDevice stands for what is wrong with none in particular.
const noDevice = 0

// devicesOf returns the devices that programs are to be attached to.
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

// status returns every device, by the kernel's own word.
func (k *deviceKeeper) status() ([]Device, error) {
	devices, err := devicesIn(k.datapath.Devices)
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range devices {
		d := &devices[i]
		at := slices.IndexFunc(k.decisions, func(o node.Decision) bool { return o.Index == d.Index })
		if at < 0 {
			continue // it has just come
		}
		decision := k.decisions[at]
		d.Class, d.Reason = decision.Class.String(), decision.Reason
		problems := []string{d.Problem, k.failed[d.Index], k.unreached[d.Index]}
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

// devicesIn is what the kernel says of all devices.
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

// throughStack returns why packets to backends on other nodes have to pass the network stack, or "" if
// they need not.
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

// decideForwarding decides whether packets pass the network stack, and logs that if it is new.
func (a *agent) decideForwarding() {
	why := throughStack(a.cfg.ThroughStack, a.datapath.Features().FIBMTU, a.model.concern)
	if a.throughStack == nil || *a.throughStack != why {
		a.cfg.Log.Info("forwarding to backends on other nodes", "stack", why != "", "because", why)
	}
	a.throughStack = &why
}

// deviceEntries are the devices as programs see them. If turns, packets may leave by uplinks without
// passing the network stack.
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

// deviceRules adds to the configured rules what detectLocalMode says of devices.
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
func (k *deviceKeeper) followPorts(set func(ports, more bpf.PortRange) error) error {
	free, err := node.MasqueradePorts()
	if err != nil || k.free != nil && slices.Equal(free, k.free) {
		return err
	}
	ports, more := bpf.DefaultMasqueradePorts, bpf.PortRange{}
	if len(free) > 0 {
		ports = bpf.PortRange(free[0])
		k.log.Info("ports of masqueraded flows", "ports", free)
	} else {
		k.log.Warn("every port is for node ports or handed out to sockets of the node, which masqueraded flows "+
			"can collide with; narrow net.ipv4.ip_local_port_range, or reserve ports in net.ipv4.ip_local_reserved_ports",
			"masquerade", node.PortRange(ports))
	}
	if len(free) > 1 {
		more = bpf.PortRange(free[1])
	}
	k.free = append([]node.PortRange{}, free...) // not nil

	return set(ports, more)
}
