package config

import (
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

// SyncPeriods returns the fields syncPeriod and minSyncPeriod of the section that the
// mode selects.
func SyncPeriods(cfg *KubeProxy) (period, least *metav1.Duration) {
	switch cfg.Mode {
	case ModeIPVS:
		return &cfg.IPVS.SyncPeriod, &cfg.IPVS.MinSyncPeriod
	case ModeNFTables:
		return &cfg.NFTables.SyncPeriod, &cfg.NFTables.MinSyncPeriod
	default:
		return &cfg.IPTables.SyncPeriod, &cfg.IPTables.MinSyncPeriod
	}
}

// MasqueradeAll returns the field masqueradeAll of the section that the mode selects.
// IPVS has none, and uses that of iptables.
func MasqueradeAll(cfg *KubeProxy) *bool {
	if cfg.Mode == ModeNFTables {
		return &cfg.NFTables.MasqueradeAll
	}

	return &cfg.IPTables.MasqueradeAll
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
