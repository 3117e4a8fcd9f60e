package main

import (
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/sluice-lb/sluice/pkg/config"
)

// kubeProxyFlags are the flags of kube-proxy: names, types and defaults are its.
type kubeProxyFlags struct {
	set   *pflag.FlagSet
	names []string // of kube-proxy's flags; set may have more

	file, writeTo     string
	master            string
	hostnameOverride  string
	cleanup, initOnly bool
	version           versionFlag

	// Most flags are fields of the configuration.
	cfg *config.KubeProxy
	// These are not, or only together with others.
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
	f.SetNormalizeFunc(cliflag.WordSepNormalizeFunc) // --proxy_mode is --proxy-mode, as there

	return flags
}

// meaningless is the usage of a flag that does nothing.
const meaningless = "accepted for kube-proxy's sake: "

func (f *kubeProxyFlags) addProcess(set *pflag.FlagSet) {
	set.StringVar(&f.file, "config", "", "a file with a KubeProxyConfiguration; with it, most other flags of kube-proxy are ignored. When it changes, the agent ends, to be started again")
	set.StringVar(&f.writeTo, "write-config-to", "", "write the configuration that is in force to this file, and exit")
	set.BoolVar(&f.cleanup, "cleanup", false, "do what 'sluice cleanup' does, and exit; rules that kube-proxy has left behind stay")
	set.BoolVar(&f.initOnly, "init-only", false, "do what needs full privileges (mount bpffs, make the maps, load the programs, set sysctls), and exit")
	set.StringVar(&f.cfg.ClientConnection.Kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod of the cluster)")
	set.StringVar(&f.master, "master", "", "address of the API server, instead of the one in the kubeconfig")
	set.StringVar(&f.cfg.ClientConnection.ContentType, "kube-api-content-type", f.cfg.ClientConnection.ContentType, "content type of requests to the API server")
	set.Float32Var(&f.cfg.ClientConnection.QPS, "kube-api-qps", f.cfg.ClientConnection.QPS, "how many requests a second go to the API server")
	set.Int32Var(&f.cfg.ClientConnection.Burst, "kube-api-burst", f.cfg.ClientConnection.Burst, "how many requests to the API server may go at once")
	set.StringVar(&f.hostnameOverride, "hostname-override", "", "name of this node's Node object (default: the host name)")
	set.Int32Var(f.cfg.OOMScoreAdj, "oom-score-adj", *f.cfg.OOMScoreAdj, "oom_score_adj of the agent, from -1000 to 1000")
	set.Var(cliflag.NewMapStringBool(&f.cfg.FeatureGates), "feature-gates", "kube-proxy's feature gates, as NAME=true,NAME=false; AllowServiceExternalIPs and those of logging mean something here")
	set.Var(&f.version, "version", "print the version and exit; 'raw' prints more of it")
	set.Lookup("version").NoOptDefVal = "true"
	set.String("boot-id-file", "/proc/sys/kernel/random/boot_id", meaningless+"nothing asks for the boot id")
	set.String("machine-id-file", "/etc/machine-id,/var/lib/dbus/machine-id", meaningless+"nothing asks for the machine id")
}

func (f *kubeProxyFlags) addServers(set *pflag.FlagSet) {
	set.Var(&ipFlag{&f.cfg.BindAddress}, "bind-address", "the node's primary address, instead of the one that the Node object has")
	set.Var(&ipPortFlag{&f.cfg.HealthzBindAddress}, "healthz-bind-address", "address and port of the health checks")
	set.Var(&ipPortFlag{&f.cfg.MetricsBindAddress}, "metrics-bind-address", "address and port of the metrics")
	set.Int32Var(&f.healthzPort, "healthz-port", config.HealthzPort, "port of the health checks if --healthz-bind-address has none; 0 switches them off")
	_ = set.MarkDeprecated("healthz-port", "use --healthz-bind-address") // it exists
	set.Int32Var(&f.metricsPort, "metrics-port", config.MetricsPort, "port of the metrics if --metrics-bind-address has none")
	_ = set.MarkDeprecated("metrics-port", "use --metrics-bind-address") // it exists
	set.BoolVar(&f.cfg.BindAddressHardFail, "bind-address-hard-fail", false, "end if an address cannot be listened on, instead of trying again")
	set.BoolVar(&f.cfg.EnableProfiling, "profiling", false, "serve /debug/pprof and /debug/flags/v at the metrics address")
	set.StringVar(&f.cfg.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", meaningless+"no metric is hidden")
}

func (f *kubeProxyFlags) addSync(set *pflag.FlagSet) {
	cfg := f.cfg
	sync, least := cfg.IPTables.SyncPeriod.Duration, cfg.IPTables.MinSyncPeriod.Duration
	set.Var((*modeFlag)(&cfg.Mode), "proxy-mode", "iptables, ipvs or nftables: whose settings count, where they differ. What is programmed does not depend on it")
	set.BoolVar(&f.masqueradeAll, "masquerade-all", false, "let backends see this node as their client, as kube-proxy does, also where the client's address could be kept")
	set.BoolVar(cfg.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", true, "let node ports answer on loopback addresses")
	set.DurationVar(&f.iptablesSync, "iptables-sync-period", sync, "health checks fail when changes are not programmed for twice as long")
	set.DurationVar(&f.iptablesMin, "iptables-min-sync-period", least, meaningless+"changes are programmed as they come")
	set.Int32Var(cfg.IPTables.MasqueradeBit, "iptables-masquerade-bit", *cfg.IPTables.MasqueradeBit, meaningless+"packets are not marked")
	set.DurationVar(&f.ipvsSync, "ipvs-sync-period", sync, "as --iptables-sync-period, with --proxy-mode ipvs")
	set.DurationVar(&f.ipvsMin, "ipvs-min-sync-period", least, meaningless+"changes are programmed as they come")
	set.StringVar(&cfg.IPVS.Scheduler, "ipvs-scheduler", "", "selects the algorithm that is like it; --algorithm counts more")
	set.StringSliceVar(&cfg.IPVS.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, meaningless+"IPVS is not touched")
	set.BoolVar(&cfg.IPVS.StrictARP, "ipvs-strict-arp", false, meaningless+"no device gets the addresses of Services")
	set.DurationVar(&cfg.IPVS.TCPTimeout.Duration, "ipvs-tcp-timeout", 0, meaningless+"see --conntrack-tcp-timeout-established")
	set.DurationVar(&cfg.IPVS.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", 0, meaningless+"see --conntrack-tcp-timeout-close-wait")
	set.DurationVar(&cfg.IPVS.UDPTimeout.Duration, "ipvs-udp-timeout", 0, meaningless+"see --conntrack-udp-timeout-stream")
	set.DurationVar(&cfg.ConfigSyncPeriod.Duration, "config-sync-period", cfg.ConfigSyncPeriod.Duration, "how often everything in the maps is compared with what should be there")
}

func (f *kubeProxyFlags) addLocal(set *pflag.FlagSet) {
	cfg := f.cfg
	set.Var((*localModeFlag)(&cfg.DetectLocalMode), "detect-local-mode", "what is asked of traffic by devices of pods, to be that of pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix (default: ClusterCIDR if --cluster-cidr is given, else nothing)")
	set.StringVar(&cfg.ClusterCIDR, "cluster-cidr", "", "addresses of all pods, for --detect-local-mode ClusterCIDR: one range, or one of each family")
	set.StringVar(&cfg.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "the bridge of the pods, for --detect-local-mode BridgeInterface")
	set.StringVar(&cfg.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "", "how the devices of pods begin, for --detect-local-mode InterfaceNamePrefix")
	set.StringSliceVar(&cfg.NodePortAddresses, "nodeport-addresses", nil, `on which local addresses node ports answer: CIDRs, or "primary" for the node IPs (default: primary; with --config or --proxy-mode, what kube-proxy does in that mode)`)
}

func (f *kubeProxyFlags) addConntrack(set *pflag.FlagSet) {
	ct := &f.cfg.Conntrack
	set.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "how many connections the kernel's own tracking may hold for each core; 0 leaves it as it is")
	set.Int32Var(ct.Min, "conntrack-min", *ct.Min, "how many connections it may hold at least")
	set.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "when an idle TCP flow is forgotten; 0 leaves the kernel's own tracking as it is")
	set.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "when a TCP flow is forgotten that one side has closed")
	set.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "let the kernel's own tracking bear packets that are out of its window")
	set.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", 0, "when a UDP flow without an answer is forgotten; 0 leaves it as it is")
	set.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", 0, "when an idle UDP flow is forgotten; 0 leaves it as it is")
}

// countWithFile are the flags of kube-proxy that count beside a configuration
// file. Those of logging do, too.
var countWithFile = []string{"config", "master", "hostname-override", "cleanup", "init-only", "write-config-to", "version"}

// isLogging says whether the flag is one of [logsapi.AddFlags].
func isLogging(name string) bool {
	return name == "v" || name == "vmodule" || strings.HasPrefix(name, "log-") || name == "logging-format"
}
