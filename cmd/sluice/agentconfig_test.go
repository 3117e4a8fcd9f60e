package main

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// mustConfig returns the agent's configuration for a file with these fields, or without
// a file ("none"), and flags.
func mustConfig(t *testing.T, fields string, args ...string) agent.Config {
	t.Helper()
	cfg, err := toConfig(t, fields, args...)
	if err != nil {
		t.Fatal(err)
	}

	return cfg
}

func toConfig(t *testing.T, fields string, args ...string) (agent.Config, error) {
	t.Helper()
	flags := parse(t, fields, append([]string{"--manifests=" + t.TempDir(), "--dry-run"}, args...)...)

	return flags.agentConfig(&places{}, mustResolve(t, flags), slog.New(slog.DiscardHandler))
}

// configs are settings, and the fields of the agent's configuration that follow.
var configs = []struct {
	name   string
	fields string
	args   []string
	got    func(agent.Config) any
	want   any
}{
	{"masquerading of the mode's section", "iptables: {masqueradeAll: true}", nil, func(c agent.Config) any { return c.MasqueradeAll }, true},
	{"no masquerading of another section", "mode: nftables\niptables: {masqueradeAll: true}", nil, func(c agent.Config) any { return c.MasqueradeAll }, false},
	{"masquerading in nftables mode", "mode: nftables\nnftables: {masqueradeAll: true}", nil, func(c agent.Config) any { return c.MasqueradeAll }, true},
	{"masquerading by a flag", "none", []string{"--masquerade-all", "--proxy-mode=nftables"}, func(c agent.Config) any { return c.MasqueradeAll }, true},
	{"no mark by default", "none", nil, mark, bpf.Mark{}},
	{"a mark", "none", []string{"--mark=0x100/0xff00"}, mark, bpf.Mark{Value: 0x100, Mask: 0xff00}},
	{"a mark of which all bits count that are set", "none", []string{"--mark=256"}, mark, bpf.Mark{Value: 0x100, Mask: 0x100}},
	{"random by default", "none", nil, algorithm, lb.Random},
	{"what the scheduler selects", "ipvs: {scheduler: sh}", nil, algorithm, lb.SourceHash},
	{"what the scheduler's flag selects", "none", []string{"--ipvs-scheduler=nq"}, algorithm, lb.NeverQueue},
	{"rr in IPVS mode", "none", []string{"--proxy-mode=ipvs"}, algorithm, lb.RoundRobin},
	{"--algorithm before the scheduler", "mode: ipvs\nipvs: {scheduler: sh}", []string{"--algorithm=maglev"}, algorithm, lb.Maglev},
	{"no opt-out of pods by default", "none", nil, podOptOut, false},
	{"eject by default", "none", nil, healing, lb.HealEject},
	{"no healing", "none", []string{"--heal=off"}, healing, lb.HealOff},
	{"opt-out of pods", "none", []string{"--pod-opt-out"}, podOptOut, true},
	{"external IPs by default", "none", nil, ignoreExternalIPs, false},
	{"no external IPs without the gate", "featureGates: {AllowServiceExternalIPs: false}", nil, ignoreExternalIPs, true},
	{"no external IPs by a flag", "none", []string{"--feature-gates=AllowServiceExternalIPs=false"}, ignoreExternalIPs, true},
	{"no node IP by default", "none", nil, nodeIP, netip.Addr{}},
	{"no node IP if it is not specified", `bindAddress: "::"`, nil, nodeIP, netip.Addr{}},
	{"the bind address as node IP", "bindAddress: 2001:db8::1", nil, nodeIP, netip.MustParseAddr("2001:db8::1")},
	{"the bind address by a flag", "none", []string{"--bind-address=192.0.2.7"}, nodeIP, netip.MustParseAddr("192.0.2.7")},
	{"the addresses of servers", "none", nil, servers, "0.0.0.0:10256 127.0.0.1:10249"},
	{"the addresses of servers from a file", "healthzBindAddress: '[::1]:1'\nmetricsBindAddress: 192.0.2.1", nil, servers, "[::1]:1 192.0.2.1:10249"},
	{"no health checks", "none", []string{"--healthz-port=0"}, servers, "invalid AddrPort 127.0.0.1:10249"},
	{"a hard fail", "bindAddressHardFail: true", nil, func(c agent.Config) any { return c.BindAddressHardFail }, true},
	{"a hard fail by a flag", "none", []string{"--bind-address-hard-fail"}, func(c agent.Config) any { return c.BindAddressHardFail }, true},
	{"profiling", "enableProfiling: true", nil, func(c agent.Config) any { return c.Profiling }, true},
	{"profiling by a flag", "none", []string{"--profiling"}, func(c agent.Config) any { return c.Profiling }, true},
	{"kube-proxy's periods", "none", nil, periods, "30s 15m0s"},
	{"the periods of the mode", "mode: ipvs\niptables: {syncPeriod: 1m}\nipvs: {syncPeriod: 2m}\nconfigSyncPeriod: 3m", nil, periods, "2m0s 3m0s"},
	{"the periods of flags", "none", []string{"--iptables-sync-period=1m", "--config-sync-period=2m"}, periods, "1m0s 2m0s"},
	{"kube-proxy's timeouts", "none", nil, timeouts, flow.Timeouts{Established: 24 * time.Hour, Closing: time.Hour}},
	{"the timeouts of a file", "conntrack: {tcpEstablishedTimeout: 1s, tcpCloseWaitTimeout: 2s, udpTimeout: 3s, udpStreamTimeout: 4s}", nil, timeouts,
		flow.Timeouts{Established: time.Second, Closing: 2 * time.Second, UDPUnanswered: 3 * time.Second, UDPAnswered: 4 * time.Second}},
	{"the timeouts of flags", "none", []string{"--conntrack-tcp-timeout-established=1s", "--conntrack-tcp-timeout-close-wait=2s", "--conntrack-udp-timeout=3s", "--conntrack-udp-timeout-stream=4s"}, timeouts,
		flow.Timeouts{Established: time.Second, Closing: 2 * time.Second, UDPUnanswered: 3 * time.Second, UDPAnswered: 4 * time.Second}},
	{"UDP's timeout also at sockets", "conntrack: {udpStreamTimeout: 4s}", nil, func(c agent.Config) any { return c.Datapath.UDPIdle }, 4 * time.Second},
	{"room for flows", "none", []string{"--flow-table-memory=64Mi"}, flowsRoom, true},
	{"room for flows by default", "conntrack: {maxPerCore: 1, min: 1}", nil, flowsRoom, false},
	{"node ports at loopback", "none", nil, localhost, "true true"},
	{"node ports at loopback with a file", "", nil, localhost, "true true"},
	{"node ports at loopback by default in nftables mode", "mode: nftables", nil, localhost, "true true"},
	{"no node ports at loopback", "iptables: {localhostNodePorts: false}", nil, localhost, "false false"},
	{"no node ports at loopback, by a flag", "none", []string{"--iptables-localhost-nodeports=false"}, localhost, "false false"},
	{"no node ports at loopback if they are only at primary addresses", "mode: nftables\nnodePortAddresses: [primary]", nil, localhost, "false false"},
	{"no node ports at loopback so, by a flag", "none", []string{"--nodeport-addresses=primary"}, localhost, "false false"},
	{"no node ports at loopback outside of the ranges", "nodePortAddresses: [10.0.0.0/8, 'fd00::/8']", nil, localhost, "false false"},
	{"node ports at loopback by name", "mode: nftables\nnodePortAddresses: [primary, localhost]", nil, localhost, "true true"},
	{"node ports at loopback, by a flag", "none", []string{"--nodeport-addresses=primary,localhost"}, localhost, "true true"},
	{"node ports at loopback with all addresses", "nodePortAddresses: [all]", nil, localhost, "true true"},
	{"node ports at loopback of one family", "nodePortAddresses: [127.0.0.0/8, 'fd00::/8']", nil, localhost, "true false"},
	{"no node ports at loopback where they are switched off", "nodePortAddresses: [localhost]\niptables: {localhostNodePorts: false}", nil, localhost, "false false"},
	{"node ports at primary addresses", "none", nil, nodePortRanges, "[]"},
	{"node ports at all addresses", "", nil, nodePortRanges, "[0.0.0.0/0 ::/0]"},
	{"node ports at all addresses in IPVS mode", "mode: ipvs", nil, nodePortRanges, "[0.0.0.0/0 ::/0]"},
	{"node ports at primary addresses in nftables mode", "mode: nftables", nil, nodePortRanges, "[]"},
	{"node ports at primary addresses and others", "nodePortAddresses: [primary, 10.0.0.0/8, localhost]", nil, func(c agent.Config) any { return c.NodePortAddresses }, "{[10.0.0.0/8 127.0.0.0/8 ::1/128] true}"},
	{"node ports at some addresses", "nodePortAddresses: [10.0.0.0/8]", nil, nodePortRanges, "[10.0.0.0/8]"},
	{"the node's name", "hostnameOverride: ' File '", nil, func(c agent.Config) any { return c.NodeName }, "file"},
	{"the automatic way of forwarding", "", nil, func(c agent.Config) any { return c.ThroughStack }, false},
	{"forwarding through the stack", "", []string{"--forwarding=stack"}, func(c agent.Config) any { return c.ThroughStack }, true},
	{"the number of backends with metrics", "", []string{"--backend-metrics=7"}, func(c agent.Config) any { return c.BackendMetrics }, 7},
	{"the size of tables by hash", "", []string{"--hash-table-size=1021"}, func(c agent.Config) any { return c.HashTableSize }, 1021},
	{"large tables by hash", "", nil, func(c agent.Config) any { return c.HashTableSize }, 16381},
	{"a seed of hashes", "", []string{"--hash-seed=not for clients"}, func(c agent.Config) any { return c.Datapath.HashSeed }, 0x36fc08f8},
	{"no seed of hashes", "", nil, func(c agent.Config) any { return c.Datapath.HashSeed }, 0},
	{"handshakes measured", "", nil, func(c agent.Config) any { return c.Datapath.Handshakes }, true},
	{"no handshakes measured", "", []string{"--handshake-metrics=false"}, func(c agent.Config) any { return c.Datapath.Handshakes }, false},
	{"the number of Services with metrics", "", []string{"--service-metrics=7"}, func(c agent.Config) any { return c.ServiceMetrics }, 7},
	{"a thousand Services with metrics", "", nil, func(c agent.Config) any { return c.ServiceMetrics }, 1000},
	{"quick to fail", "", []string{"--fail-fast"}, func(c agent.Config) any { return c.FailFast }, true},
	{"retries", "", nil, func(c agent.Config) any { return c.FailFast }, false},
}

func TestAgentConfig(t *testing.T) {
	for _, test := range configs {
		t.Run("it has "+test.name, func(t *testing.T) {
			got := test.got(mustConfig(t, test.fields, test.args...))
			if diff := cmp.Diff(fmt.Sprint(test.want), fmt.Sprint(got)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func mark(c agent.Config) any              { return c.Datapath.Mark }
func algorithm(c agent.Config) any         { return c.Algorithm }
func healing(c agent.Config) any           { return c.Healing }
func podOptOut(c agent.Config) any         { return c.PodOptOut }
func ignoreExternalIPs(c agent.Config) any { return c.IgnoreExternalIPs }
func nodeIP(c agent.Config) any            { return c.NodeIP }
func servers(c agent.Config) any           { return fmt.Sprint(c.HealthzAddress, " ", c.MetricsAddress) }
func periods(c agent.Config) any           { return fmt.Sprint(c.SyncPeriod, " ", c.DriftInterval) }
func timeouts(c agent.Config) any          { return c.FlowTimeouts }
func localhost(c agent.Config) any {
	return fmt.Sprint(!c.Datapath.NoLocalhostNodePortsV4, " ", !c.Datapath.NoLocalhostNodePortsV6)
}
func flowsRoom(c agent.Config) any      { return c.Datapath.Capacities[maps.NameFlows] > 100_000 }
func nodePortRanges(c agent.Config) any { return c.NodePortAddresses.Prefixes }

// Pods are distinguished by the device that they come by, both without settings and in
// kube-proxy's default mode without a range; else as the mode demands.
func TestLocalDetector(t *testing.T) {
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	for _, test := range []struct {
		fields string
		args   string
		want   node.LocalDetector
	}{
		{"none", "", node.LocalDetector{}},
		{"none", "--cluster-cidr=10.0.0.0/8,fd00::/8", node.LocalDetector{Mode: node.LocalClusterCIDR, ClusterCIDRs: cidrs}},
		{"none", "--detect-local-mode=ClusterCIDR", node.LocalDetector{}},
		{"none", "--detect-local-mode=NodeCIDR", node.LocalDetector{Mode: node.LocalNodeCIDR}},
		{"", "", node.LocalDetector{}},
		{"detectLocalMode: ClusterCIDR", "", node.LocalDetector{}},
		{"clusterCIDR: 10.0.0.0/8,fd00::/8", "", node.LocalDetector{Mode: node.LocalClusterCIDR, ClusterCIDRs: cidrs}},
		{"clusterCIDR: 10.0.0.0/8\ndetectLocalMode: NodeCIDR", "", node.LocalDetector{Mode: node.LocalNodeCIDR}},
		{"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}", "", node.LocalDetector{Mode: node.LocalBridgeInterface, BridgeInterface: "cni0"}},
		{"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}", "", node.LocalDetector{Mode: node.LocalInterfaceNamePrefix, InterfaceNamePrefix: "veth"}},
	} {
		var args []string
		if test.args != "" {
			args = append(args, test.args)
		}
		got := mustConfig(t, test.fields, args...).Local
		if diff := cmp.Diff(test.want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("%q %s (-want +got):\n%s", test.fields, test.args, diff)
		}
	}
}

// /configz shows the configuration in force, from the file and the flags that take precedence.
func TestConfigz(t *testing.T) {
	cfg := mustConfig(t, "mode: nftables\nhostnameOverride: file", "--hostname-override=flag", "-v=3")
	shown, ok := cfg.Configz.(*config.KubeProxy)
	if !ok {
		t.Fatalf("Configz is a %T", cfg.Configz)
	}
	if shown.Kind != "KubeProxyConfiguration" || shown.APIVersion != "kubeproxy.config.k8s.io/v1alpha1" ||
		shown.HostnameOverride != "flag" || shown.Mode != config.ModeNFTables || shown.Logging.Verbosity != 3 ||
		shown.NFTables.SyncPeriod.Duration != 30*time.Second || shown.IPTables.SyncPeriod.Duration != 0 {
		t.Errorf("it shows %+v", shown)
	}
}

// Values out of range are refused, and flags that exclude each other, as the API
// server and a folder of manifests do.
func TestAgentConfigRefuses(t *testing.T) {
	for _, test := range []struct {
		fields, arg, want string
	}{
		{"none", "--kubeconfig=/x", "--manifests: clientConnection.kubeconfig (--kubeconfig) is given too"},
		{"clientConnection: {kubeconfig: /x}", "-v=0", "--manifests: clientConnection.kubeconfig (--kubeconfig) is given too"},
		{"", "--master=https://192.0.2.1", "--manifests: --master is given too"},
		{"", "--service-metrics=-1", "--service-metrics: it must not be negative"},
		{"hostnameOverride: ' '", "-v=0", `hostnameOverride " ": it is blank`},
		{"", "--algorithm=best", `--algorithm: "best" is none of`},
		{"", "--heal=never", `--heal: "never" is none of`},
		{"", "--udp=connected", `--udp: "connected": it is all or off`},
		{"", "--forwarding=some", `--forwarding "some": it is auto or stack`},
		{"", "--flow-table-memory=1", "--flow-table-memory "},
	} {
		if _, err := toConfig(t, test.fields, test.arg); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%q %s: error is %v, want %s", test.fields, test.arg, err, test.want)
		}
	}
}

// By default, flow tables have room for as many connections as kube-proxy would let conntrack
// hold, and no more than the machine's share.
func TestDefaultFlowMemory(t *testing.T) {
	const mi, gi = 1 << 20, 1 << 30
	for _, test := range []struct {
		name        string
		connections int
		machine     uint64
		limit       uint64
		from, to    uint64
	}{
		{"kube-proxy's least", 131072, 16 * gi, 0, 64 * mi, 80 * mi},
		{"kube-proxy's most", 1 << 20, 256 * gi, 0, 512 * mi, 640 * mi},
		{"none configured", 0, 16 * gi, 0, 64 * mi, 80 * mi},
		{"few", 1000, 16 * gi, 0, mi, 2 * mi},
		{"more than the machine can spare", 1 << 20, 16 * gi, 0, 128 * mi, 128 * mi},
		{"a small machine", 131072, gi, 0, 16 * mi, 16 * mi},
		{"a limit of the cgroup", 131072, 16 * gi, 128 * mi, 32 * mi, 32 * mi},
		{"a small limit", 131072, 16 * gi, 32 * mi, 16 * mi, 16 * mi},
		{"a large limit", 131072, 16 * gi, 16 * gi, 64 * mi, 80 * mi},
	} {
		t.Run(test.name, func(t *testing.T) {
			if have := defaultFlowMemory(test.connections, test.machine, test.limit); have < test.from || have > test.to {
				t.Errorf("%d MiB, want %d to %d", have/mi, test.from/mi, test.to/mi)
			}
		})
	}
}

// The maps for Services have as much room as the machine's memory allows, unless the agent's cgroup has much less.
func TestRoomForServices(t *testing.T) {
	const mi, gi = 1 << 20, 1 << 30
	for _, test := range []struct {
		name             string
		machine, limit   uint64
		frontends, addrs uint32
	}{
		{"a small machine", 2 * gi, 0, 1 << 19, 1 << 17},
		{"4 GiB, less what the kernel has", 3900 * mi, 0, 1 << 20, 1 << 18},
		{"8 GiB, less what the kernel has", 7700 * mi, 0, 1 << 21, 1 << 19},
		{"a large machine", 256 * gi, 0, 1 << 21, 1 << 19},
		{"a limit of the cgroup", 16 * gi, gi, 1 << 20, 1 << 18},
		{"a small limit", 16 * gi, 256 * mi, 1 << 19, 1 << 17},
	} {
		t.Run(test.name, func(t *testing.T) {
			room := maps.LeastCapacities(memoryForServices(test.machine, test.limit))
			if have := room[maps.NameFrontendIDs]; have != test.frontends {
				t.Errorf("room for %d frontends, want %d", have, test.frontends)
			}
			if have := room[maps.NameAddrs]; have != test.addrs {
				t.Errorf("room for %d addresses, want %d", have, test.addrs)
			}
		})
	}
}
