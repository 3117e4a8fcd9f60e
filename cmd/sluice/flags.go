package main

import (
	"errors"

	"github.com/spf13/pflag"
)

// agentFlags are the flags of `sluice agent`: kube-proxy's, and Sluice's own,
// which count whether there is a configuration file or not.
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
	f.StringSliceVar(&flags.devices, "devices", nil, "attach to these devices only: shell patterns, each with =pods or =uplink if that is not to be found out (default: all that lead to pods or to others)")
	f.StringSliceVar(&flags.excludeDevices, "exclude-devices", nil, "never attach to these devices: shell patterns")
	f.StringVar(&flags.deviceAttach, "device-attach", "", "how to attach to devices: tcx or clsact (default: tcx where the kernel has it)")
	f.StringVar(&flags.forwarding, "forwarding", "auto", "how packets to backends on other nodes leave: stack (through the node's network stack, always) or auto (without, if nothing there concerns them)")
	f.StringVar(&flags.flowTableMemory, "flow-table-memory", "", "how much memory the flows of devices may take; it counts when the tables are created. The default is for as many as conntrack.maxPerCore and conntrack.min allow the kernel to track, and a 128th of the machine's memory at most, but 16Mi at least")
	f.Var(&flags.mark, "mark", "VALUE[/MASK]: set these bits of the mark of packets that devices translate and clients send to Services, so that rules of netfilter can tell them (default: none)")
	f.StringVar(&flags.algorithm, "algorithm", "", "how Services that do not say it choose a backend: random, rr, lc, sed, nq, sh, dh or maglev (default: what ipvs.scheduler selects, or random)")
	f.IntVar(&flags.serviceMetrics, "service-metrics", 1000, "how many Services have metrics of their own, the others share one; 0 switches them off")
	f.BoolVar(&flags.countBytes, "count-bytes", false, "count the bytes of TCP connections that sockets were given, for the metrics of Services; it costs every TCP connection of the node some 2 % of its CPU time")
	f.BoolVar(&flags.failFast, "fail-fast", false, "end if not everything can be attached at the first try, instead of trying again")
	f.BoolVar(&flags.dryRun, "dry-run", false, "print what would be programmed, as 'sluice services' does, and change nothing")

	return flags
}

// validate finds own flags that exclude each other or what kube-proxy's say.
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
