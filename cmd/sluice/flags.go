package main

import (
	"errors"

	"github.com/spf13/pflag"
)

// agentFlags are the flags of `sluice agent`: kube-proxy's, and Sluice's own. The
// latter are in force with and without a configuration file.
type agentFlags struct {
	*kubeProxyFlags

	manifests       string
	udp             string
	devices         []string
	excludeDevices  []string
	deviceAttach    string
	forwarding      string
	flowTableMemory string
	mark            markFlag
	algorithm       string
	serviceMetrics  int
	countBytes      bool
	failFast        bool
	dryRun          bool
}

func newAgentFlags(f *pflag.FlagSet) *agentFlags {
	flags := &agentFlags{kubeProxyFlags: newKubeProxyFlags(f)}
	f.StringVar(&flags.manifests, "manifests", "", "read Services, EndpointSlices, Nodes and ServiceCIDRs from the YAML and JSON files in this folder, and follow them, instead of an API server")
	f.StringVar(&flags.udp, "udp", "all", "which UDP sockets are translated: all, connected (those that connect only), off")
	f.StringSliceVar(&flags.devices, "devices", nil, "attach to these devices only: shell patterns, each with =pods or =uplink to set what the device leads to instead of detecting it (default: all devices that lead to pods or to other hosts)")
	f.StringSliceVar(&flags.excludeDevices, "exclude-devices", nil, "never attach to these devices: shell patterns")
	f.StringVar(&flags.deviceAttach, "device-attach", "", "how to attach to devices: tcx or clsact (default: tcx where the kernel has it)")
	f.StringVar(&flags.forwarding, "forwarding", "auto", "how packets to backends on other nodes leave: stack (always through the node's network stack) or auto (past it, unless it has rules that apply to them)")
	f.StringVar(&flags.flowTableMemory, "flow-table-memory", "", "how much memory the flow tables of devices may take; it takes effect when they are created. The default holds as many flows as conntrack.maxPerCore and conntrack.min allow the kernel to track, limited to a 128th of the machine's memory or 16Mi, whichever is more")
	f.Var(&flags.mark, "mark", "VALUE[/MASK]: set these bits of the mark of packets that devices translate and clients send to Services, so that netfilter rules can match them (default: none)")
	f.StringVar(&flags.algorithm, "algorithm", "", "how Services without an annotation for it choose a backend: random, rr, lc, sed, nq, sh, dh or maglev (default: what ipvs.scheduler selects, or random)")
	f.IntVar(&flags.serviceMetrics, "service-metrics", 1000, "how many Services have metrics of their own, the others share one; 0 switches them off")
	f.BoolVar(&flags.countBytes, "count-bytes", false, "count the bytes of TCP connections that were translated at a socket, for the metrics of Services; it costs every TCP connection of the node some 2 % of its CPU time")
	f.BoolVar(&flags.failFast, "fail-fast", false, "end if not everything can be attached at the first try, instead of trying again")
	f.BoolVar(&flags.dryRun, "dry-run", false, "print what would be programmed, as 'sluice services' does, and change nothing")

	return flags
}

// validate returns an error if one of Sluice's own flags is out of range, or
// conflicts with kube-proxy's.
func (f *agentFlags) validate(s *settings) error {
	switch {
	case f.manifests != "" && s.kubeProxy.ClientConnection.Kubeconfig != "":
		return errors.New("--manifests: clientConnection.kubeconfig (--kubeconfig) is given too, and Services come from one of them")
	case f.manifests != "" && f.master != "":
		return errors.New("--manifests: --master is given too, and Services come from one of them")
	case f.serviceMetrics < 0:
		return errors.New("--service-metrics: it must not be negative")
	}

	return nil
}
