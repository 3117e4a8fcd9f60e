package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/pkg/node"
)

// Attachment is a way to attach programs to devices.
type Attachment string

// The attachments.
const (
	TCX    Attachment = "tcx"    // links (Linux 6.6)
	Clsact Attachment = "clsact" // filters of the qdisc clsact
)

// ParseAttachment parses an Attachment. With an empty one, the features of the kernel
// decide.
func ParseAttachment(text string) (Attachment, error) {
	switch a := Attachment(text); a {
	case "", TCX, Clsact:
		return a, nil
	}

	return "", fmt.Errorf("%q: it is %s or %s", text, TCX, Clsact)
}

// Device is a device to which programs are attached.
type Device struct {
	Index      int
	Class      uint32 // maps.DevicePods or maps.DeviceUplink
	NoEthernet bool   // packets begin with the IP header
	BridgePort bool
}

// deviceHook is one of the two hooks of a device.
type deviceHook struct {
	name    string // of the pin
	attach  ebpf.AttachType
	anchor  link.Anchor
	program func(*bpf.DevicePrograms) *ebpf.Program

	// of filters
	parent   uint32
	filter   string // the name of our filter
	priority uint16
}

// deviceHooks returns the hooks in the order in which they are attached: egress,
// which translates answers, comes before ingress, which translates requests. Our
// programs are the outermost ones, the first at ingress and the last at egress, so
// that programs of others see the same addresses as the stack.
func deviceHooks() []deviceHook {
	return []deviceHook{
		{
			name: "egress", attach: ebpf.AttachTCXEgress, anchor: link.Tail(),
			program: func(p *bpf.DevicePrograms) *ebpf.Program { return p.Egress },
			parent:  netlink.HANDLE_MIN_EGRESS, filter: "sluice_egress", priority: 0xffff,
		},
		{
			name: "ingress", attach: ebpf.AttachTCXIngress, anchor: link.Head(),
			program: func(p *bpf.DevicePrograms) *ebpf.Program { return p.Ingress },
			parent:  netlink.HANDLE_MIN_INGRESS, filter: "sluice_ingress", priority: 1,
		},
	}
}

// Attachment returns how this Datapath attaches to devices.
func (d *Datapath) Attachment() Attachment {
	switch {
	case d.cfg.Attachment != "":
		return d.cfg.Attachment
	case d.features.TCX:
		return TCX
	default:
		return Clsact
	}
}

// AttachDevices attaches our programs to these devices, or replaces, each in one
// step, those of an earlier agent; and detaches them from all other devices of the
// calling thread's network namespace, which must be the node's, and those of other
// instances from all. It attaches again what another program has detached. It must not be called by two goroutines at the
// same time.
//
// It returns the errors of devices by their index, nil if nothing was tried, and any other error. It is not an
// error that a device is gone. After an error, AttachDevices can be called again.
func (d *Datapath) AttachDevices(devices []Device) (map[int]error, error) {
	qdiscs, err := listQdiscs()
	if err != nil {
		return nil, err
	}
	if err := d.maps.CopyState(); err != nil {
		return nil, err
	}
	others, err := d.beginTakeover()
	if err != nil {
		return nil, err
	}
	failed, complete := make(map[int]error), true
	clear(d.devices.ahead)
	d.devices.forget(devices)
	for _, hook := range deviceHooks() {
		for _, device := range devices {
			if failed[device.Index] != nil {
				continue
			}
			err := d.attachDevice(device, hook, qdiscs, others)
			if err != nil && !errors.Is(err, unix.ENODEV) {
				failed[device.Index] = fmt.Errorf("%s: %w", hook.name, err)
				complete = complete && device.isLeftOut(err)
			}
		}
	}

	// Other devices lose our programs, and these lose those of the other kind of attachment. A
	// device that failed keeps what is attached to it.
	keep := func(by Attachment) func(int) bool {
		return func(index int) bool {
			wanted := slices.ContainsFunc(devices, func(device Device) bool { return device.Index == index })

			return wanted && (by == d.Attachment() || failed[index] != nil)
		}
	}
	err = errors.Join(d.links.detachDevices(keep(TCX)), d.devices.detachFilters(keep(Clsact), complete, others), others.release())
	if complete {
		isDevice := func(kind link.Type) bool { return kind == link.TCXType }
		d.endOthers(isDevice)
		err = errors.Join(err, d.endTakeover(), d.removeKept())
		if d.hooked.Load() { // otherwise hooks of another version may be at work, with the state of theirs
			err = errors.Join(err, d.maps.EndInheriting())
		}
	}

	return failed, err
}

// LoadDevices loads the programs for these devices in advance: [Datapath.AttachDevices]
// loads those that are missing. The two must not be called at the same time. Programs of
// hooks are loaded first, because connections of processes wait for them.
func (d *Datapath) LoadDevices(devices []Device) error {
	if err := d.Loaded(); err != nil {
		return err
	}
	var errs []error
	for _, device := range devices {
		_, err := d.loadDevice(device)
		errs = append(errs, err)
	}

	return errors.Join(errs...)
}

// SetMasqueradePorts sets the source ports of masqueraded flows: a range, and a second one, which
// may be zero. The default is [bpf.DefaultMasqueradePorts]. It takes effect with the next
// [Datapath.AttachDevices], and must not be called at the same time. Flows keep their ports.
func (d *Datapath) SetMasqueradePorts(ports, more bpf.PortRange) error {
	config := &d.devices.config
	if ports == config.MasqueradePorts && more == config.MorePorts {
		return nil
	}
	err := d.devices.close()
	clear(d.devices.loaded)
	config.MasqueradePorts, config.MorePorts = ports, more

	return err
}

func (d *Datapath) attachDevice(device Device, hook deviceHook, qdiscs map[int]string, others *takeover) error {
	programs, err := d.loadDevice(device)
	if err != nil {
		return err
	}
	at := position{device.Index, hook.name}
	d.devices.ours[at] = hook.program(programs)
	if d.devices.front[at] {
		hook = hook.first()
	}
	stays := func(ahead []attached) bool { return d.devices.stays(at, hook, ahead) }
	if d.Attachment() == TCX {
		return d.links.attachTCX(device.Index, hook, hook.program(programs), stays, func() (*bpf.DevicePrograms, error) {
			config := d.devices.configOf(device)
			config.Keep = ""

			return bpf.LoadDevice(d.maps, config)
		})
	}
	d.devices.filtered[device.Index] = true

	return attachFilter(device.Index, hook, hook.program(programs), qdiscs, stays, others)
}

// devicePrograms are the programs of devices, a pair for each configuration, which are loaded
// when the first device needs them, and what is known of the hooks.
type devicePrograms struct {
	config   bpf.DeviceConfig // of all devices, without what depends on the device
	loaded   map[bpf.DeviceConfig]*bpf.DevicePrograms
	filtered map[int]bool      // devices that may have a filter of ours, by index
	swept    bool              // no other device has one
	taken    map[string]string // what to note of other instances whose filters are replaced, by their bpf roots

	ours      map[position]*ebpf.Program           // those of loaded that are attached
	ahead     map[position][]attached              // programs that run before ours
	overtaken map[position]map[ebpf.ProgramID]bool // programs that did, see stays
	front     map[position]bool                    // ours has to be the first, since another one ends the chain
	unreached map[position]bool                    // ours does not run, see [Datapath.endTrial]
}

// detachFilters detaches our filters from devices for which keep returns false: at
// first from any device, since an earlier agent may have left some, and once that
// was complete, from those to which this process attached them. Those that others keep stay.
func (p *devicePrograms) detachFilters(keep func(int) bool, full bool, others *takeover) error {
	among := p.filtered
	if !p.swept {
		among = nil
	} else if len(among) == 0 {
		return nil
	}
	if err := detachFilters(among, keep, others.keeps); err != nil {
		return err
	}
	maps.DeleteFunc(p.filtered, func(index int, _ bool) bool { return !keep(index) })
	p.swept = p.swept || full

	return nil
}

// configOf returns the configuration of the programs of a device.
func (p *devicePrograms) configOf(device Device) bpf.DeviceConfig {
	config := p.config
	config.Class, config.NoEthernet, config.BridgePort = device.Class, device.NoEthernet, device.BridgePort

	return config
}

// loadDevice returns the programs of a device, and loads them if no device before had the same.
func (d *Datapath) loadDevice(device Device) (*bpf.DevicePrograms, error) {
	config := d.devices.configOf(device)
	if programs := d.devices.loaded[config]; programs != nil {
		return programs, nil
	}
	programs, err := bpf.LoadDevice(d.maps, config)
	if err != nil {
		return nil, err
	}
	d.devices.loaded[config] = programs

	return programs, nil
}

func (p *devicePrograms) close() error {
	var errs []error
	for _, programs := range p.loaded {
		errs = append(errs, programs.Close())
	}

	return errors.Join(errs...)
}

// DeviceState is the state of one device: what is attached to it, and what is decided about it.
type DeviceState struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	// Class is what the device leads to, "pods" or "uplink", if programs are to be attached to it.
	// Only [DeviceMonitor.Status] sets it, and Reason.
	Class string `json:"class,omitempty"`
	// Attached is how our programs are attached; it is empty if they are not.
	Attached Attachment `json:"attached,omitempty"`
	// Reason is why the device is of its class, or of none.
	Reason string `json:"reason,omitempty"`
	// Problem is empty if both programs are attached as decided, or none.
	Problem string `json:"problem,omitempty"`
	// Ahead are programs and filters of others that run before ours, as "egress: NAME".
	// Our program does not see packets for which they end the chain.
	Ahead []string `json:"ahead,omitempty"`
}

// Devices returns the state of all devices of the calling thread's network namespace,
// in the kernel's order. It finds our links by their pins, and needs no agent.
func Devices(bpfRoot string) ([]DeviceState, error) { return queryDevices(loadPinned, bpfRoot) }

// Devices is [Devices], including links that are open and not pinned.
func (d *Datapath) Devices() ([]DeviceState, error) { return queryDevices(d.links.get, d.cfg.BPFRoot) }

func queryDevices(get linkGetter, bpfRoot string) ([]DeviceState, error) {
	links, err := node.Complete(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	qdiscs, err := listQdiscs()
	if err != nil {
		return nil, err
	}
	states := make([]DeviceState, 0, len(links))
	for _, l := range links {
		index := l.Attrs().Index
		states = append(states, queryDevice(get, bpfRoot, index, l.Attrs().Name, qdiscs[index] == "clsact"))
	}

	return states, nil
}

func queryDevice(get linkGetter, bpfRoot string, index int, name string, clsact bool) DeviceState {
	state := DeviceState{Index: index, Name: name}
	var problems []string
	runs := map[Attachment][]string{} // the hooks
	for _, hook := range deviceHooks() {
		add := func(by Attachment, isThere bool, ahead []attached, err error) {
			if err != nil {
				problems = append(problems, fmt.Sprintf("%s: %s", hook.name, err))
			}
			if isThere {
				runs[by] = append(runs[by], hook.name)
			}
			for _, other := range ahead {
				state.Ahead = append(state.Ahead, hook.name+": "+other.String())
			}
		}
		isThere, ahead, err := findLink(get, bpfRoot, index, hook)
		add(TCX, isThere, ahead, err)
		if clsact {
			filters, err := filtersAt(index, hook)
			f, ahead := aheadOfOurs(filters)
			add(Clsact, f != nil, ahead, err)
		}
	}
	for _, by := range []Attachment{Clsact, TCX} {
		if hooks := runs[by]; len(hooks) > 0 {
			state.Attached = by
			if len(hooks) == 1 {
				problems = append(problems, "only "+hooks[0]+" is attached")
			}
		}
	}
	if len(runs) > 1 {
		problems = append(problems, "attached to tcx and to clsact")
	}
	state.Problem = strings.ReplaceAll(strings.Join(problems, "; "), "\n", "; ")

	return state
}

// AttachedToDevice returns the program that packets pass which arrive on a device of the calling
// thread's network namespace. The error wraps [fs.ErrNotExist] if there is none. The caller closes
// it.
func AttachedToDevice(bpfRoot string, index int) (*ebpf.Program, error) {
	ingress := deviceHooks()[1]
	program, err := programOf(devicePin(bpfRoot, index, ingress))
	if !errors.Is(err, fs.ErrNotExist) {
		return program, err
	}
	filters, err := filtersAt(index, ingress)
	if err != nil {
		return nil, err
	}
	f, _ := aheadOfOurs(filters)
	if f == nil {
		return nil, fmt.Errorf("program at the device: %w", fs.ErrNotExist)
	}
	program, err = ebpf.NewProgramFromID(ebpf.ProgramID(f.Id))

	return program, wrap("program of the filter", err)
}
