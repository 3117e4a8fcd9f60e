package config

import (
	"cmp"
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// The ports of kube-proxy.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// Defaults of fields that a configuration does not set.
const (
	defaultBindAddress   = "0.0.0.0"
	defaultSyncPeriod    = 30 * time.Second
	defaultMinSyncPeriod = time.Second
	defaultMasqueradeBit = 14
	defaultContentType   = "application/vnd.kubernetes.protobuf"
	defaultOOMScoreAdj   = -999
)

// Default returns the configuration without a file and without flags.
func Default() *KubeProxy {
	cfg := new(KubeProxy)
	SetDefaults(cfg)

	return cfg
}

// SetDefaults sets every field that has its zero value and another default, as
// kube-proxy does when it has read a file. [Complete] sets those that depend on
// other fields.
func SetDefaults(cfg *KubeProxy) {
	cfg.BindAddress = cmp.Or(cfg.BindAddress, defaultBindAddress)
	healthz, metrics := defaultBindAddress, "127.0.0.1"
	if netutils.IPFamilyOfString(cfg.BindAddress) == netutils.IPv6 {
		healthz, metrics = "::", "::1"
	}
	cfg.HealthzBindAddress = WithPort(cmp.Or(cfg.HealthzBindAddress, healthz), HealthzPort)
	cfg.MetricsBindAddress = WithPort(cmp.Or(cfg.MetricsBindAddress, metrics), MetricsPort)

	setPointer(&cfg.IPTables.MasqueradeBit, defaultMasqueradeBit)
	setPointer(&cfg.IPTables.LocalhostNodePorts, true)
	setDuration(&cfg.IPTables.SyncPeriod, defaultSyncPeriod)
	setDuration(&cfg.IPTables.MinSyncPeriod, defaultMinSyncPeriod)
	setDuration(&cfg.IPVS.SyncPeriod, defaultSyncPeriod)
	setPointer(&cfg.NFTables.MasqueradeBit, defaultMasqueradeBit)
	setDuration(&cfg.NFTables.SyncPeriod, defaultSyncPeriod)
	setDuration(&cfg.NFTables.MinSyncPeriod, defaultMinSyncPeriod)

	setPointer(&cfg.OOMScoreAdj, defaultOOMScoreAdj)
	setPointer(&cfg.Conntrack.MaxPerCore, 32<<10)
	setPointer(&cfg.Conntrack.Min, 128<<10)
	setPointer(&cfg.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	setPointer(&cfg.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	setDuration(&cfg.ConfigSyncPeriod, 15*time.Minute)

	cfg.ClientConnection.ContentType = cmp.Or(cfg.ClientConnection.ContentType, defaultContentType)
	cfg.ClientConnection.QPS = cmp.Or(cfg.ClientConnection.QPS, 5)
	cfg.ClientConnection.Burst = cmp.Or(cfg.ClientConnection.Burst, 10)
	if cfg.FeatureGates == nil {
		cfg.FeatureGates = make(map[string]bool)
	}
	logsapi.SetRecommendedLoggingConfiguration(&cfg.Logging)
}

// Complete sets the fields whose default depends on others, once those have their
// values: the mode, the detection of local traffic, and the addresses of node ports.
func Complete(cfg *KubeProxy) {
	cfg.Mode = cmp.Or(cfg.Mode, ModeIPTables)
	if cfg.Mode == ModeNFTables && len(cfg.NodePortAddresses) == 0 {
		cfg.NodePortAddresses = []string{lb.NodePortsPrimary}
	}
	cfg.DetectLocalMode = cmp.Or(cfg.DetectLocalMode, LocalClusterCIDR)
}

// WithPort appends port to an address that has none. It returns a text that is no
// address as it is: validation finds it.
func WithPort(address string, port int) string {
	if _, _, err := net.SplitHostPort(address); err == nil || netutils.ParseIPSloppy(address) == nil {
		return address
	}

	return net.JoinHostPort(address, strconv.Itoa(port))
}

func setDuration(field *metav1.Duration, value time.Duration) {
	field.Duration = cmp.Or(field.Duration, value)
}

func setPointer[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}
