package node

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// Decision is whether programs are attached to a device, and which.
type Decision struct {
	Device
	Class Class
	// Bridge is the index of the bridge that the device is a port of, or 0.
	Bridge int
	// LeadsOut is set if the device leads to other hosts, and to no pod of this node, whatever its class
	// is by configuration.
	LeadsOut bool
	// Above is set if packets from the wire pass another device of this node first.
	Above bool
	// Reason is a text for the operator.
	Reason string
}

// turns reports whether packets that arrive on the device may leave again there.
func (d Decision) turns() bool { return d.Class == ClassUplink && d.Bridge == 0 }

// Decide returns for each device whether to attach to it and what it leads to, in
// the order of devices.
func Decide(devices []Device, rules Rules) []Decision {
	d := decider{rules: rules, devices: make(map[int]Device, len(devices)), masters: make(map[int]bool)}
	for _, device := range devices {
		d.devices[device.Index] = device
		d.masters[device.Master] = true
	}
	decisions := make([]Decision, 0, len(devices))
	for _, device := range devices {
		class, reason := d.decide(device)
		decision := Decision{Device: device, Class: class, LeadsOut: d.leadsOut(device), Above: d.isAbove(device), Reason: reason}
		if d.devices[device.Master].Kind == "bridge" {
			decision.Bridge = device.Master
		}
		decisions = append(decisions, decision)
	}

	return decisions
}

// decider has all devices, since the class of one may depend on others.
type decider struct {
	rules   Rules
	devices map[int]Device // by index
	masters map[int]bool   // by index: the device has members
}

// decide returns the class of a device and why: by the operator's rules first, then
// by what speaks against attaching, then by the looks of the device.
func (d *decider) decide(device Device) (Class, string) {
	if p, ok := find(d.rules.Never, device.Name); ok {
		return ClassNone, "excluded by --exclude-devices " + p.String()
	}
	only, named := d.named(device)
	if !named && len(d.rules.Only) > 0 {
		return ClassNone, "not among --devices"
	}
	if obstacle := d.obstacle(device); obstacle != "" {
		return ClassNone, obstacle
	}
	if only.Class != ClassNone {
		return only.Class, "--devices " + only.String()
	}
	class, reason := d.appearance(device)
	// The internal port of a switch does not show what is behind it.
	mayLeadToPods := class == ClassPods || class == ClassUplink && device.Kind == "openvswitch"
	if mayLeadToPods && (d.rules.PodBridge != "" || d.rules.PodPrefix != "") {
		return d.detectLocal(device)
	}

	return class, reason
}

// named returns the pattern of --devices for a device. A VLAN that has none goes with the device below it, whose
// programs leave the packets of its VLANs to these. One without a number of its namespace in this one is taken for the
// device here that has its index, which may be above the VLAN: each device is looked at once at most.
func (d *decider) named(device Device) (Pattern, bool) {
	for range d.devices {
		if only, named := find(d.rules.Only, device.Name); named {
			return only, true
		}
		lower, ok := d.devices[device.Lower]
		if !ok || device.Kind != "vlan" {
			break
		}
		device = lower
	}

	return Pattern{}, false
}

// isAbove reports [Decision.Above]. The programs of most devices leave the packets of VLANs to these, and a bridge passes
// them on without their tag.
func (d *decider) isAbove(device Device) bool {
	if _, here := d.devices[device.Peer]; here {
		return true
	}
	for range d.devices {
		lower, ok := d.devices[device.Lower]
		if !ok {
			break
		}
		if device.Kind != "vlan" || lower.Kind == "bridge" || d.devices[lower.Master].Kind == "bridge" {
			return true
		}
		device = lower
	}

	return false
}

// unusable are the kinds of devices whose packets the stack does not see, and why.
var unusable = map[string]string{
	"dummy":   "dummy: what is sent there is gone",
	"ifb":     "ifb: packets pass the device that it shapes",
	"macvtap": "macvtap: its packets pass the device below, and not the stack",
	"ipvtap":  "ipvtap: its packets pass the device below, and not the stack",
}

// obstacle returns why programs on a device would see no packets, or packets twice;
// it returns "" if neither is so.
func (d *decider) obstacle(device Device) string {
	reason, isUnusable := unusable[device.Kind]
	switch {
	case device.IsLoopback:
		return "loopback"
	case device.Kind == "bridge":
		return "bridge: its ports are attached"
	case device.Kind == "vrf":
		return "vrf: its members are attached"
	case device.Kind == "openvswitch" && (d.masters[device.Index] || device.Name == "ovs-system"):
		return "openvswitch: its internal ports are attached"
	case isUnusable:
		return reason
	case device.LinkLayer == LinkOther:
		return "neither Ethernet nor IP"
	case device.Master == 0:
		return ""
	}
	// Packets of a member pass its master, or the internal ports of the switch, as well.
	switch master := d.devices[device.Master]; master.Kind {
	case "bridge", "vrf":
		return ""
	case "openvswitch":
		return "port of " + master.Name + ": its internal ports are attached"
	default:
		return "slave of " + master.Name
	}
}

// appearance returns what a device leads to by its kind, addresses and routes.
func (d *decider) appearance(device Device) (Class, string) {
	isTap := device.Kind == "tun" && device.LinkLayer == LinkEthernet
	peer, here := d.devices[device.Peer]
	switch {
	case !device.isPair() && !isTap:
		return ClassUplink, kindOf(device) + " device" + d.portOf(device)
	case device.Network.IsValid():
		return ClassUplink, fmt.Sprintf("%s with the network of %s", kindOf(device), device.Network)
	case device.Gateway.IsValid():
		return ClassUplink, fmt.Sprintf("%s to the gateway %s", kindOf(device), device.Gateway)
	case here:
		return ClassNone, fmt.Sprintf("both ends of the %s pair are on the node: the other is %s", device.Kind, peer.Name)
	case isTap:
		return ClassPods, "tap of a virtual machine" + d.portOf(device)
	default:
		return ClassPods, "host end of a " + device.Kind + " pair" + d.portOf(device)
	}
}

// leadsOut reports [Decision.LeadsOut]. A bridge leads where its ports do.
func (d *decider) leadsOut(device Device) bool {
	switch device.Kind {
	case "openvswitch", "vrf", "dummy", "ifb":
		return false
	case "bridge":
		ports, pods := 0, 0
		for _, port := range d.devices {
			if port.Master == device.Index {
				ports++
				if class, _ := d.appearance(port); class != ClassUplink {
					pods++
				}
			}
		}

		return ports > 0 && pods == 0
	}
	class, _ := d.appearance(device)

	return class == ClassUplink && !device.IsLoopback
}

func kindOf(device Device) string {
	switch {
	case device.Kind == "":
		return "physical"
	case device.Kind == "tun" && device.LinkLayer == LinkEthernet:
		return "tap"
	default:
		return device.Kind
	}
}

// portOf returns the end of a reason if the device is a port of a bridge.
func (d *decider) portOf(device Device) string {
	if master := d.devices[device.Master]; master.Kind == "bridge" {
		return ", port of " + master.Name
	}

	return ""
}

// detectLocal classifies a device as kube-proxy does: by the name of the device by
// which packets reach the IP layer, which for the port of a bridge is the bridge.
func (d *decider) detectLocal(device Device) (Class, string) {
	names := []string{device.Name}
	if master := d.devices[device.Master]; master.Kind == "bridge" {
		names = append(names, master.Name)
	}
	mode, wanted := "BridgeInterface", d.rules.PodBridge
	is := func(name string) bool { return name == wanted }
	if d.rules.PodPrefix != "" {
		mode, wanted = "InterfaceNamePrefix", d.rules.PodPrefix
		is = func(name string) bool { return strings.HasPrefix(name, wanted) }
	}
	for _, name := range names {
		if is(name) {
			return ClassPods, fmt.Sprintf("--detect-local-mode %s: %s", mode, name)
		}
	}

	return ClassUplink, fmt.Sprintf("--detect-local-mode %s: not %s", mode, wanted)
}

// Class is what a device leads to.
type Class uint8

// The classes.
const (
	ClassNone   Class = iota // nothing is attached
	ClassPods                // pods of this node only
	ClassUplink              // all others
)

// String returns the word that flags and tables use, and "" for [ClassNone].
func (c Class) String() string {
	switch c {
	case ClassPods:
		return "pods"
	case ClassUplink:
		return "uplink"
	default:
		return ""
	}
}

// Pattern matches names of devices, as a shell matches file names.
type Pattern struct {
	Glob string
	// Class is the class of these devices; ClassNone leaves it to [Decide].
	Class Class
}

// String returns the pattern as it was written.
func (p Pattern) String() string {
	if p.Class == ClassNone {
		return p.Glob
	}

	return p.Glob + "=" + p.Class.String()
}

// ParsePattern reads "GLOB", "GLOB=pods" or "GLOB=uplink".
func ParsePattern(text string) (Pattern, error) {
	glob, class, fixed := strings.Cut(text, "=")
	p := Pattern{Glob: glob}
	if glob == "" {
		return p, fmt.Errorf("%q: the pattern of the name is empty", text)
	}
	if _, err := path.Match(glob, ""); err != nil {
		return p, fmt.Errorf("%q: %w", text, err)
	}
	switch {
	case !fixed:
	case class == ClassPods.String():
		p.Class = ClassPods
	case class == ClassUplink.String():
		p.Class = ClassUplink
	default:
		return p, fmt.Errorf("%q: after = it is pods or uplink", text)
	}

	return p, nil
}

// Rules are the configuration of devices. With the zero value, [Decide] classifies
// all devices by their looks.
type Rules struct {
	// Only, unless it is empty, limits attaching to devices that match. The first
	// pattern that matches decides.
	Only []Pattern
	// Never excludes devices. It takes precedence over the others.
	Never []Pattern
	// PodBridge and PodPrefix are kube-proxy's detectLocalMode BridgeInterface
	// and InterfaceNamePrefix: devices that look like those of pods are so only
	// if they are this bridge or named so, or ports of a bridge that is.
	PodBridge string
	PodPrefix string
}

// Validate returns an error if the rules contradict each other.
func (r Rules) Validate() error {
	for _, p := range r.Never {
		if p.Class != ClassNone {
			return fmt.Errorf("%s: an excluded device has no class", p)
		}
	}
	if r.PodBridge != "" && r.PodPrefix != "" {
		return errors.New("rules: PodBridge and PodPrefix are both set")
	}

	return nil
}

// find returns the first pattern that matches. An invalid glob matches nothing.
func find(patterns []Pattern, name string) (Pattern, bool) {
	for _, p := range patterns {
		if ok, err := path.Match(p.Glob, name); ok && err == nil {
			return p, true
		}
	}

	return Pattern{}, false
}
