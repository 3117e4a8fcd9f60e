package differential

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// settings are those that an operator can choose for either proxy.
type settings struct {
	nodePortAddresses []string // none: the default of nftables mode, primary
	masqueradeAll     bool
	detect            string // detectLocalMode
}

// How pods are distinguished from other clients: by addresses of all pods, or by the devices of those of
// a node.
const (
	clusterCIDRs    = "10.244.0.0/16,fd00:10:244::/48"
	podDevicePrefix = "pod"
)

// everyAddress are all local addresses but loopback.
var everyAddress = []string{"0.0.0.0/0", "::/0"}

// firstSegment are the addresses by which the nodes reach each other, and loopback.
var firstSegment = []string{"192.168.50.0/24", "fd00:50::/64", "localhost"}

func randomSettings(r *rand.Rand) settings {
	s := settings{
		masqueradeAll: r.IntN(6) == 0,
		detect:        pick(r, "ClusterCIDR", "ClusterCIDR", "InterfaceNamePrefix", "NodeCIDR"),
	}
	switch r.IntN(4) {
	case 0:
		s.nodePortAddresses = everyAddress
	case 1:
		s.nodePortAddresses = []string{"primary", "localhost"}
	case 3:
		s.nodePortAddresses = firstSegment
	}

	return s
}

// config is the file in which both proxies read them.
func (s settings) config(kubeconfig string) string {
	return fmt.Sprintf(configFormat, kubeconfig, strings.Join(quoted(s.nodePortAddresses), ", "),
		s.masqueradeAll, s.detect, clusterCIDRs, podDevicePrefix)
}

// Conntrack's limits stay as they are: they are the machine's. Changes are
// applied at once, and not after the second that is the default.
const configFormat = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: %q, qps: 100, burst: 200}
nodePortAddresses: [%s]
nftables: {minSyncPeriod: 50ms, masqueradeAll: %t}
detectLocalMode: %s
clusterCIDR: %q
detectLocal: {interfaceNamePrefix: %q}
hostnameOverride: node-1
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

func quoted(texts []string) []string {
	var all []string
	for _, text := range texts {
		all = append(all, fmt.Sprintf("%q", text))
	}

	return all
}

// pick returns one of these, each as likely as the others.
func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }
