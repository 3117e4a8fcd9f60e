package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Bypassed names a program or filter of another owner, by the index of the device at whose ingress it is, that sees
// no packets that our program there turns around. The devices are those of the calling thread's network namespace.
// At index 0 is a program at a hook of netfilter: it does not show its namespace, which may be this one.
func Bypassed(indices []int) (map[int]string, error) {
	bypassed := make(map[int]string)
	program, err := netfilterProgram()
	if err != nil {
		return nil, err
	}
	if program != "" {
		bypassed[0] = program
	}
	qdiscs, err := listQdiscs()
	if err != nil {
		return nil, err
	}
	for _, index := range indices {
		chain, err := chainAt(index, deviceHooks()[1], qdiscs[index])
		if errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("device %d: %w", index, err)
		}
		ours := slices.IndexFunc(chain, attached.isOurs)
		theirs := slices.DeleteFunc(chain[ours+1:], attached.isOurs) // an agent that is replaced is ours, too
		if len(theirs) > 0 {
			bypassed[index] = theirs[0].String()
		}
	}

	return bypassed, nil
}

// chainAt returns what runs at a hook of a device with this kind of qdisc for filters, in this order: filters come after
// programs of tcx.
func chainAt(index int, hook deviceHook, qdisc string) ([]attached, error) {
	chain, err := tcxAt(index, hook)
	if err != nil || qdisc == "" || qdisc != "clsact" && hook.name != "ingress" {
		return chain, err
	}
	filters, err := filtersAt(index, hook)

	return append(chain, describe(filters)...), err
}

// netfilterProgram returns the name of a program at a hook of netfilter that forwarded packets pass, or "".
func netfilterProgram() (string, error) {
	name := ""
	err := eachLink(func(info *link.Info) bool {
		if info.Type != link.NetfilterType {
			return false
		}
		at := info.Netfilter()
		if at != nil && at.Hook != link.NetfilterInetLocalIn && at.Hook != link.NetfilterInetLocalOut {
			name = programName(info.Program)
		}

		return name != ""
	})

	return name, err
}
