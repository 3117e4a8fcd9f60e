package config

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// The modes of kube-proxy on Linux. To Sluice a mode says which section of the
// configuration counts.
const (
	ModeIPTables kubeproxyconfig.ProxyMode = "iptables"
	ModeIPVS     kubeproxyconfig.ProxyMode = "ipvs"
	ModeNFTables kubeproxyconfig.ProxyMode = "nftables"
)

// The modes of telling pods from others.
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

// SyncPeriod is that of the mode.
func SyncPeriod(cfg *KubeProxy) time.Duration {
	sync, _ := periods(cfg)

	return sync.Duration
}

// SetPeriods sets those of the mode.
func SetPeriods(cfg *KubeProxy, sync, least time.Duration) {
	s, l := periods(cfg)
	s.Duration, l.Duration = sync, least
}

// section is the name of the section that the mode selects.
func section(cfg *KubeProxy) string {
	if cfg.Mode == ModeIPVS || cfg.Mode == ModeNFTables {
		return string(cfg.Mode)
	}

	return string(ModeIPTables)
}

// masqueradeAll is in the section that the mode selects; IPVS has none of its own.
func masqueradeAll(cfg *KubeProxy) *bool {
	if cfg.Mode == ModeNFTables {
		return &cfg.NFTables.MasqueradeAll
	}

	return &cfg.IPTables.MasqueradeAll
}

// MasqueradeAll is that of the mode.
func MasqueradeAll(cfg *KubeProxy) bool { return *masqueradeAll(cfg) }

// SetMasqueradeAll sets that of the mode.
func SetMasqueradeAll(cfg *KubeProxy, all bool) { *masqueradeAll(cfg) = all }

// Shown returns a copy as kube-proxy shows its configuration, at /configz and
// with --write-config-to: what the sections have in common is left only in that
// of the mode.
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
	shown.PortRange = "" // kube-proxy forgets it when it reads

	return shown
}

func minSyncPeriod(cfg *KubeProxy) time.Duration {
	_, least := periods(cfg)

	return least.Duration
}

// schedulers are those of IPVS.
var schedulers = map[string]lb.Algorithm{
	"rr": lb.RoundRobin, "wrr": lb.RoundRobin, // Kubernetes knows no weights
	"lc": lb.LeastConnections, "wlc": lb.LeastConnections, "twos": lb.LeastConnections,
	"sed": lb.ShortestExpectedDelay,
	"nq":  lb.NeverQueue,
	"sh":  lb.SourceHash,
	"dh":  lb.DestinationHash, "lblc": lb.DestinationHash, "lblcr": lb.DestinationHash,
	"mh": lb.Maglev,
}

// Algorithm is what ipvs.scheduler selects, in whichever mode. Without one it is
// IPVS' default in that mode, and [lb.Random], as in kube-proxy, in the others.
// The configuration must be valid.
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
