package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
)

// leastKernel is the oldest kernel on which all programs load.
var leastKernel = Version{5, 10}

func checkKernel(n Node) []Finding {
	kernel := n.Kernel.Value
	if kernel.Version.before(leastKernel) {
		return problem("Linux "+kernel.Release, "Boot Linux 5.10 or later.")
	}
	if errors.Is(n.Features.Err, datapath.ErrOtherClock) {
		return problem(n.Features.Err.Error(), "Start the agent without a time namespace of its own.")
	}
	if errors.Is(n.Features.Err, datapath.ErrNoBTF) {
		return ok("Linux %s; its features are probed once it has BTF", kernel.Release)
	}
	unclear := n.Features.Value.Unclear
	for _, err := range unclear {
		if errors.Is(err, unix.EPERM) {
			return unseen(err)
		}
	}
	if len(unclear) > 0 {
		return warning(fmt.Sprintf("Linux %s: %s", kernel.Release, strings.Join(n.Features.Value.Missing(), "; ")),
			"Report the errors of these probes: the agent runs without features that this kernel may have.")
	}
	if missing := n.Features.Value.Missing(); len(missing) > 0 {
		return warning(fmt.Sprintf("Linux %s: %s", kernel.Release, strings.Join(missing, "; ")),
			"Nothing has to be done if that is acceptable; a later kernel has these features.")
	}

	return ok("Linux %s, with every feature that Sluice uses", kernel.Release)
}

func checkBTF(n Node) []Finding {
	if errors.Is(n.Features.Err, datapath.ErrNoBTF) {
		return problem(n.Features.Err.Error(), "Boot a kernel that was built with CONFIG_DEBUG_INFO_BTF=y, as those of distributions are.")
	}

	return ok("the kernel has its own type information")
}

func checkJIT(n Node) []Finding {
	switch {
	case n.JIT.Value == 0:
		return warning("net.core.bpf_jit_enable is 0: programs are interpreted, which costs several times the CPU",
			"Set net.core.bpf_jit_enable=1.")
	case n.JIT.Value == 2:
		return warning("net.core.bpf_jit_enable is 2: the kernel logs every program that is loaded",
			"Set net.core.bpf_jit_enable=1.")
	}

	return ok("programs are compiled")
}

// neededCapabilities are those that the agent does not run without.
var neededCapabilities = []string{"SYS_ADMIN", "NET_ADMIN"}

// capabilityNumbers are the bits of the capabilities in a [Process].
var capabilityNumbers = map[string]uint{
	"NET_ADMIN": unix.CAP_NET_ADMIN, "SYS_ADMIN": unix.CAP_SYS_ADMIN, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
}

func checkCapabilities(n Node) []Finding {
	missing := slices.DeleteFunc(slices.Clone(neededCapabilities), n.Process.Value.has)
	if len(missing) > 0 {
		return problem("this process lacks "+strings.Join(missing, ", "),
			"Run sluice as root; in a container, add these capabilities to its securityContext, as deploy/base does.")
	}

	return ok("this process has %s", strings.Join(neededCapabilities, ", "))
}

func checkSeccomp(n Node) []Finding {
	switch {
	case n.Process.Value.Seccomp == 0:
		return ok("system calls of this process are not filtered")
	case errors.Is(errors.Join(n.Features.Value.Unclear...), unix.EPERM) && n.Process.Value.has("SYS_ADMIN"):
		return problem("a seccomp profile filters the system calls of this process, and bpf() is refused",
			"Use the profile RuntimeDefault of a current container runtime, which allows bpf() to processes with SYS_ADMIN, or one that does.")
	}

	return ok("a seccomp profile filters the system calls of this process, and allows what was tried")
}

// chargedKernel is the first that charges the memory of maps to cgroups.
var chargedKernel = Version{5, 11}

func checkMemlock(n Node) []Finding {
	switch {
	case !n.Kernel.Value.Version.before(chargedKernel):
		return ok("the memory of maps is not locked memory on this kernel")
	case n.Process.Err != nil:
		return unseen(n.Process.Err)
	case n.Process.Value.has("SYS_RESOURCE"):
		return ok("the memory of maps is locked memory on this kernel, and this process can lift its limit")
	case n.Memlock.Err != nil:
		return unseen(n.Memlock.Err)
	case n.Memlock.Value == unix.RLIM_INFINITY:
		return ok("the memory of maps is locked memory on this kernel, and has no limit")
	}

	return problem(fmt.Sprintf("the memory of maps is locked memory on this kernel, of which this process may have %s", size(n.Memlock.Value)),
		"Add the capability SYS_RESOURCE (deploy/components/sys-resource), or set ulimit -l unlimited.")
}

// checkMemory compares what is left in the machine, and in the cgroup of this process, with what an agent needs at its start.
// An earlier agent may have made the maps: then the kernel has most of it already.
func checkMemory(n Node) []Finding {
	memory, need := n.Memory.Value, datapath.Need(n.Config.FlowMemory)
	free := size(memory.Free) + " are free"
	remedy := "Free memory, or set a smaller --flow-table-memory."
	if memory.LimitedBy != "" {
		free += fmt.Sprintf(", with the limit of %s (%s)", size(memory.Limit), memory.LimitedBy)
		remedy = "Raise the limit (resources.limits.memory of the chart), or set a smaller --flow-table-memory."
	}
	if n.Pins.Err == nil && n.Pins.Value.Complete {
		return ok("%s, and the maps are there already", free)
	}
	seen := fmt.Sprintf("%s; the agent takes %s for flow tables at its start, and some %s beside", free, size(n.Config.FlowMemory), size(need-n.Config.FlowMemory))
	if memory.Free < need {
		return problem(seen, remedy)
	}

	return ok("%s", seen)
}

func checkDescriptors(n Node) []Finding {
	if n.Files.Value < datapath.NeededFiles {
		return warning(fmt.Sprintf("a process may have %d files open: maps of many Services and programs at devices take up to %d", n.Files.Value, datapath.NeededFiles),
			"Raise the limit: LimitNOFILE of the container runtime, or ulimit -Hn.")
	}

	return ok("a process may have %d files open", n.Files.Value)
}

// size formats a number of bytes.
func size(bytes uint64) string {
	if bytes < 1<<20 {
		return fmt.Sprintf("%d KiB", bytes>>10)
	}

	return fmt.Sprintf("%d MiB", bytes>>20)
}

func checkCgroup(n Node) []Finding {
	if errors.Is(n.Cgroup.Err, datapath.ErrNoCgroup2) {
		return problem("no cgroup2 file system is mounted: sockets cannot be translated",
			"Mount it with mount -t cgroup2 none /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1; in a container, mount the host's.")
	}
	if n.Cgroup.Err != nil {
		return problem(n.Cgroup.Err.Error(), "Give --cgroup-root a folder of a cgroup2 file system, or leave it out.")
	}
	layout := "unified"
	if n.CgroupV1 {
		layout = "hybrid: version 1 is mounted, too"
	}
	cgroup := n.Cgroup.Value
	if cgroup.WholeMachine {
		return ok("%s is the root of cgroup2 (%s)", cgroup.Path, layout)
	}

	return warning(fmt.Sprintf("%s is not the root of cgroup2 (%s). Not covered: %s", cgroup.Path, layout, cgroup.NotCovered()),
		"Give the agent the host's /sys/fs/cgroup, as deploy/base does; on a node that is itself a container, nothing has to be done.")
}

func checkBPFFS(n Node) []Finding {
	if n.BPFFS != nil {
		return problem(n.BPFFS.Error(),
			"Mount it with mount -t bpf bpf /sys/fs/bpf; in a cluster, deploy/components/privileged-init does so.")
	}

	return ok("%s is on bpffs", n.Config.BPFRoot)
}

func checkPins(n Node) []Finding {
	if len(n.Others.Value) > 0 {
		var others []string
		for _, o := range n.Others.Value {
			others = append(others, o.String())
		}

		return problem("another Sluice is in charge, with maps that no agent with --bpf-root "+n.Config.BPFRoot+" fills: "+status.ListText(others),
			"Start the agent: it takes over what no agent keeps. Or remove them by sluice --bpf-root ROOT cleanup, or without a pin by bpftool link detach id LINK.")
	}
	switch {
	case n.BPFFS != nil:
		return ok("there is no bpffs yet, and so no pin")
	case n.Pins.Err != nil:
		return unseen(n.Pins.Err)
	case n.Cgroup.Err == nil && n.Others.Err != nil:
		return unseen(n.Others.Err)
	case len(n.Pins.Value.Others) > 0:
		return warning("maps of a build with another layout are pinned: "+strings.Join(n.Pins.Value.Others, ", "),
			"Nothing has to be done before an agent starts: it takes them over. If none is to run here any more, run sluice cleanup.")
	case len(n.Pins.Value.Folders) == 0:
		return ok("nothing is pinned below %s", n.Config.BPFRoot)
	case n.Pins.Value.Unreadable != nil:
		return problem(fmt.Sprintf("the maps below %s cannot be read: %v", n.Config.BPFRoot, n.Pins.Value.Unreadable),
			"Run sluice cleanup while no agent runs; the next one makes new maps.")
	}

	return ok("the maps below %s have the layout of this build", n.Config.BPFRoot)
}
