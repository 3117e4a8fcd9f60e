package datapath

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// DeviceState is the state of one device in the kernel.
type DeviceState struct {
	Index int
	Name  string
	// Attached is how our programs are attached; it is empty if they are not.
	Attached Attachment
	// Problem is empty if both programs are attached, or none.
	Problem string
	// Ahead are programs and filters of others that run before ours, as "egress: NAME".
	// Our program does not see packets for which they end the chain.
	Ahead []string
}

// found is the state of our program at one hook.
type found struct {
	is    bool // it is attached
	ahead []string
}

// Devices returns the state of all devices of the calling thread's network namespace,
// in the kernel's order. It finds our links by their pins, and needs no agent.
func Devices(bpfRoot string) ([]DeviceState, error) { return queryDevices(loadPinned, bpfRoot) }

// Devices is [Devices], including links that are open and not pinned.
func (d *Datapath) Devices() ([]DeviceState, error) { return queryDevices(d.links.get, d.cfg.BPFRoot) }

func queryDevices(get linkGetter, bpfRoot string) ([]DeviceState, error) {
	links, err := complete(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	qdiscs, err := listQdiscs()
	if err != nil {
		return nil, err
	}
	var states []DeviceState
	for _, l := range links {
		index := l.Attrs().Index
		states = append(states, queryDevice(get, bpfRoot, index, l.Attrs().Name, qdiscs[index] == "clsact"))
	}

	return states, nil
}

func queryDevice(get linkGetter, bpfRoot string, index int, name string, clsact bool) DeviceState {
	state := DeviceState{Index: index, Name: name}
	var problems []string
	attached := map[Attachment][]string{} // the hooks
	for _, hook := range deviceHooks() {
		take := func(by Attachment, f found, err error) {
			if err != nil {
				problems = append(problems, fmt.Sprintf("%s: %s", hook.name, err))
			}
			if f.is {
				attached[by] = append(attached[by], hook.name)
			}
			for _, other := range f.ahead {
				state.Ahead = append(state.Ahead, hook.name+": "+other)
			}
		}
		f, err := findLink(get, bpfRoot, index, hook)
		take(TCX, f, err)
		if clsact {
			f, err := findFilter(index, hook)
			take(Clsact, f, err)
		}
	}
	for _, by := range []Attachment{Clsact, TCX} {
		if hooks := attached[by]; len(hooks) > 0 {
			state.Attached = by
			if len(hooks) == 1 {
				problems = append(problems, "only "+hooks[0]+" is attached")
			}
		}
	}
	if len(attached) > 1 {
		problems = append(problems, "attached to tcx and to clsact")
	}
	state.Problem = strings.ReplaceAll(strings.Join(problems, "; "), "\n", "; ")

	return state
}
