package datapath

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// DeviceState is one device as the kernel has it.
type DeviceState struct {
	Index int
	Name  string
	// Attached says how our programs are attached to it; empty: they are not.
	Attached Attachment
	// Problem is empty if they are attached whole, or not at all.
	Problem string
}

// Devices asks the kernel to which devices of the calling thread's network
// namespace our programs are attached. It returns all devices, in the kernel's
// order, and works without an agent.
func Devices(bpfRoot string) ([]DeviceState, error) {
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
		states = append(states, queryDevice(bpfRoot, index, l.Attrs().Name, qdiscs[index] == "clsact"))
	}

	return states, nil
}

func queryDevice(bpfRoot string, index int, name string, clsact bool) DeviceState {
	state := DeviceState{Index: index, Name: name}
	var problems []string
	found := map[Attachment][]string{} // the hooks
	for _, hook := range deviceHooks() {
		id, err := tcxProgram(bpfRoot, index, hook)
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %s", hook.name, err))
		}
		if id != 0 {
			found[TCX] = append(found[TCX], hook.name)
		}
		if !clsact {
			continue
		}
		id, err = filterProgram(index, hook)
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %s", hook.name, err))
		}
		if id != 0 {
			found[Clsact] = append(found[Clsact], hook.name)
		}
	}
	for _, by := range []Attachment{Clsact, TCX} {
		switch hooks := found[by]; len(hooks) {
		case 0:
		case 1:
			state.Attached = by
			problems = append(problems, "only "+hooks[0]+" is attached")
		default:
			state.Attached = by
		}
	}
	if len(found) > 1 {
		problems = append(problems, "attached to tcx and to clsact")
	}
	state.Problem = strings.ReplaceAll(strings.Join(problems, "; "), "\n", "; ")

	return state
}
