package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// agentConfig is what the agent needs of the flags and settings.
func (f *agentFlags) agentConfig(where *places, s *settings, log *slog.Logger) (agent.Config, error) {
	if err := f.validate(s); err != nil {
		return agent.Config{}, err
	}
	cfg := agent.Config{
		Version:        version,
		Manifests:      f.manifests,
		Datapath:       datapath.Config{BPFRoot: where.bpfRoot, CountBytes: f.countBytes, Mark: bpf.Mark(f.mark)},
		ServiceMetrics: f.serviceMetrics,
		FailFast:       f.failFast,
		Socket:         where.socket,
		Log:            log,
	}
	var err error
	if !f.dryRun {
		if cfg.Datapath.CgroupRoot, err = where.cgroup(); err != nil {
			return agent.Config{}, err
		}
	}
	if cfg.Datapath.UDP, err = agent.ParseUDPMode(f.udp); err != nil {
		return agent.Config{}, fmt.Errorf("--udp: %w", err)
	}
	if err := f.setDevices(&cfg); err != nil {
		return agent.Config{}, err
	}
	if err := f.setFlowMemory(&cfg, s.kubeProxy); err != nil {
		return agent.Config{}, err
	}
	if err := s.apply(&cfg); err != nil {
		return agent.Config{}, err
	}
	cfg.Algorithm = config.Algorithm(s.kubeProxy)
	if f.algorithm != "" {
		if cfg.Algorithm, err = lb.ParseAlgorithm(f.algorithm); err != nil {
			return agent.Config{}, fmt.Errorf("--algorithm: %w", err)
		}
	}
	if f.manifests == "" && !f.initOnly {
		err = setClient(&cfg, s.kubeProxy.ClientConnection, f.master)
	}

	return cfg, err
}

// setDevices says which devices programs are attached to, and how, and what those do there.
func (f *agentFlags) setDevices(cfg *agent.Config) error {
	var err error
	if cfg.Devices.Only, err = parsePatterns(f.devices); err != nil {
		return fmt.Errorf("--devices: %w", err)
	}
	if cfg.Devices.Never, err = parsePatterns(f.excludeDevices); err == nil {
		err = cfg.Devices.Validate()
	}
	if err != nil {
		return fmt.Errorf("--exclude-devices: %w", err)
	}
	if cfg.Datapath.Attachment, err = datapath.ParseAttachment(f.deviceAttach); err != nil {
		return fmt.Errorf("--device-attach: %w", err)
	}
	switch f.forwarding {
	case "auto":
	case "stack":
		cfg.ThroughStack = true
	default:
		return fmt.Errorf("--forwarding %q: it is auto or stack", f.forwarding)
	}

	return nil
}

// setFlowMemory says how large the tables of flows are, if they are made anew.
func (f *agentFlags) setFlowMemory(cfg *agent.Config, kp *config.KubeProxy) error {
	var memory uint64
	if f.flowTableMemory == "" {
		var machine unix.Sysinfo_t
		if err := unix.Sysinfo(&machine); err != nil {
			return fmt.Errorf("memory of this machine: %w", err)
		}
		connections := node.ConntrackMax(int(*kp.Conntrack.MaxPerCore), int(*kp.Conntrack.Min), node.Cores())
		memory = defaultFlowMemory(connections, machine.Totalram*uint64(machine.Unit))
	} else {
		quantity, err := resource.ParseQuantity(f.flowTableMemory)
		if err != nil {
			return fmt.Errorf("--flow-table-memory %q: %w", f.flowTableMemory, err)
		}
		memory = uint64(max(0, quantity.Value()))
	}
	var err error
	if cfg.Datapath.Capacities, err = maps.FlowCapacities(memory); err != nil {
		return fmt.Errorf("--flow-table-memory %q: %w", f.flowTableMemory, err)
	}

	return nil
}

// The kernel allocates tables of flows in full, so they take no more than this part of a machine's
// memory, but not less than what a small one can spare.
const (
	flowMemoryPart  = 128
	leastFlowMemory = 16 << 20
	usualConntrack  = 128 << 10 // connections, where none are configured: kube-proxy's default
)

// defaultFlowMemory returns the memory for as many flows as the kernel is to track connections, if
// the machine has so much to spare.
func defaultFlowMemory(connections int, machine uint64) uint64 {
	wanted := maps.MemoryForFlows(cmp.Or(connections, usualConntrack))

	return min(wanted, max(machine/flowMemoryPart, leastFlowMemory))
}

func parsePatterns(texts []string) ([]node.Pattern, error) {
	var patterns []node.Pattern
	for _, text := range texts {
		p, err := node.ParsePattern(text)
		if err != nil {
			return nil, err
		}
		patterns = append(patterns, p)
	}

	return patterns, nil
}

// apply sets all that kube-proxy's configuration says.
func (s *settings) apply(cfg *agent.Config) error {
	kp := s.kubeProxy
	gates, err := config.Gates(kp.FeatureGates)
	if err != nil {
		return err
	}
	gates.AddMetrics() // kubernetes_feature_enabled
	if cfg.NodeName, err = s.nodeName(); err != nil {
		return err
	}
	if cfg.Local, err = localDetector(kp); err != nil {
		return err
	}
	if cfg.NodePortAddresses, err = nodePortAddresses(kp); err != nil {
		return err
	}
	if err := setAddresses(cfg, kp); err != nil {
		return err
	}
	cfg.Datapath.NoLocalhostNodePorts = !*kp.IPTables.LocalhostNodePorts
	cfg.Datapath.UDPIdle = kp.Conntrack.UDPStreamTimeout.Duration
	cfg.FlowTimeouts = flow.Timeouts{
		Established:   kp.Conntrack.TCPEstablishedTimeout.Duration,
		Closing:       kp.Conntrack.TCPCloseWaitTimeout.Duration,
		UDPUnanswered: kp.Conntrack.UDPTimeout.Duration,
		UDPAnswered:   kp.Conntrack.UDPStreamTimeout.Duration,
	}
	cfg.MasqueradeAll = config.MasqueradeAll(kp)
	cfg.IgnoreExternalIPs = !gates.Enabled(config.AllowServiceExternalIPs)
	cfg.BindAddressHardFail, cfg.Profiling = kp.BindAddressHardFail, kp.EnableProfiling
	cfg.Configz = config.Shown(kp)
	cfg.SyncPeriod, cfg.DriftInterval = config.SyncPeriod(kp), kp.ConfigSyncPeriod.Duration
	cfg.CheckNode = checkNode(kp, cfg.Log)

	return nil
}

// checkNode warns of what does not fit the node, and refuses what kube-proxy
// would not start with.
func checkNode(kp *config.KubeProxy, log *slog.Logger) func(agent.NodeFacts) error {
	return func(facts agent.NodeFacts) error {
		warnings, err := config.CheckNode(kp, config.Node{
			Families: node.Families(),
			Primary:  facts.Primary,
			IPs:      facts.IPs,
			PodCIDRs: facts.PodCIDRs,
		})
		for _, warning := range warnings {
			log.Warn("the configuration may not be what was meant", "problem", warning)
		}

		return err
	}
}

func setAddresses(cfg *agent.Config, kp *config.KubeProxy) error {
	ip, err := lb.ParseAddr(kp.BindAddress)
	if err != nil {
		return fmt.Errorf("bindAddress: %w", err)
	}
	if !ip.IsUnspecified() {
		cfg.NodeIP = ip
	}
	if kp.HealthzBindAddress != "" {
		if cfg.HealthzAddress, err = config.ParseAddrPort(kp.HealthzBindAddress); err != nil {
			return fmt.Errorf("healthzBindAddress: %w", err)
		}
	}
	if cfg.MetricsAddress, err = config.ParseAddrPort(kp.MetricsBindAddress); err != nil {
		return fmt.Errorf("metricsBindAddress: %w", err)
	}

	return nil
}

// nodePortAddresses: without any, all addresses of both families answer. In
// nftables mode, and without a word of kube-proxy's configuration, there is one.
func nodePortAddresses(kp *config.KubeProxy) (lb.NodePortAddresses, error) {
	if len(kp.NodePortAddresses) > 0 {
		return lb.ParseNodePortAddresses(kp.NodePortAddresses)
	}

	return lb.NodePortAddresses{Prefixes: []netip.Prefix{
		netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0),
	}}, nil
}

// localDetector says what tells traffic of pods from other. kube-proxy's default
// without a cluster CIDR tells nobody from anybody; here devices do.
func localDetector(kp *config.KubeProxy) (agent.LocalDetector, error) {
	local := agent.LocalDetector{
		Mode:                agent.LocalMode(kp.DetectLocalMode),
		BridgeInterface:     kp.DetectLocal.BridgeInterface,
		InterfaceNamePrefix: kp.DetectLocal.InterfaceNamePrefix,
	}
	if local.Mode != agent.LocalClusterCIDR {
		return local, nil
	}
	if kp.ClusterCIDR == "" {
		local.Mode = agent.LocalByDevice

		return local, nil
	}
	var err error
	if local.ClusterCIDRs, err = agent.ParseClusterCIDRs(kp.ClusterCIDR); err != nil {
		return local, fmt.Errorf("clusterCIDR: %w", err)
	}

	return local, nil
}
