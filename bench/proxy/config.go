package proxy

import (
	"fmt"
	"os"
	"path/filepath"
)

// podCIDR holds the addresses of all pods of the lab.
const podCIDR = "10.244.0.0/16"

// configFormat leaves the limits of conntrack alone, which are the machine's, and
// whom the kernel kills when memory is short.
const configFormat = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %q
hostnameOverride: %q
clusterCIDR: %q
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0}
oomScoreAdj: 0
iptables: {syncPeriod: %[5]s}
ipvs: {syncPeriod: %[5]s}
nftables: {syncPeriod: %[5]s}
`

// writeConfig writes the file that all proxies read, and returns its path.
func writeConfig(cfg Config, mode string) (string, error) {
	path := filepath.Join(cfg.Directory, "config.yaml")
	text := fmt.Sprintf(configFormat, mode, cfg.NodeName, podCIDR, cfg.Kubeconfig, cfg.ResyncPeriod)

	return path, os.WriteFile(path, []byte(text), 0o600)
}
