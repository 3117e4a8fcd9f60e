package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// position is a hook of a device.
type position struct {
	index int
	hook  string
}

// first returns the hook with the position before all others.
func (h deviceHook) first() deviceHook {
	h.anchor, h.priority = link.Head(), 1

	return h
}

// isFirst reports whether our program has to be the first at the hook.
func (h deviceHook) isFirst() bool { return h.priority == 1 }

// stays reports whether our program stays behind these. Where it has to be the first, it is
// attached anew, once for each program that is before it: an owner that attaches its program
// anew as well gets the first position.
func (p *devicePrograms) stays(at position, hook deviceHook, ahead []attached) bool {
	known := p.overtaken[at]
	isNew := func(o attached) bool { return o.id != 0 && !known[o.id] }
	if !hook.isFirst() || !slices.ContainsFunc(ahead, isNew) {
		if len(ahead) > 0 {
			p.ahead[at] = ahead
		}

		return true
	}
	if known == nil {
		known = make(map[ebpf.ProgramID]bool)
		p.overtaken[at] = known
	}
	for _, o := range ahead {
		known[o.id] = true
	}

	return false
}

// forget removes the positions of devices that are gone.
func (p *devicePrograms) forget(devices []Device) {
	gone := func(at position) bool {
		return !slices.ContainsFunc(devices, func(d Device) bool { return d.Index == at.index })
	}
	maps.DeleteFunc(p.overtaken, func(at position, _ map[ebpf.ProgramID]bool) bool { return gone(at) })
	maps.DeleteFunc(p.ours, func(at position, _ *ebpf.Program) bool { return gone(at) })
	maps.DeleteFunc(p.front, func(at position, _ bool) bool { return gone(at) })
}

// Unreached is a hook of a device at which our program does not see the packets that pass.
type Unreached struct {
	Index int
	Hook  string
	// Ahead are the programs and filters that run before ours. One of them ends the chain.
	Ahead []string
}

// String describes the problem, with the programs that may be the cause.
func (u Unreached) String() string {
	return fmt.Sprintf("%s: packets pass that the program of Sluice does not see: what runs before it ends the chain (%s)",
		u.Hook, strings.Join(u.Ahead, ", "))
}

// trial counts packets and runs at the hooks of devices at which programs of others run before ours. It has all that it reads,
// and may count beside [Datapath.AttachDevices].
type trial struct {
	hooks []*triedHook
	stats io.Closer // lets the kernel count runs
	err   error     // of count
}

// triedHook is a hook at which a trial counts.
type triedHook struct {
	position
	device       Device
	hook         deviceHook
	ahead        []attached
	ours         *ebpf.Program // which was attached when the trial began
	counted      *ebpf.Program // a clone of it, which stays open if ours is replaced
	ran, packets [2]uint64     // before and after
}

// beginTrial returns a trial of the hooks of these devices, or nil if no program of others runs before ours. The caller ends
// it. Neither may be called at the same time as AttachDevices, which finds the programs that run before ours.
func (d *Datapath) beginTrial(devices []Device) (*trial, error) {
	if len(d.devices.ahead) == 0 {
		clear(d.devices.unreached)

		return nil, nil
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("count runs: %w", err)
	}
	t := &trial{stats: stats}
	for _, hook := range deviceHooks() {
		for _, device := range devices {
			at := position{device.Index, hook.name}
			if d.devices.ahead[at] == nil {
				continue
			}
			ours := d.devices.ours[at]
			counted, err := ours.Clone()
			if err != nil {
				return nil, errors.Join(fmt.Errorf("device %d: %s: %w", device.Index, hook.name, err), t.close())
			}
			t.hooks = append(t.hooks, &triedHook{
				position: at, device: device, hook: hook, ahead: d.devices.ahead[at], ours: ours, counted: counted,
			})
		}
	}

	return t, nil
}

// count counts. It calls wait three times: packets have to pass during the second one, and the other two let packets in
// flight arrive.
func (t *trial) count(wait func()) {
	runs := func(h *triedHook) (uint64, error) {
		stats, err := h.counted.Stats()
		if err != nil {
			return 0, fmt.Errorf("runs of the program: %w", err)
		}

		return stats.RunCount, nil
	}
	packets := func(h *triedHook) (uint64, error) { return packetsOf(h.device, h.hook) }
	for i, count := range []func(*triedHook) (uint64, error){runs, packets, packets, runs} {
		if i > 0 {
			wait()
		}
		for _, h := range t.hooks {
			n, err := count(h)
			if err != nil {
				t.err = fmt.Errorf("device %d: %s: %w", h.index, h.position.hook, err)

				return
			}
			if i == 0 || i == 3 {
				h.ran[i/3] = n
			} else {
				h.packets[i-1] = n
			}
		}
	}
}

func (t *trial) close() error {
	errs := []error{t.stats.Close()}
	for _, h := range t.hooks {
		errs = append(errs, h.counted.Close())
	}

	return errors.Join(errs...)
}

// endTrial returns the hooks at which packets have passed, programs of
// others run before ours, and ours has not run once: one of the others ends the chain. Devices of one configuration share a
// program, so that a hook stays unnoticed if another
// device with the same is reached. A hook stays unreached until our program runs. If what runs at a hook has changed since the
// trial began, also by a replacement of ours, it is left to the next one.
//
// At egress our program is the last by choice. For a hook that is found there, again is true
// instead, and the next [Datapath.AttachDevices] makes our program the first; the hook is
// returned only if that did not help.
func (d *Datapath) endTrial(t *trial) (found []Unreached, again bool, err error) {
	if err := errors.Join(t.err, t.close()); err != nil {
		return nil, false, err
	}
	known := d.devices.unreached
	d.devices.unreached = make(map[position]bool)
	for _, h := range t.hooks {
		at, ahead := h.position, d.devices.ahead[h.position]
		isSame := slices.Equal(ahead, h.ahead) && d.devices.ours[at] == h.ours
		ran, passed := h.ran[0] != h.ran[1], h.packets[0] != h.packets[1]
		switch {
		case len(ahead) == 0 || ran || !known[at] && (!passed || !isSame):
		case isSame && !h.hook.isFirst() && !d.devices.front[at]:
			d.devices.front[at], again = true, true
		default:
			u := Unreached{Index: at.index, Hook: at.hook}
			for _, o := range ahead {
				u.Ahead = append(u.Ahead, o.String())
			}
			found = append(found, u)
			d.devices.unreached[at] = true
		}
	}
	slices.SortFunc(found, func(a, b Unreached) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Hook, b.Hook))
	})

	return found, again, nil
}

// packetsOf returns how many packets a device has received (at ingress) or sent (at egress),
// and 0 if it is gone.
func packetsOf(device Device, hook deviceHook) (uint64, error) {
	l, err := netlink.LinkByIndex(device.Index)
	if errors.As(err, new(netlink.LinkNotFoundError)) || err == nil && l.Attrs().Statistics == nil {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if hook.attach == ebpf.AttachTCXIngress {
		return l.Attrs().Statistics.RxPackets, nil
	}

	return l.Attrs().Statistics.TxPackets, nil
}
