package config

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// The modes of kube-proxy on Linux. In Sluice a mode only selects the section of
// the configuration that is in force.
const (
	ModeIPTables kubeproxyconfig.ProxyMode = "iptables"
	ModeIPVS     kubeproxyconfig.ProxyMode = "ipvs"
	ModeNFTables kubeproxyconfig.ProxyMode = "nftables"
)

// The modes of detecting traffic of the node's pods.
const (
	LocalClusterCIDR         kubeproxyconfig.LocalMode = "ClusterCIDR"
	LocalNodeCIDR            kubeproxyconfig.LocalMode = "NodeCIDR"
	LocalBridgeInterface     kubeproxyconfig.LocalMode = "BridgeInterface"
	LocalInterfaceNamePrefix kubeproxyconfig.LocalMode = "InterfaceNamePrefix"
)

// Primary stands in nodePortAddresses for the node IPs.
const Primary = "primary"

// periods returns the sync periods of the section that the mode selects.
func periods(cfg *KubeProxy) (sync, least *metav1.Duration) {
	switch cfg.Mode {
	case ModeIPVS:
		return &cfg.IPVS.SyncPeriod, &cfg.IPVS.MinSyncPeriod
	case ModeNFTables:
		return &cfg.NFTables.SyncPeriod, &cfg.NFTables.MinSyncPeriod
	default:
		return &cfg.IPTables.SyncPeriod, &cfg.IPTables.MinSyncPeriod
	}
}

// SyncPeriod returns the sync period of the mode's section.
func SyncPeriod(cfg *KubeProxy) time.Duration {
	sync, _ := periods(cfg)

	return sync.Duration
}

// SetPeriods sets the sync periods of the mode's section.
func SetPeriods(cfg *KubeProxy, sync, least time.Duration) {
	s, l := periods(cfg)
	s.Duration, l.Duration = sync, least
}

// section returns the name of the section that the mode selects.
func section(cfg *KubeProxy) string {
	if cfg.Mode == ModeIPVS || cfg.Mode == ModeNFTables {
		return string(cfg.Mode)
	}

	return string(ModeIPTables)
}

// masqueradeAll returns the field of the section that the mode selects. IPVS has
// none, and uses that of iptables.
func masqueradeAll(cfg *KubeProxy) *bool {
	if cfg.Mode == ModeNFTables {
		return &cfg.NFTables.MasqueradeAll
	}

	return &cfg.IPTables.MasqueradeAll
}

// MasqueradeAll returns masqueradeAll of the mode's section.
func MasqueradeAll(cfg *KubeProxy) bool { return *masqueradeAll(cfg) }

// SetMasqueradeAll sets masqueradeAll of the mode's section.
func SetMasqueradeAll(cfg *KubeProxy, all bool) { *masqueradeAll(cfg) = all }

// Shown returns a copy in the form in which kube-proxy shows its configuration, at
// /configz and with --write-config-to: fields that all sections have are set only
// in the mode's section.
func Shown(cfg *KubeProxy) *KubeProxy {
	shown := cfg.DeepCopy()
	shown.SetGroupVersionKind(kubeproxyconfig.SchemeGroupVersion.WithKind(kind))
	all, sync, least := MasqueradeAll(cfg), SyncPeriod(cfg), minSyncPeriod(cfg)
	shown.IPTables.MasqueradeAll, shown.NFTables.MasqueradeAll = false, false
	for _, d := range []*metav1.Duration{
		&shown.IPTables.SyncPeriod, &shown.IPTables.MinSyncPeriod,
		&shown.IPVS.SyncPeriod, &shown.IPVS.MinSyncPeriod,
		&shown.NFTables.SyncPeriod, &shown.NFTables.MinSyncPeriod,
	} {
		d.Duration = 0
	}
	SetMasqueradeAll(shown, all)
	SetPeriods(shown, sync, least)
	shown.PortRange = "" // kube-proxy drops it when it reads the file

	return shown
}

func minSyncPeriod(cfg *KubeProxy) time.Duration {
	_, least := periods(cfg)

	return least.Duration
}

// schedulers maps the schedulers of IPVS to the algorithm that corresponds.
var schedulers = map[string]lb.Algorithm{
	"rr": lb.RoundRobin, "wrr": lb.RoundRobin, // Kubernetes knows no weights
	"lc": lb.LeastConnections, "wlc": lb.LeastConnections, "twos": lb.LeastConnections,
	"sed": lb.ShortestExpectedDelay,
	"nq":  lb.NeverQueue,
	"sh":  lb.SourceHash,
	"dh":  lb.DestinationHash, "lblc": lb.DestinationHash, "lblcr": lb.DestinationHash,
	"mh": lb.Maglev,
}

// Algorithm returns the algorithm that ipvs.scheduler selects, in every mode.
// Without a scheduler it is [lb.RoundRobin] in IPVS mode, the default of IPVS, and
// [lb.Random] in the others, as in kube-proxy. The configuration must be valid.
func Algorithm(cfg *KubeProxy) lb.Algorithm {
	switch {
	case cfg.IPVS.Scheduler != "":
		return schedulers[cfg.IPVS.Scheduler]
	case cfg.Mode == ModeIPVS:
		return lb.RoundRobin
	default:
		return lb.Random
	}
}

func checkScheduler(name string) error {
	if _, ok := schedulers[name]; !ok && name != "" {
		return fmt.Errorf("no algorithm of Sluice is like it; it can be rr, wrr, lc, wlc, twos, sed, nq, sh, dh, lblc, lblcr or mh")
	}

	return nil
}
