package config

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"
	logsapi "k8s.io/component-base/logs/api/v1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-lb/sluice/pkg/lb"
)

const notNegative = "must not be negative"

// problems collects the errors of a configuration.
type problems struct{ list field.ErrorList }

// path returns the path of the field with this name below the root.
func path(name string) *field.Path {
	return field.NewPath("kubeproxyconfig", strings.Split(name, ".")...)
}

// add adds the error that the field of that name has an invalid value.
func (p *problems) add(name string, value any, what string) {
	p.list = append(p.list, field.Invalid(path(name), value, what))
}

func (p *problems) addAt(name string, index int, value any, what string) {
	p.list = append(p.list, field.Invalid(path(name).Index(index), value, what))
}

// inRange checks the value of a field unless it is unset.
func (p *problems) inRange(name string, value *int32, low, high int32) {
	if value != nil && (*value < low || *value > high) {
		p.add(name, *value, fmt.Sprintf("must be from %d to %d", low, high))
	}
}

// Validate returns all errors of a configuration whose defaults are filled in and
// which is complete. Each error has the path of its field. Validate refuses what
// kube-proxy refuses, and besides an ipvs.scheduler to which no algorithm
// corresponds, and two servers at one address. It accepts what another version of kube-proxy
// than the newest may accept: feature gates that Sluice does not know, see [Gates], and
// any showHiddenMetricsForVersion. Mode ipvs does not depend on the gate KubeProxyIPVS.
func Validate(cfg *KubeProxy) error {
	var p problems
	p.checkMode(cfg)
	p.checkPeriods(cfg)
	p.checkConntrack(cfg)
	p.checkAddresses(cfg)
	p.checkNodePortAddresses(cfg.NodePortAddresses)
	p.checkLocal(cfg)
	p.checkLogging(cfg)
	p.inRange("oomScoreAdj", cfg.OOMScoreAdj, -1000, 1000)
	p.notNegativeCount("clientConnection.burst", cfg.ClientConnection.Burst)
	// kube-proxy accepts the minor version before its own alone, which for a configuration of another Kubernetes is another one.
	if v := cfg.ShowHiddenMetricsForVersion; v != "" {
		if _, err := version.ParseMajorMinor(v); err != nil {
			p.add("showHiddenMetricsForVersion", v, "must be a version of Kubernetes, as 1.36")
		}
	}

	return p.list.ToAggregate()
}

// checkMode checks the sections. As in kube-proxy, the iptables section is checked
// in every mode, the others in their own.
func (p *problems) checkMode(cfg *KubeProxy) {
	p.inRange("iptables.masqueradeBit", cfg.IPTables.MasqueradeBit, 0, 31)
	switch cfg.Mode {
	case ModeIPTables:
	case ModeNFTables:
		p.inRange("nftables.masqueradeBit", cfg.NFTables.MasqueradeBit, 0, 31)
	case ModeIPVS:
		p.notNegative("ipvs.tcpTimeout", cfg.IPVS.TCPTimeout)
		p.notNegative("ipvs.tcpFinTimeout", cfg.IPVS.TCPFinTimeout)
		p.notNegative("ipvs.udpTimeout", cfg.IPVS.UDPTimeout)
		p.checkCIDRs("ipvs.excludeCIDRs", cfg.IPVS.ExcludeCIDRs)
	default:
		p.add("mode", string(cfg.Mode), "must be iptables, ipvs, nftables or empty")
	}
	if _, ok := schedulers[cfg.IPVS.Scheduler]; !ok && cfg.IPVS.Scheduler != "" {
		p.add("ipvs.scheduler", cfg.IPVS.Scheduler,
			"no algorithm of Sluice is like it; it can be rr, wrr, lc, wlc, twos, sed, nq, sh, dh, lblc, lblcr or mh")
	}
}

func (p *problems) checkCIDRs(name string, cidrs []string) {
	for i, cidr := range cidrs {
		if _, _, err := netutils.ParseCIDRSloppy(cidr); err != nil {
			p.addAt(name, i, cidr, "must be an address range, as 10.0.0.0/8")
		}
	}
}

// checkAddresses checks where to listen, and what the node's address is.
func (p *problems) checkAddresses(cfg *KubeProxy) {
	if netutils.ParseIPSloppy(cfg.BindAddress) == nil {
		p.add("bindAddress", cfg.BindAddress, "must be an IP address")
	}
	var healthz netip.AddrPort
	if cfg.HealthzBindAddress != "" { // empty with --healthz-port 0
		healthz = p.listenAddress("healthzBindAddress", cfg.HealthzBindAddress)
	}
	metrics := p.listenAddress("metricsBindAddress", cfg.MetricsBindAddress)
	if healthz.IsValid() && metrics.IsValid() && overlap(healthz, metrics) {
		p.add("metricsBindAddress", cfg.MetricsBindAddress,
			fmt.Sprintf("%s is %s: both cannot listen there", path("healthzBindAddress"), cfg.HealthzBindAddress))
	}
}

// overlap reports whether two servers cannot listen on these at the same time. An
// unspecified address covers all of its family, and that of IPv6 those of IPv4, too.
func overlap(a, b netip.AddrPort) bool {
	covers := func(a, b netip.Addr) bool { return a.IsUnspecified() && (a.Is6() || b.Is4()) }

	return a.Port() == b.Port() && (a.Addr() == b.Addr() || covers(a.Addr(), b.Addr()) || covers(b.Addr(), a.Addr()))
}

// listenAddress returns the address, or the zero value if the text is none.
func (p *problems) listenAddress(name, text string) netip.AddrPort {
	addr, err := ParseAddrPort(text)
	if err != nil {
		p.add(name, text, err.Error())
	}

	return addr
}

// ParseAddrPort parses an address as kube-proxy does, which allows leading zeros.
func ParseAddrPort(text string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("must be IP:port")
	}
	addr, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(host))
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("%q is no IP address", host)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return netip.AddrPort{}, fmt.Errorf("%q is no port from 1 to 65535", port)
	}

	return netip.AddrPortFrom(addr.Unmap(), uint16(number)), nil
}

// checkNodePortAddresses checks that each is a range, or a word that stands for some and is there once.
func (p *problems) checkNodePortAddresses(addresses []string) {
	for i, text := range addresses {
		switch text {
		case lb.NodePortsPrimary, lb.NodePortsLocalhost, lb.NodePortsAll:
			if slices.Index(addresses, text) < i {
				p.list = append(p.list, field.Duplicate(path("nodePortAddresses").Index(i), text))
			}
		default:
			if _, _, err := netutils.ParseCIDRSloppy(text); err != nil {
				p.addAt("nodePortAddresses", i, text, "must be an address range, as 10.0.0.0/8, or primary, localhost or all")
			}
		}
	}
}

// checkLocal checks the detection of local traffic. Fields that the mode does not
// use are not checked.
func (p *problems) checkLocal(cfg *KubeProxy) {
	switch cfg.DetectLocalMode {
	case LocalNodeCIDR:
	case LocalClusterCIDR:
		p.checkClusterCIDR(cfg.ClusterCIDR)
	case LocalBridgeInterface:
		if cfg.DetectLocal.BridgeInterface == "" {
			p.add("detectLocal.bridgeInterface", "", fmt.Sprintf("%s BridgeInterface needs it", path("detectLocalMode")))
		}
	case LocalInterfaceNamePrefix:
		if cfg.DetectLocal.InterfaceNamePrefix == "" {
			p.add("detectLocal.interfaceNamePrefix", "", fmt.Sprintf("%s InterfaceNamePrefix needs it", path("detectLocalMode")))
		}
	default:
		p.add("detectLocalMode", string(cfg.DetectLocalMode),
			"must be ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix or empty")
	}
}

func (p *problems) checkClusterCIDR(text string) {
	if text == "" {
		return
	}
	cidrs := strings.Split(text, ",")
	for _, cidr := range cidrs {
		if _, _, err := netutils.ParseCIDRSloppy(cidr); err != nil {
			p.add("clusterCIDR", text, fmt.Sprintf("%q must be an address range, as 10.0.0.0/8", cidr))
			return
		}
	}
	dual, err := netutils.IsDualStackCIDRStrings(cidrs)
	if len(cidrs) > 2 || len(cidrs) == 2 && (err != nil || !dual) {
		p.add("clusterCIDR", text, "must be one address range, or one of each family")
	}
}

// checkLogging checks the feature gates, and the logging that they allow.
func (p *problems) checkLogging(cfg *KubeProxy) {
	RegisterLogFormats()
	good := make(map[string]bool)
	for _, name := range slices.Sorted(maps.Keys(cfg.FeatureGates)) {
		on := cfg.FeatureGates[name]
		if _, _, err := Gates(map[string]bool{name: on}); err != nil {
			p.list = append(p.list, field.Invalid(path("featureGates").Key(name), on, err.Error()))
			continue
		}
		good[name] = on
	}
	gates, _, err := Gates(good)
	if err != nil {
		p.add("featureGates", good, err.Error())

		return
	}
	p.list = append(p.list, logsapi.Validate(&cfg.Logging, gates, path("logging"))...)
}

// RegisterLogFormats registers the names of log formats, for the flags and the
// validation of logging. It registers no loggers: cmd has its own.
var RegisterLogFormats = sync.OnceFunc(func() {
	// The only error is that the format is registered already.
	_ = logsapi.RegisterLogFormat(logsapi.JSONLogFormat, nil, logsapi.LoggingBetaOptions)
})

func (p *problems) notNegative(name string, d metav1.Duration) {
	if d.Duration < 0 {
		p.add(name, d.Duration.String(), notNegative)
	}
}

func (p *problems) notNegativeCount(name string, count int32) {
	if count < 0 {
		p.add(name, count, notNegative)
	}
}

func (p *problems) positive(name string, d metav1.Duration) {
	if d.Duration <= 0 {
		p.add(name, d.Duration.String(), "must be more than 0")
	}
}

// checkPeriods checks the periods of the mode's section, as kube-proxy does.
func (p *problems) checkPeriods(cfg *KubeProxy) {
	p.positive("configSyncPeriod", cfg.ConfigSyncPeriod)
	section := string(cfg.Mode)
	if cfg.Mode != ModeIPVS && cfg.Mode != ModeNFTables {
		section = string(ModeIPTables)
	}
	period, least := SyncPeriods(cfg)
	name, leastName := section+".syncPeriod", section+".minSyncPeriod"
	p.positive(name, *period)
	p.notNegative(leastName, *least)
	if least.Duration > period.Duration {
		p.add(name, period.Duration.String(), fmt.Sprintf("must not be less than %s, %s", path(leastName), least.Duration))
	}
}

func (p *problems) checkConntrack(cfg *KubeProxy) {
	ct := cfg.Conntrack
	p.notNegativeCount("conntrack.maxPerCore", *ct.MaxPerCore)
	p.notNegativeCount("conntrack.min", *ct.Min)
	p.notNegative("conntrack.tcpEstablishedTimeout", *ct.TCPEstablishedTimeout)
	p.notNegative("conntrack.tcpCloseWaitTimeout", *ct.TCPCloseWaitTimeout)
	p.notNegative("conntrack.udpTimeout", ct.UDPTimeout)
	p.notNegative("conntrack.udpStreamTimeout", ct.UDPStreamTimeout)
}
