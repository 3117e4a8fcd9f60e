package main

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// agentFlags are the flags of `sluice agent`. Those that kube-proxy has are
// named as there and mean the same.
type agentFlags struct {
	manifests         string
	kubeconfig        string
	master            string
	hostnameOverride  string
	nodePortAddresses []string
	udp               string
	devices           []string
	excludeDevices    []string
	deviceAttach      string
	detectLocalMode   string
	clusterCIDR       string
	podBridge         string
	podPrefix         string
	masqueradeAll     bool
	flowTableMemory   string
	dryRun            bool
}

func newAgent(where *places) *cobra.Command {
	var flags agentFlags
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Program this node's Services, until stopped; what is programmed stays in force afterwards",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := flags.config(where)
			if err != nil {
				return err
			}
			if flags.dryRun {
				return dryRun(cmd, cfg, out)
			}

			return agent.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.manifests, "manifests", "", "read Services, EndpointSlices, Nodes and ServiceCIDRs from the YAML and JSON files in this folder, and follow them, instead of an API server")
	f.StringVar(&flags.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod of the cluster)")
	f.StringVar(&flags.master, "master", "", "address of the API server, instead of the one in --kubeconfig")
	f.StringVar(&flags.hostnameOverride, "hostname-override", "", "name of this node's Node object (default: the host name)")
	f.StringSliceVar(&flags.nodePortAddresses, "nodeport-addresses", nil, `on which local addresses node ports answer: CIDRs, or "primary" for the node IPs (the default)`)
	f.StringVar(&flags.udp, "udp", "all", "which UDP sockets are translated: all, connected (those that connect only), off")
	f.StringSliceVar(&flags.devices, "devices", nil, "attach to these devices only: shell patterns, each with =pods or =uplink if that is not to be found out (default: all that lead to pods or to others)")
	f.StringSliceVar(&flags.excludeDevices, "exclude-devices", nil, "never attach to these devices: shell patterns")
	f.StringVar(&flags.deviceAttach, "device-attach", "", "how to attach to devices: tcx or clsact (default: tcx where the kernel has it)")
	f.StringVar(&flags.detectLocalMode, "detect-local-mode", "", "what tells traffic of pods from other: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix (default: the device that it comes by)")
	f.StringVar(&flags.clusterCIDR, "cluster-cidr", "", "addresses of all pods, for --detect-local-mode ClusterCIDR: one range, or one of each family")
	f.StringVar(&flags.podBridge, "pod-bridge-interface", "", "the bridge of the pods, for --detect-local-mode BridgeInterface")
	f.StringVar(&flags.podPrefix, "pod-interface-name-prefix", "", "how the devices of pods begin, for --detect-local-mode InterfaceNamePrefix")
	f.BoolVar(&flags.masqueradeAll, "masquerade-all", false, "let backends see this node as their client, as kube-proxy does, also where the client's address could be kept")
	f.StringVar(&flags.flowTableMemory, "flow-table-memory", "64Mi", "how much memory the flows of devices may take; it counts when the tables are created")
	f.BoolVar(&flags.dryRun, "dry-run", false, "print what would be programmed, as 'sluice services' does, and change nothing")
	f.StringVarP(&out.format, "output", "o", out.format, "with --dry-run: table, json or yaml")

	return cmd
}

func dryRun(cmd *cobra.Command, cfg agent.Config, out *output) error {
	services, err := agent.DryRun(cmd.Context(), cfg)
	if err != nil {
		return err
	}

	return out.print(cmd.OutOrStdout(), services, func(t *table) { drawServices(t, services) })
}

func (f agentFlags) config(where *places) (agent.Config, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	klog.SetSlogLogger(log)

	var cgroupRoot string
	var err error
	if !f.dryRun {
		cgroupRoot, err = where.cgroup()
	}
	if err != nil {
		return agent.Config{}, err
	}
	nodeName, err := f.nodeName()
	if err != nil {
		return agent.Config{}, err
	}
	addresses, err := lb.ParseNodePortAddresses(f.nodePortAddresses)
	if err != nil {
		return agent.Config{}, fmt.Errorf("--nodeport-addresses: %w", err)
	}
	udp, err := agent.ParseUDPMode(f.udp)
	if err != nil {
		return agent.Config{}, fmt.Errorf("--udp: %w", err)
	}
	cfg := agent.Config{
		Version:           version,
		NodeName:          nodeName,
		Manifests:         f.manifests,
		Datapath:          datapath.Config{CgroupRoot: cgroupRoot, BPFRoot: where.bpfRoot, UDP: udp},
		NodePortAddresses: addresses,
		Socket:            where.socket,
		Log:               log,
	}
	if err := f.setDevices(&cfg); err != nil {
		return agent.Config{}, err
	}
	if f.manifests != "" {
		if f.kubeconfig != "" || f.master != "" {
			return agent.Config{}, fmt.Errorf("--manifests %s: an API server is given too (--kubeconfig, --master)", f.manifests)
		}

		return cfg, nil
	}
	cfg.Client, cfg.APIServer, err = f.client()

	return cfg, err
}

// setDevices says how packets that pass devices are translated.
func (f agentFlags) setDevices(cfg *agent.Config) error {
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
	cfg.MasqueradeAll = f.masqueradeAll
	memory, err := resource.ParseQuantity(f.flowTableMemory)
	if err == nil {
		cfg.Datapath.Capacities, err = maps.FlowCapacities(uint64(max(0, memory.Value())))
	}
	if err != nil {
		return fmt.Errorf("--flow-table-memory %q: %w", f.flowTableMemory, err)
	}

	return f.setLocal(&cfg.Local)
}

// setLocal says what tells traffic of pods from other.
func (f agentFlags) setLocal(local *agent.LocalDetector) error {
	var err error
	if local.Mode, err = agent.ParseLocalMode(f.detectLocalMode); err != nil {
		return fmt.Errorf("--detect-local-mode: %w", err)
	}
	local.BridgeInterface, local.InterfaceNamePrefix = f.podBridge, f.podPrefix
	if local.Mode == agent.LocalByDevice || local.Mode == agent.LocalClusterCIDR {
		if local.ClusterCIDRs, err = agent.ParseClusterCIDRs(f.clusterCIDR); err != nil {
			return fmt.Errorf("--cluster-cidr: %w", err)
		}
	}

	return local.Validate()
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

// nodeName is found as kube-proxy does: blanks go, and upper case.
func (f agentFlags) nodeName() (string, error) {
	name := f.hostnameOverride
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("host name: %w", err)
		}
		name = host
	}
	name = strings.ToLower(strings.TrimSpace(name))
	if name == "" {
		return "", fmt.Errorf("--hostname-override %q: it is blank", f.hostnameOverride)
	}

	return name, nil
}

// client returns a client of the API server, and where that is. Inside a
// cluster, the address is that of the `kubernetes` Service: once Sluice is the
// only proxy of the node, --kubeconfig or --master should give another.
func (f agentFlags) client() (kubernetes.Interface, string, error) {
	var cfg *rest.Config
	var err error
	if f.kubeconfig == "" && f.master == "" {
		cfg, err = rest.InClusterConfig()
		if err != nil {
			return nil, "", fmt.Errorf("API server: %w; give --kubeconfig, --master or --manifests", err)
		}
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags(f.master, f.kubeconfig)
		if err != nil {
			return nil, "", fmt.Errorf("--kubeconfig %q, --master %q: %w", f.kubeconfig, f.master, err)
		}
	}
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	cfg.UserAgent = "sluice/" + version
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, "", fmt.Errorf("API server %s: %w", cfg.Host, err)
	}

	return client, cfg.Host, nil
}
