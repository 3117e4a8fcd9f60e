package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// agentFlags are the flags of `sluice agent`: kube-proxy's, and Sluice's own. The
// latter are in force with and without a configuration file.
type agentFlags struct {
	*kubeProxyFlags

	// wanted receives the flags that are a field of the agent's configuration.
	wanted agent.Config
	// The others are parsed, see agentConfig, or select another act than to run the agent.
	udp             string
	devices         []string
	excludeDevices  []string
	deviceAttach    string
	forwarding      string
	flowTableMemory string
	algorithm       string
	hashSeed        string
	heal            string
	dryRun          bool
}

func newAgentFlags(f *pflag.FlagSet) *agentFlags {
	flags := &agentFlags{kubeProxyFlags: newKubeProxyFlags(f)}
	wanted := &flags.wanted
	f.StringVar(&wanted.Manifests, "manifests", "", "read Services, EndpointSlices, Nodes, ServiceCIDRs, Pods and Namespaces from the YAML and JSON files in this folder, and follow them, instead of an API server")
	f.StringVar(&flags.udp, "udp", "all", "which UDP sockets of pods are translated: all, or off: devices translate what pods send. The node's own always are")
	f.StringSliceVar(&flags.devices, "devices", nil, "attach to these devices only: shell patterns, each with =pods or =uplink to set what the device leads to instead of detecting it (default: all devices that lead to pods or to other hosts)")
	f.StringSliceVar(&flags.excludeDevices, "exclude-devices", nil, "never attach to these devices: shell patterns")
	f.StringVar(&flags.deviceAttach, "device-attach", "", "how to attach to devices: tcx or clsact (default: tcx where the kernel has it)")
	f.StringVar(&flags.forwarding, "forwarding", "auto", "how packets to backends on other nodes leave: stack (always through the node's network stack) or auto (past it, unless it has rules that apply to them)")
	f.StringVar(&flags.flowTableMemory, "flow-table-memory", "", "how much memory the flow tables of devices may take; it takes effect when they are created. The default holds as many flows as conntrack.maxPerCore and conntrack.min allow the kernel to track, limited to a 128th of the machine's memory, and to a quarter of the limit of the agent's cgroup, or to 16Mi if that is more")
	f.Var((*markFlag)(&wanted.Datapath.Mark), "mark", "VALUE[/MASK]: set these bits of the mark of packets that devices translate and clients send to Services, so that netfilter rules can match them (default: none)")
	f.StringVar(&flags.algorithm, "algorithm", "", "how Services without an annotation for it choose a backend: random, rr, lc, sed, nq, sh, dh or maglev (default: what ipvs.scheduler selects, or random)")
	f.BoolVar(&wanted.PodOptOut, "pod-opt-out", false, "let Pods (annotation sluice-lb.io/socket: \"off\") and Namespaces (label of the same name) opt out of translation at sockets; the agent then follows the Pods of its node, and Namespaces with the label, and needs the rights to")
	f.StringVar(&flags.heal, "heal", "eject", "what is done about backends that do not answer, until Kubernetes notices: off, eject (new connections go to others) or resteer (and those that have begun, too)")
	f.IntVar(&wanted.ServiceMetrics, "service-metrics", 1000, "how many Services have metrics of their own, the others share one; 0 switches them off")
	f.BoolVar(&wanted.Datapath.Handshakes, "handshake-metrics", true, "measure TCP handshakes and retransmissions of Services' clients at sockets, from Linux 5.11 on; switched off, no program runs at tracepoints for it")
	f.IntVar(&wanted.HashTableSize, "hash-table-size", maglev.DefaultSize, "the entries in the table of each Service that hashes (sh, dh, maglev): 251, 509, 1021, 2039, 4093, 8191 or 16381, on all nodes the same. A smaller one takes less memory; more flows move when a backend comes or goes, and parts are less even. Services with more backends than a quarter of it have 16381")
	f.StringVar(&flags.hashSeed, "hash-seed", "", "a text that clients do not know, on all nodes the same: it decides which backend sh, dh and maglev choose. Without one, a client can choose its ports and addresses so that all of its connections go to one backend. Another text moves nearly all clients, and nodes choose differently until all have it")
	f.IntVar(&wanted.BackendMetrics, "backend-metrics", 0, "how many backends have metrics of their own: open connections and TCP handshakes; 0 switches them off")
	f.BoolVar(&wanted.FailFast, "fail-fast", false, "end if not everything can be attached at the first try, instead of trying again")
	f.BoolVar(&flags.dryRun, "dry-run", false, "print what would be programmed, as 'sluice services' does, and change nothing. The exit code is 0 if all is in force, 1 if a part of an object is not, and 2 if something cannot be read")

	return flags
}

// validate returns an error if one of Sluice's own flags is out of range, or
// conflicts with kube-proxy's.
func (f *agentFlags) validate(s *settings) error {
	switch {
	case f.wanted.Manifests != "" && s.kubeProxy.ClientConnection.Kubeconfig != "":
		return errors.New("--manifests: clientConnection.kubeconfig (--kubeconfig) is given too, and Services come from one of them")
	case f.wanted.Manifests != "" && f.master != "":
		return errors.New("--manifests: --master is given too, and Services come from one of them")
	case f.wanted.ServiceMetrics < 0:
		return errors.New("--service-metrics: it must not be negative")
	case !slices.Contains(maglev.Sizes, f.wanted.HashTableSize):
		return fmt.Errorf("--hash-table-size: %d is none of %s", f.wanted.HashTableSize, strings.Trim(fmt.Sprint(maglev.Sizes), "[]"))
	case f.wanted.BackendMetrics < 0:
		return errors.New("--backend-metrics: it must not be negative")
	}

	return nil
}

// kubeProxyFlags are kube-proxy's flags, with kube-proxy's names, types and defaults.
type kubeProxyFlags struct {
	set   *pflag.FlagSet
	names []string // kube-proxy's flags: set has Sluice's own, too

	file, writeTo     string
	master            string
	hostnameOverride  string
	cleanup, initOnly bool
	version           versionFlag

	// cfg receives the flags that are a field of the configuration, as most are.
	cfg *config.KubeProxy
	// The others set a field only in combination, see fillIn.
	healthzPort, metricsPort int32
	iptablesSync, ipvsSync   time.Duration
	iptablesMin, ipvsMin     time.Duration
	masqueradeAll            bool
}

func newKubeProxyFlags(f *pflag.FlagSet) *kubeProxyFlags {
	config.RegisterLogFormats()
	flags := &kubeProxyFlags{set: f, cfg: config.Default()}
	flags.addProcess(f)
	flags.addServers(f)
	flags.addSync(f)
	flags.addLocal(f)
	flags.addConntrack(f)
	logsapi.AddFlags(&flags.cfg.Logging, f)
	f.VisitAll(func(flag *pflag.Flag) { flags.names = append(flags.names, flag.Name) })
	f.SetNormalizeFunc(cliflag.WordSepNormalizeFunc) // --proxy_mode is --proxy-mode, as in kube-proxy

	return flags
}

// noEffect begins the usage of a flag that is accepted and does nothing.
const noEffect = "accepted for compatibility with kube-proxy: "

func (f *kubeProxyFlags) addProcess(set *pflag.FlagSet) {
	set.StringVar(&f.file, "config", "", "a file with a KubeProxyConfiguration; with it, most other flags of kube-proxy are ignored. When it changes, the agent ends, to be started again")
	set.StringVar(&f.writeTo, "write-config-to", "", "write the resulting configuration to this file, and exit")
	set.BoolVar(&f.cleanup, "cleanup", false, "do what 'sluice cleanup' does, and exit; netfilter rules that kube-proxy has left behind stay")
	set.BoolVar(&f.initOnly, "init-only", false, "do what needs full privileges (mount bpffs, make the maps, load the programs, set sysctls), and exit")
	set.StringVar(&f.cfg.ClientConnection.Kubeconfig, "kubeconfig", "", "kubeconfig file for the API server (default: the pod's service account)")
	set.StringVar(&f.master, "master", "", "address of the API server, instead of the one in the kubeconfig")
	set.StringVar(&f.cfg.ClientConnection.ContentType, "kube-api-content-type", f.cfg.ClientConnection.ContentType, "content type of requests to the API server")
	set.Float32Var(&f.cfg.ClientConnection.QPS, "kube-api-qps", f.cfg.ClientConnection.QPS, "how many requests a second go to the API server")
	set.Int32Var(&f.cfg.ClientConnection.Burst, "kube-api-burst", f.cfg.ClientConnection.Burst, "how many requests to the API server may go at once")
	set.StringVar(&f.hostnameOverride, "hostname-override", "", "name of this node's Node object (default: the host name)")
	set.Int32Var(f.cfg.OOMScoreAdj, "oom-score-adj", *f.cfg.OOMScoreAdj, "oom_score_adj of the agent, from -1000 to 1000")
	set.Var(cliflag.NewMapStringBool(&f.cfg.FeatureGates), "feature-gates", "kube-proxy's feature gates, as NAME=true,NAME=false; AllowServiceExternalIPs and those of logging have an effect here")
	set.Var(&f.version, "version", "print the version and exit; 'raw' prints more of it")
	set.Lookup("version").NoOptDefVal = "true"
	set.String("boot-id-file", "/proc/sys/kernel/random/boot_id", noEffect+"the boot id is not used")
	set.String("machine-id-file", "/etc/machine-id,/var/lib/dbus/machine-id", noEffect+"the machine id is not used")
}

func (f *kubeProxyFlags) addServers(set *pflag.FlagSet) {
	set.Var(&textFlag{&f.cfg.BindAddress, "ip", checkIP}, "bind-address", "the node's primary address, instead of the Node object's")
	set.Var(&textFlag{&f.cfg.HealthzBindAddress, "ipport", checkIPPort}, "healthz-bind-address", "address and port of the health checks")
	set.Var(&textFlag{&f.cfg.MetricsBindAddress, "ipport", checkIPPort}, "metrics-bind-address", "address and port of the metrics")
	set.Int32Var(&f.healthzPort, "healthz-port", config.HealthzPort, "port of the health checks if --healthz-bind-address has none; 0 switches them off")
	_ = set.MarkDeprecated("healthz-port", "use --healthz-bind-address") // it exists
	set.Int32Var(&f.metricsPort, "metrics-port", config.MetricsPort, "port of the metrics if --metrics-bind-address has none")
	_ = set.MarkDeprecated("metrics-port", "use --metrics-bind-address") // it exists
	set.BoolVar(&f.cfg.BindAddressHardFail, "bind-address-hard-fail", false, "end if an address cannot be listened on, instead of trying again")
	set.BoolVar(&f.cfg.EnableProfiling, "profiling", false, "serve /debug/pprof and /debug/flags/v at the metrics address")
	set.StringVar(&f.cfg.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", noEffect+"no metric is hidden")
}

func (f *kubeProxyFlags) addSync(set *pflag.FlagSet) {
	cfg := f.cfg
	sync, least := cfg.IPTables.SyncPeriod.Duration, cfg.IPTables.MinSyncPeriod.Duration
	set.Var(&textFlag{(*string)(&cfg.Mode), "ProxyMode", nil}, "proxy-mode", "iptables, ipvs or nftables: selects which of their settings are in force. The datapath is the same in all modes")
	set.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all connections to ClusterIPs, also where the client's address could be kept")
	set.BoolVar(cfg.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", true, "let node ports answer on loopback addresses")
	set.DurationVar(&f.iptablesSync, "iptables-sync-period", sync, "health checks fail if a change is not programmed within twice this time")
	set.DurationVar(&f.iptablesMin, "iptables-min-sync-period", least, noEffect+"changes are programmed at once")
	set.Int32Var(cfg.IPTables.MasqueradeBit, "iptables-masquerade-bit", *cfg.IPTables.MasqueradeBit, noEffect+"packets to be masqueraded are not marked")
	set.DurationVar(&f.ipvsSync, "ipvs-sync-period", sync, "as --iptables-sync-period, with --proxy-mode ipvs")
	set.DurationVar(&f.ipvsMin, "ipvs-min-sync-period", least, noEffect+"changes are programmed at once")
	set.StringVar(&cfg.IPVS.Scheduler, "ipvs-scheduler", "", "selects the algorithm that corresponds to this scheduler; --algorithm takes precedence")
	set.StringSliceVar(&cfg.IPVS.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, noEffect+"IPVS is not touched")
	set.BoolVar(&cfg.IPVS.StrictARP, "ipvs-strict-arp", false, noEffect+"no device gets the addresses of Services")
	set.DurationVar(&cfg.IPVS.TCPTimeout.Duration, "ipvs-tcp-timeout", 0, noEffect+"see --conntrack-tcp-timeout-established")
	set.DurationVar(&cfg.IPVS.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", 0, noEffect+"see --conntrack-tcp-timeout-close-wait")
	set.DurationVar(&cfg.IPVS.UDPTimeout.Duration, "ipvs-udp-timeout", 0, noEffect+"see --conntrack-udp-timeout-stream")
	set.DurationVar(&cfg.ConfigSyncPeriod.Duration, "config-sync-period", cfg.ConfigSyncPeriod.Duration, "how often everything in the maps is compared with what should be there")
}

func (f *kubeProxyFlags) addLocal(set *pflag.FlagSet) {
	cfg := f.cfg
	set.Var(&textFlag{(*string)(&cfg.DetectLocalMode), "LocalMode", nil}, "detect-local-mode", "what distinguishes pods of this node among the traffic of pods' devices: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix (default: ClusterCIDR if --cluster-cidr is given, else all of it is from pods)")
	set.StringVar(&cfg.ClusterCIDR, "cluster-cidr", "", "addresses of all pods, for --detect-local-mode ClusterCIDR: one range, or one of each family")
	set.StringVar(&cfg.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "the bridge of the pods, for --detect-local-mode BridgeInterface")
	set.StringVar(&cfg.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "", "prefix of the names of pods' devices, for --detect-local-mode InterfaceNamePrefix")
	set.StringSliceVar(&cfg.NodePortAddresses, "nodeport-addresses", nil, `local addresses on which node ports answer: CIDRs, or "primary" for the node IPs (default: primary; with --config or --proxy-mode, what kube-proxy does in that mode)`)
}

func (f *kubeProxyFlags) addConntrack(set *pflag.FlagSet) {
	ct := &f.cfg.Conntrack
	set.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "how many connections the kernel's conntrack may hold per core; 0 leaves it as it is")
	set.Int32Var(ct.Min, "conntrack-min", *ct.Min, "how many connections the kernel's conntrack may hold at least")
	set.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "how long an idle TCP flow is kept; 0 leaves the kernel's conntrack as it is")
	set.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "how long a TCP flow is kept that one side has closed")
	set.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "let the kernel's conntrack accept packets outside of the TCP window")
	set.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", 0, "how long a UDP flow without an answer is kept; 0 leaves the kernel's conntrack as it is")
	set.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", 0, "how long an idle UDP flow with answers is kept; 0 leaves the kernel's conntrack as it is")
}

// usedWithFile are the flags of kube-proxy that take precedence over a configuration
// file. Those of logging do, too; all others are ignored beside a file.
var usedWithFile = []string{"config", "master", "hostname-override", "cleanup", "init-only", "write-config-to", "version"}

// isLogging reports whether the flag is one of [logsapi.AddFlags].
func isLogging(name string) bool {
	return name == "v" || name == "vmodule" || strings.HasPrefix(name, "log-") || name == "logging-format"
}

// textFlag is the value of a flag for a text. An address is accepted by check, and an empty one leaves the default. A
// mode has no check: [config.Validate] checks it with the rest of the configuration.
type textFlag struct {
	text  *string
	kind  string
	check func(text string) error
}

func (f *textFlag) Type() string   { return f.kind }
func (f *textFlag) String() string { return *f.text }

func (f *textFlag) Set(text string) error {
	if f.check != nil {
		if text == "" {
			return nil
		}
		if err := f.check(text); err != nil {
			return err
		}
	}
	*f.text = text

	return nil
}

func checkIP(text string) error {
	if netutils.ParseIPSloppy(text) == nil {
		return fmt.Errorf("%q is no IP address", text)
	}

	return nil
}

// checkIPPort accepts an address with or without a port: fillIn adds a missing port
// when all flags are known.
func checkIPPort(text string) error {
	_, err := config.ParseAddrPort(config.WithPort(text, 1))

	return err
}

// versionFlag is the value of --version: true, false or raw.
type versionFlag string

func (f *versionFlag) Type() string { return "version" }

func (f *versionFlag) IsBoolFlag() bool { return true }

func (f *versionFlag) String() string {
	if *f == "" {
		return "false"
	}

	return string(*f)
}

func (f *versionFlag) Set(text string) error {
	if text != "raw" {
		if _, err := strconv.ParseBool(text); err != nil {
			return fmt.Errorf("it is true, false or raw")
		}
	}
	*f = versionFlag(text)

	return nil
}

// requested reports whether the version is to be printed, and whether as JSON (raw).
func (f *versionFlag) requested() (requested, raw bool) {
	if *f == "raw" {
		return true, true
	}
	requested, _ = strconv.ParseBool(f.String()) // Set has checked it

	return requested, false
}

// markFlag selects bits of a packet's mark, as VALUE/MASK. Without a mask it selects the
// bits that are set in the value.
type markFlag bpf.Mark

func (f *markFlag) Type() string { return "mark" }

func (f *markFlag) String() string {
	if f.Mask == 0 {
		return ""
	}

	return fmt.Sprintf("%#x/%#x", f.Value, f.Mask)
}

func (f *markFlag) Set(text string) error {
	value, mask, masked := strings.Cut(text, "/")
	if !masked {
		mask = value
	}
	v, err := strconv.ParseUint(value, 0, 32)
	if err != nil {
		return fmt.Errorf("value: %w", err)
	}
	m, err := strconv.ParseUint(mask, 0, 32)
	if err != nil {
		return fmt.Errorf("mask: %w", err)
	}
	if v == 0 || v&^m != 0 {
		return fmt.Errorf("%q: the value must have bits, and only those of the mask", text)
	}
	*f = markFlag{Value: uint32(v), Mask: uint32(m)}

	return nil
}
