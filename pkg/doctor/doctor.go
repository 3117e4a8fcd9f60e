// Package doctor finds out whether Sluice can run on a node, and what stands in its way there.
//
// [Observe] looks at the node once and changes nothing on it; what it returns is a [Node]. Each
// check is a function of that alone, and [Diagnose] calls them all. docs/doctor.md has a heading for
// each check, with what to do.
package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// State is the outcome of a check.
type State string

// The states.
const (
	OK      State = "ok"
	Warning State = "warning" // Sluice runs, but not everything may be as intended
	Problem State = "problem" // Sluice does not run, or Services do not work
)

// Finding is what a check has seen.
type Finding struct {
	Check string `json:"check"`
	State State  `json:"state"`
	Seen  string `json:"seen"`
	// Remedy is what to do, and Link the page that tells more. Both are empty if all is well.
	Remedy string `json:"remedy,omitempty"`
	Link   string `json:"link,omitempty"`

	unseen bool // the check could not look at its subject
}

// Report is the outcome of all checks.
type Report struct {
	Findings []Finding `json:"findings"`
	Problems int       `json:"problems"`
	Warnings int       `json:"warnings"`
	// Unseen are the warnings of checks that could not look at their subject.
	Unseen int `json:"unseen"`
}

// page has a heading for each check, by its name.
const page = "https://github.com/sluice-lb/sluice/blob/main/docs/doctor.md"

// check looks at one subject. It has at least one finding.
type check struct {
	name string
	find func(Node) []Finding
	// unseen returns why find cannot look at its subject, if it cannot. It may be nil.
	unseen func(Node) error
}

// checks are all checks, in the order of the report: what the agent needs first, then what else is
// on the node, and then the cluster.
var checks = []check{
	{"kernel", checkKernel, func(n Node) error { return n.Kernel.Err }},
	{"btf", checkBTF, nil},
	{"jit", checkJIT, func(n Node) error { return n.JIT.Err }},
	{"capabilities", checkCapabilities, func(n Node) error { return n.Process.Err }},
	{"seccomp", checkSeccomp, func(n Node) error { return n.Process.Err }},
	{"memlock", checkMemlock, func(n Node) error { return n.Kernel.Err }},
	{"memory", checkMemory, func(n Node) error { return n.Memory.Err }},
	{"descriptors", checkDescriptors, func(n Node) error { return n.Files.Err }},
	{"cgroup", checkCgroup, nil},
	{"bpffs", checkBPFFS, nil},
	{"pins", checkPins, nil},
	{"cgroup-hooks", checkCgroupHooks, nil},
	{"device-hooks", checkDeviceHooks, func(n Node) error { return cmp.Or(n.Devices.Err, n.DevicePrograms.Err) }},
	{"kube-proxy", checkKubeProxy, nil},
	{"ipvs", checkIPVS, func(n Node) error { return n.Devices.Err }},
	{"cilium", checkCilium, Node.foreignErr},
	{"calico", checkCalico, Node.foreignErr},
	{"mesh", checkMesh, func(n Node) error { return n.Namespaces.Err }},
	{"node-port-firewall", checkFirewall, func(n Node) error { return n.Netfilter.Err }},
	{"connection-marks", checkConnectionMarks, func(n Node) error { return cmp.Or(n.Netfilter.Err, n.MarkRules.Err) }},
	{"ipsec", checkIPsec, func(n Node) error { return n.IPsecPolicies.Err }},
	{"ip-forward", checkIPForward, func(n Node) error { return n.IPForward.Err }},
	{"forward-firewall", checkForwardFirewall, func(n Node) error { return n.Netfilter.Err }},
	{"rp-filter", checkRPFilter, func(n Node) error { return n.Devices.Err }},
	{"ports", checkPorts, func(n Node) error { return cmp.Or(n.Ephemeral.Err, n.Masquerade.Err) }},
	{"mtu", checkMTU, func(n Node) error { return n.Devices.Err }},
	{"api-server", checkAPIServer, nil},
	{"service-cidrs", checkServiceCIDRs, func(n Node) error { return cmp.Or(n.Routes.Err, n.Namespaces.Err) }},
	{"clock", checkClock, nil},
	{"configuration", checkConfiguration, func(n Node) error { return n.State.Err }},
	{"agent", checkAgent, nil},
}

// Diagnose runs all checks.
func Diagnose(n Node) Report {
	report := Report{Findings: []Finding{}}
	for _, c := range checks {
		var findings []Finding
		if c.unseen != nil && c.unseen(n) != nil {
			findings = unseen(c.unseen(n))
		} else {
			findings = c.find(n)
		}
		for _, f := range findings {
			f.Check = c.name
			switch f.State {
			case Warning:
				report.Warnings++
			case Problem:
				report.Problems++
			}
			if f.unseen {
				report.Unseen++
			}
			if f.State != OK {
				f.Link = page + "#" + c.name
			}
			report.Findings = append(report.Findings, f)
		}
	}

	return report
}

func ok(format string, args ...any) []Finding {
	return []Finding{{State: OK, Seen: fmt.Sprintf(format, args...)}}
}

func warning(seen, remedy string) []Finding {
	return []Finding{{State: Warning, Seen: seen, Remedy: remedy}}
}

func problem(seen, remedy string) []Finding {
	return []Finding{{State: Problem, Seen: seen, Remedy: remedy}}
}

// unseen returns the finding of a check that could not look at its subject.
func unseen(err error) []Finding {
	remedy := "The other checks do not depend on it; look at the page for how to check it by hand."
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EPERM) {
		remedy = "Run sluice doctor as root on the node, or as the Job of deploy/doctor."
	}

	return []Finding{{State: Warning, Seen: fmt.Sprintf("not looked at: %v", err), Remedy: remedy, unseen: true}}
}
