package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

const (
	// filterHandle identifies our filter among those of its priority. Of these, the one that
	// was added last runs first, and a replaced one keeps its position: to become the first
	// again, our filter is added with the other handle.
	filterHandle      = 0x51ce
	otherFilterHandle = 0x51cf
	// programPrefix begins the names of our programs and filters, in every build.
	programPrefix = "sluice_"
)

// errNoRoom is why nothing is attached to a device with a qdisc of another owner: the kernel has one place for
// the qdiscs ingress and clsact, and the former has no egress. The bandwidth plugin of CNI adds one to the devices of
// pods whose bandwidth is limited.
var errNoRoom = errors.New("no room for clsact")

// isLeftOut reports whether a device stays without our programs: that of a pod for which there is no room. That
// concerns this pod only, and does not change as long as the device is there.
func (d Device) isLeftOut(err error) bool {
	return d.Class == maps.DevicePods && errors.Is(err, errNoRoom)
}

// attachFilter attaches a program as a filter, or replaces, in one step, the one that
// an earlier agent attached. If stays returns false for the filters that run before it,
// it is attached anew. The error wraps errNoRoom if a qdisc of another owner is in the way, and [ErrRunning] if there is
// a filter of another instance whose agent runs.
func attachFilter(index int, hook deviceHook, program *ebpf.Program, qdiscs map[int]string, stays func(ahead []attached) bool, others *takeover) error {
	switch qdiscs[index] {
	case "clsact":
	case "":
		if err := netlink.QdiscAdd(clsactOf(index)); err != nil {
			return fmt.Errorf("qdisc clsact: %w", err)
		}
		qdiscs[index] = "clsact"
	default:
		return fmt.Errorf("there is a qdisc %s, which leaves %w", qdiscs[index], errNoRoom)
	}
	filters, err := filtersAt(index, hook)
	if err != nil {
		return err
	}
	for _, have := range ours(filters) {
		if o, stays := others.stays[ebpf.ProgramID(have.Id)]; stays {
			return fmt.Errorf("a filter of another Sluice is there, pinned below %s: %w", o.BPFRoot, ErrRunning)
		}
	}
	info, err := program.Info()
	if err != nil {
		return fmt.Errorf("program: %w", err)
	}
	id, _ := info.ID()
	found, ahead := aheadOfOurs(filters)
	if found != nil && found.Priority == 1 {
		hook = hook.first() // an earlier agent found that another filter ends the chain
	}
	want := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: hook.parent, Handle: filterHandle,
			Priority: priorityFor(hook, filters), Protocol: unix.ETH_P_ALL,
		},
		Fd: program.FD(), Name: hook.filter, DirectAction: true,
	}
	// Another handle gives our filter another position.
	if found != nil && found.Priority == want.Priority && stays(ahead) == (found.Handle == otherFilterHandle) {
		want.Handle = otherFilterHandle
	}
	for _, have := range ours(filters) {
		if have.FilterAttrs.Priority == want.Priority && have.Handle == want.Handle && have.Id == int(id) {
			return nil
		}
	}
	if err := netlink.FilterReplace(want); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	for _, have := range ours(filters) { // with the other handle, or of another build
		if have.FilterAttrs.Priority != want.Priority || have.Handle != want.Handle {
			if err := removeFilter(have); err != nil {
				return err
			}
		}
	}

	return nil
}

func clsactOf(index int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// listQdiscs returns the kind of qdisc that has a device's filters, by its index:
// "clsact", or "ingress".
func listQdiscs() (map[int]string, error) {
	listed, err := node.Complete(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	qdiscs := make(map[int]string)
	for _, qdisc := range listed {
		if qdisc.Attrs().Parent == netlink.HANDLE_CLSACT {
			qdiscs[qdisc.Attrs().LinkIndex] = qdisc.Type()
		}
	}

	return qdiscs, nil
}

// filtersAt returns all filters at a hook, including those of other owners.
func filtersAt(index int, hook deviceHook) ([]netlink.Filter, error) {
	device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
	filters, err := node.Complete(func() ([]netlink.Filter, error) { return netlink.FilterList(device, hook.parent) })

	return filters, wrap("list filters", err)
}

// isOurs reports whether some build of Sluice attached a filter.
func isOurs(filter netlink.Filter) bool {
	f, ok := filter.(*netlink.BpfFilter)

	return ok && strings.HasPrefix(f.Name, programPrefix)
}

// ours returns those filters that some build of Sluice attached.
func ours(filters []netlink.Filter) []*netlink.BpfFilter {
	var found []*netlink.BpfFilter
	for _, filter := range filters {
		if isOurs(filter) {
			found = append(found, filter.(*netlink.BpfFilter))
		}
	}

	return found
}

// priorityFor returns the priority of our filter at a hook: the hook's, which programs
// of others may have as well, or the nearest one without filters of another type.
func priorityFor(hook deviceHook, filters []netlink.Filter) uint16 {
	taken := make(map[uint16]bool)
	for _, filter := range filters {
		attrs := filter.Attrs()
		if filter.Type() != "bpf" || attrs.Protocol != unix.ETH_P_ALL {
			taken[attrs.Priority] = true
		}
	}
	priority := hook.priority
	for taken[priority] {
		if hook.priority == 1 {
			priority++
		} else {
			priority--
		}
	}

	return priority
}

// detachFilters detaches our filters from devices for which keep returns false, of
// those in among, or of all if among is nil. Filters whose programs stay, do so.
func detachFilters(among map[int]bool, keep func(index int) bool, stays func(ebpf.ProgramID) bool) error {
	qdiscs, err := listQdiscs()
	if err != nil {
		return err
	}
	var errs []error
	for index, kind := range qdiscs {
		if kind != "clsact" || keep(index) || among != nil && !among[index] {
			continue
		}
		if err := removeFilters(index, stays); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("device %d: %w", index, err))
		}
	}

	return errors.Join(errs...)
}

// removeFilters detaches our filters from one device, in the reverse order of
// attaching, and removes the qdisc if it has no other filters. Those whose programs stay are others'.
func removeFilters(index int, stays func(ebpf.ProgramID) bool) error {
	removed, left := 0, 0
	for _, hook := range slices.Backward(deviceHooks()) {
		filters, err := filtersAt(index, hook)
		if err != nil {
			return err
		}
		mine := slices.DeleteFunc(ours(filters), func(f *netlink.BpfFilter) bool { return stays(ebpf.ProgramID(f.Id)) })
		for _, filter := range mine {
			if err := removeFilter(filter); err != nil {
				return err
			}
		}
		removed += len(mine)
		left += len(filters) - len(mine)
	}
	if removed == 0 || left > 0 {
		return nil
	}

	return wrap("remove qdisc clsact", netlink.QdiscDel(clsactOf(index)))
}

func removeFilter(filter *netlink.BpfFilter) error {
	err := netlink.FilterDel(filter)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}

	return wrap("remove filter", err)
}

// aheadOfOurs returns our filter, or nil if there is none, and the filters that run before it.
func aheadOfOurs(filters []netlink.Filter) (*netlink.BpfFilter, []attached) {
	at := slices.IndexFunc(filters, isOurs)
	if at < 0 {
		return nil, nil
	}

	return filters[at].(*netlink.BpfFilter), describe(filters[:at])
}

// describe returns these filters as what is attached to a hook. The kernel lists filters in the order in which they
// run.
func describe(filters []netlink.Filter) []attached {
	var all []attached
	for _, filter := range filters {
		a := attached{filter: filter.Type()}
		if f, isBPF := filter.(*netlink.BpfFilter); isBPF {
			a = attached{id: ebpf.ProgramID(f.Id), filter: f.Name}
		}
		all = append(all, a)
	}

	return all
}

// wrap returns err with what failed before it, or nil if err is nil.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}

	return fmt.Errorf("%s: %w", what, err)
}
