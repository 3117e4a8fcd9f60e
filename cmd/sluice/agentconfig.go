package main

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/kubeproxy"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// agentConfig returns the agent's configuration from the flags and settings. The
// error names the flag or the field that is wrong.
func (f *agentFlags) agentConfig(where *places, s *settings, log *slog.Logger) (agent.Config, error) {
	if err := f.validate(s); err != nil {
		return agent.Config{}, err
	}
	cfg := f.wanted
	cfg.Version, cfg.Socket, cfg.Log = version, where.socket, log
	cfg.Datapath.BPFRoot, cfg.Datapath.HashSeed = where.bpfRoot, bpf.SeedOf(f.hashSeed)
	var err error
	if !f.dryRun {
		if cfg.Datapath.CgroupRoot, err = where.cgroup(); err != nil {
			return agent.Config{}, err
		}
	}
	if cfg.Datapath.UDP, err = bpf.ParseUDPMode(f.udp); err != nil {
		return agent.Config{}, fmt.Errorf("--udp: %w", err)
	}
	if err := f.setDevices(&cfg); err != nil {
		return agent.Config{}, err
	}
	if err := f.setMapSizes(&cfg, s.kubeProxy); err != nil {
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
	if cfg.Healing, err = lb.ParseHealing(f.heal); err != nil {
		return agent.Config{}, fmt.Errorf("--heal: %w", err)
	}
	if f.wanted.Manifests != "" || f.initOnly {
		return cfg, nil
	}
	server, err := restConfig(s.kubeProxy.ClientConnection, f.master)
	if err != nil {
		return cfg, err
	}
	cfg.APIServer, cfg.Dialer = server.Host, kube.NewDialer(setApart)
	server.Dial = cfg.Dialer.DialContext
	if cfg.Client, err = kubernetes.NewForConfig(server); err != nil {
		return cfg, fmt.Errorf("API server %s: %w", server.Host, err)
	}

	return cfg, nil
}

// setApart makes programs leave a connection of the agent alone, or ends that. A process that may not, as a dry run of an
// ordinary user, is translated like others.
func setApart(socket syscall.RawConn, apart bool) error {
	mark := 0
	if apart {
		mark = bpf.AgentMark
	}
	var failed error
	err := socket.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
	})
	if errors.Is(failed, unix.EPERM) {
		failed = nil
	}

	return errors.Join(err, failed)
}

// setDevices sets which devices programs are attached to, by which attachment, and
// whether packets may leave without the network stack.
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

// setMapSizes sets the sizes of the flow tables, which count when they are created, and of the maps for Services.
func (f *agentFlags) setMapSizes(cfg *agent.Config, kp *config.KubeProxy) error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return fmt.Errorf("memory of this machine: %w", err)
	}
	left, err := node.ReadMemory()
	if err != nil {
		return fmt.Errorf("memory of this machine: %w", err)
	}
	machine := info.Totalram * uint64(info.Unit)
	cfg.Datapath.Least = maps.LeastCapacities(memoryForServices(machine, left.Limit))
	var memory uint64
	if f.flowTableMemory == "" {
		connections := node.ConntrackMax(int(*kp.Conntrack.MaxPerCore), int(*kp.Conntrack.Min), node.Cores())
		memory = defaultFlowMemory(connections, machine, left.Limit)
	} else {
		quantity, err := resource.ParseQuantity(f.flowTableMemory)
		if err != nil {
			return fmt.Errorf("--flow-table-memory %q: %w", f.flowTableMemory, err)
		}
		memory = uint64(max(0, quantity.Value()))
	}
	if cfg.Datapath.Capacities, err = maps.FlowCapacities(memory); err != nil {
		return fmt.Errorf("--flow-table-memory %q: %w", f.flowTableMemory, err)
	}
	for _, entries := range cfg.Datapath.Capacities {
		cfg.FlowMemory += maps.FlowMemory(int(entries))
	}

	return nil
}

// The kernel allocates flow tables in full, so by default they take at most this fraction
// of a machine's memory, and even on a small machine the least that is of use.
const (
	flowMemoryShare = 128 // the divisor
	leastFlowMemory = 16 << 20
	flowLimitShare  = 4         // the divisor, of the limit of a cgroup
	usualConntrack  = 128 << 10 // connections: kube-proxy's default, used if conntrack.maxPerCore is 0
)

// defaultFlowMemory returns the memory for as many flows as the kernel may track
// connections, limited to a share of the machine's memory, and of the limit of the agent's cgroup if it has one.
func defaultFlowMemory(connections int, machine, limit uint64) uint64 {
	wanted := maps.MemoryForFlows(cmp.Or(connections, usualConntrack))
	if limit > 0 {
		wanted = min(wanted, max(limit/flowLimitShare, leastFlowMemory))
	}

	return min(wanted, max(machine/flowMemoryShare, leastFlowMemory))
}

// memoryForServices returns the memory by which the maps for Services are sized: a cgroup with a limit may have a
// quarter of the machine's and nevertheless the maps of that machine.
func memoryForServices(machine, limit uint64) uint64 {
	if limit == 0 {
		return machine
	}

	return min(machine, 4*limit)
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

// apply copies the fields of kube-proxy's configuration into the agent's.
func (s *settings) apply(cfg *agent.Config) error {
	kp := s.kubeProxy
	gates, _, err := config.Gates(kp.FeatureGates)
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
	// The list is not empty in nftables mode and without a configuration file, where the default is
	// "primary".
	nodePorts := kp.NodePortAddresses
	if len(nodePorts) == 0 {
		nodePorts = []string{lb.NodePortsAll}
	}
	if cfg.NodePortAddresses, err = lb.ParseNodePortAddresses(nodePorts); err != nil {
		return err
	}
	// A list that is given is all there is. The default has the loopback addresses, too.
	localhost := func(family lb.Family) bool {
		return *kp.IPTables.LocalhostNodePorts && (s.nodePortsByDefault || cfg.NodePortAddresses.Loopback(family))
	}
	cfg.Datapath.NoLocalhostNodePortsV4, cfg.Datapath.NoLocalhostNodePortsV6 = !localhost(lb.IPv4), !localhost(lb.IPv6)
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
	cfg.Datapath.UDPIdle = kp.Conntrack.UDPStreamTimeout.Duration
	cfg.FlowTimeouts = flow.Timeouts{
		Established:   kp.Conntrack.TCPEstablishedTimeout.Duration,
		Closing:       kp.Conntrack.TCPCloseWaitTimeout.Duration,
		UDPUnanswered: kp.Conntrack.UDPTimeout.Duration,
		UDPAnswered:   kp.Conntrack.UDPStreamTimeout.Duration,
	}
	cfg.MasqueradeAll = *config.MasqueradeAll(kp)
	cfg.IgnoreExternalIPs = !gates.Enabled(config.AllowServiceExternalIPs)
	cfg.KubeProxyListens = func(at netip.AddrPort) bool {
		listens, err := kubeproxy.Listens(at)
		if err != nil {
			cfg.Log.Warn("cannot find out whether kube-proxy has an address", "address", at, "error", err)
		}

		return listens
	}
	cfg.BindAddressHardFail, cfg.Profiling = kp.BindAddressHardFail, kp.EnableProfiling
	cfg.Configz, cfg.Ignored = config.Shown(kp), s.unknownParts()
	period, _ := config.SyncPeriods(kp)
	cfg.SyncPeriod, cfg.DriftInterval = period.Duration, kp.ConfigSyncPeriod.Duration
	cfg.CheckNode = func(facts config.Node) error {
		warnings, err := config.CheckNode(kp, facts) // the error is for what keeps kube-proxy from starting, too
		for _, warning := range warnings {
			cfg.Log.Warn("the configuration may not do what is intended", "problem", warning)
		}

		return err
	}

	return nil
}

// localDetector returns how traffic of pods is distinguished from other traffic.
// In kube-proxy's default mode without a cluster CIDR no traffic counts as local;
// here the device that it comes by decides.
func localDetector(kp *config.KubeProxy) (node.LocalDetector, error) {
	local := node.LocalDetector{
		Mode:                node.LocalMode(kp.DetectLocalMode),
		BridgeInterface:     kp.DetectLocal.BridgeInterface,
		InterfaceNamePrefix: kp.DetectLocal.InterfaceNamePrefix,
	}
	if local.Mode != node.LocalClusterCIDR {
		return local, nil
	}
	if kp.ClusterCIDR == "" {
		local.Mode = node.LocalByDevice

		return local, nil
	}
	var err error
	if local.ClusterCIDRs, err = node.ParseClusterCIDRs(kp.ClusterCIDR); err != nil {
		return local, fmt.Errorf("clusterCIDR: %w", err)
	}

	return local, nil
}
