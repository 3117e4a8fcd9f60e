package config

import (
	"flag"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var kubeProxy = flag.String("kube-proxy", "", "the binary of kube-proxy: see that it refuses what is refused here")

// header goes before the fields of a test's file.
const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func mustDecode(t *testing.T, fields string) *KubeProxy {
	t.Helper()
	cfg, _, err := Decode([]byte(header + fields))
	if err != nil {
		t.Fatal(err)
	}
	Complete(cfg)

	return cfg
}

// refused are invalid configurations, and their error. Those that are ours are
// an error to kube-proxy only later, or not at all.
var refused = []struct {
	name, fields string
	want         string
	ours         bool
}{
	{"a negative masquerade bit", "iptables: {masqueradeBit: -1}", "iptables.masqueradeBit: Invalid value: -1: must be from 0 to 31", false},
	{"a masquerade bit over 31", "iptables: {masqueradeBit: 32}", "iptables.masqueradeBit: Invalid value: 32: must be from 0 to 31", false},
	{"that of nftables in its mode", "mode: nftables\nnftables: {masqueradeBit: 32}", "nftables.masqueradeBit: Invalid value: 32: must be from 0 to 31", false},
	{"a mode that there is not", "mode: userspace", `mode: Invalid value: "userspace": must be iptables, ipvs, nftables or empty`, false},
	{"a mode of Windows", "mode: kernelspace", `mode: Invalid value: "kernelspace": must be iptables, ipvs, nftables or empty`, false},
	{"a negative TCP timeout of IPVS", "mode: ipvs\nipvs: {tcpTimeout: -1s}", `ipvs.tcpTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a negative FIN timeout of IPVS", "mode: ipvs\nipvs: {tcpFinTimeout: -1s}", `ipvs.tcpFinTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a negative UDP timeout of IPVS", "mode: ipvs\nipvs: {udpTimeout: -1s}", `ipvs.udpTimeout: Invalid value: "-1s": must not be negative`, false},
	{"something else to exclude than ranges", "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8, 10.0.0.1]}", `ipvs.excludeCIDRs[1]: Invalid value: "10.0.0.1": must be an address range, as 10.0.0.0/8`, false},
	{"a scheduler that no algorithm is like", "mode: ipvs\nipvs: {scheduler: fo}", `ipvs.scheduler: Invalid value: "fo": no algorithm of Sluice is like it; it can be rr, wrr, lc, wlc, twos, sed, nq, sh, dh, lblc, lblcr or mh`, true},
	{"another such, in whichever mode", "ipvs: {scheduler: ovf}", `ipvs.scheduler: Invalid value: "ovf": no algorithm of Sluice is like it; it can be rr, wrr, lc, wlc, twos, sed, nq, sh, dh, lblc, lblcr or mh`, true},
	{"a negative sync period", "iptables: {syncPeriod: -1s, minSyncPeriod: -2s}", `iptables.syncPeriod: Invalid value: "-1s": must be more than 0` + "\n" + `iptables.minSyncPeriod: Invalid value: "-2s": must not be negative`, false},
	{"a least period over the period", "nftables: {syncPeriod: 1s, minSyncPeriod: 2s}\nmode: nftables", `nftables.syncPeriod: Invalid value: "1s": must not be less than kubeproxyconfig.nftables.minSyncPeriod, 2s`, false},
	{"that of IPVS in its mode", "ipvs: {syncPeriod: 1s, minSyncPeriod: 2s}\nmode: ipvs", `ipvs.syncPeriod: Invalid value: "1s": must not be less than kubeproxyconfig.ipvs.minSyncPeriod, 2s`, false},
	{"a negative config sync period", "configSyncPeriod: -1s", `configSyncPeriod: Invalid value: "-1s": must be more than 0`, false},
	{"a negative number of connections", "conntrack: {maxPerCore: -1}", "conntrack.maxPerCore: Invalid value: -1: must not be negative", false},
	{"a negative least number of them", "conntrack: {min: -1}", "conntrack.min: Invalid value: -1: must not be negative", false},
	{"a negative timeout of TCP", "conntrack: {tcpEstablishedTimeout: -1s}", `conntrack.tcpEstablishedTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a negative timeout of closing", "conntrack: {tcpCloseWaitTimeout: -1s}", `conntrack.tcpCloseWaitTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a negative timeout of UDP", "conntrack: {udpTimeout: -1s}", `conntrack.udpTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a negative timeout of answered UDP", "conntrack: {udpStreamTimeout: -1s}", `conntrack.udpStreamTimeout: Invalid value: "-1s": must not be negative`, false},
	{"a bind address that is none", "bindAddress: node-1", `bindAddress: Invalid value: "node-1": must be an IP address`, false},
	{"a health address without a port", "healthzBindAddress: localhost", `healthzBindAddress: Invalid value: "localhost": must be IP:port`, false},
	{"a name as health address", "healthzBindAddress: localhost:1", `healthzBindAddress: Invalid value: "localhost:1": "localhost" is no IP address`, false},
	{"port 0 of the health address", "healthzBindAddress: 0.0.0.0:0", `healthzBindAddress: Invalid value: "0.0.0.0:0": "0" is no port from 1 to 65535`, false},
	{"a port over 65535", "metricsBindAddress: 0.0.0.0:65536", `metricsBindAddress: Invalid value: "0.0.0.0:65536": "65536" is no port from 1 to 65535`, false},
	{"a named port", "metricsBindAddress: 0.0.0.0:http", `metricsBindAddress: Invalid value: "0.0.0.0:http": "http" is no port from 1 to 65535`, false},
	{"one address for two servers", "metricsBindAddress: 0.0.0.0:10256", `metricsBindAddress: Invalid value: "0.0.0.0:10256": kubeproxyconfig.healthzBindAddress is 0.0.0.0:10256: both cannot listen there`, true},
	{"an address among those of another server", `healthzBindAddress: "[::]:9"` + "\nmetricsBindAddress: 127.0.0.1:9", `metricsBindAddress: Invalid value: "127.0.0.1:9": kubeproxyconfig.healthzBindAddress is [::]:9: both cannot listen there`, true},
	{"something else than ranges for node ports", "nodePortAddresses: [10.0.0.0/8, 10.0.0.1]", `nodePortAddresses[1]: Invalid value: "10.0.0.1": must be an address range, as 10.0.0.0/8, or primary, localhost or all`, false},
	{"a word for node ports that there is not", "nodePortAddresses: [primary, Localhost]", `nodePortAddresses[1]: Invalid value: "Localhost": must be an address range, as 10.0.0.0/8, or primary, localhost or all`, false},
	{"a word for node ports twice", "nodePortAddresses: [localhost, 10.0.0.0/8, primary, localhost]", `nodePortAddresses[3]: Duplicate value: "localhost"`, false},
	{"two words twice", "nodePortAddresses: [all, primary, primary, all]", `nodePortAddresses[2]: Duplicate value: "primary"` + "\n" + `nodePortAddresses[3]: Duplicate value: "all"`, false},
	{"a mode of detection that there is not", "detectLocalMode: Guess", `detectLocalMode: Invalid value: "Guess": must be ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix or empty`, false},
	{"no bridge", "detectLocalMode: BridgeInterface", `detectLocal.bridgeInterface: Invalid value: "": kubeproxyconfig.detectLocalMode BridgeInterface needs it`, false},
	{"no prefix", "detectLocalMode: InterfaceNamePrefix", `detectLocal.interfaceNamePrefix: Invalid value: "": kubeproxyconfig.detectLocalMode InterfaceNamePrefix needs it`, false},
	{"something else than cluster CIDRs", "clusterCIDR: 10.0.0.0", `clusterCIDR: Invalid value: "10.0.0.0": "10.0.0.0" must be an address range, as 10.0.0.0/8`, false},
	{"cluster CIDRs with space between them", `clusterCIDR: "10.0.0.0/8, fd00::/8"`, `clusterCIDR: Invalid value: "10.0.0.0/8, fd00::/8": " fd00::/8" must be an address range, as 10.0.0.0/8`, false},
	{"two cluster CIDRs of a family", "clusterCIDR: 10.0.0.0/8,11.0.0.0/8", `clusterCIDR: Invalid value: "10.0.0.0/8,11.0.0.0/8": must be one address range, or one of each family`, false},
	{"three cluster CIDRs", "clusterCIDR: 10.0.0.0/8,fd00::/8,11.0.0.0/8", `clusterCIDR: Invalid value: "10.0.0.0/8,fd00::/8,11.0.0.0/8": must be one address range, or one of each family`, false},
	{"a score under -1000", "oomScoreAdj: -1001", "oomScoreAdj: Invalid value: -1001: must be from -1000 to 1000", false},
	{"a score over 1000", "oomScoreAdj: 1001", "oomScoreAdj: Invalid value: 1001: must be from -1000 to 1000", false},
	{"a negative burst", "clientConnection: {burst: -1}", "clientConnection.burst: Invalid value: -1: must not be negative", false},
	{"what is no version", "showHiddenMetricsForVersion: last", `showHiddenMetricsForVersion: Invalid value: "last": must be a version of Kubernetes, as 1.36`, false},
	{"a feature gate that is locked", "featureGates: {MultiCIDRServiceAllocator: false}", `featureGates[MultiCIDRServiceAllocator]: Invalid value: false: cannot set feature gate MultiCIDRServiceAllocator to false, feature is locked to true`, false},
	{"a format that there is not", "logging: {format: xml}", `logging.format: Invalid value: "xml": Unsupported log format`, false},
	{"a format whose gate is closed", "featureGates: {LoggingBetaOptions: false}\nlogging: {format: json}", "logging.format: Forbidden: Log format json is disabled, see LoggingBetaOptions feature", false},
	{"an option whose gate is closed", "logging: {options: {text: {infoBufferSize: 1Ki}}}", "logging.options.text.infoBufferSize: Forbidden: Feature LoggingAlphaOptions is disabled", false},
	{"vmodule of JSON", "logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}", "logging.vmodule: Forbidden: Only supported for text log format", false},
	{"a negative flush frequency", "logging: {flushFrequency: -1s}", "logging.flushFrequency: Invalid value: ", false},
}

func TestValidateRefuses(t *testing.T) {
	for _, test := range refused {
		t.Run(test.name, func(t *testing.T) {
			err := Validate(mustDecode(t, test.fields))
			if err == nil {
				t.Fatal("no error")
			}
			var lines []string
			for _, line := range strings.Split(test.want, "\n") {
				lines = append(lines, "kubeproxyconfig."+line)
			}
			want := lines[0]
			if len(lines) > 1 {
				want = "[" + strings.Join(lines, ", ") + "]"
			}
			if !strings.HasPrefix(err.Error(), want) {
				t.Errorf("error is\n%s, want\n%s", err, want)
			}
			if *kubeProxy != "" && !test.ours {
				mustRefuse(t, test.fields)
			}
		})
	}
}

// mustRefuse fails the test unless kube-proxy itself refuses the configuration.
func mustRefuse(t *testing.T, fields string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	mustWrite(t, file, header+fields)
	out, err := exec.Command(*kubeProxy, "--config", file, "--write-config-to", file+".out").CombinedOutput()
	if err == nil {
		t.Errorf("kube-proxy accepts it: %s", out)
	}
}

func TestValidateReportsAll(t *testing.T) {
	err := Validate(mustDecode(t, "bindAddress: x\noomScoreAdj: 2000\nconntrack: {min: -1, maxPerCore: -1}\nfeatureGates: {MultiCIDRServiceAllocator: false, NFTablesProxyMode: false}"))
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"kubeproxyconfig.bindAddress:", "kubeproxyconfig.oomScoreAdj:", "kubeproxyconfig.conntrack.min:",
		"kubeproxyconfig.conntrack.maxPerCore:", "featureGates[MultiCIDRServiceAllocator]: Invalid value: false: ", "featureGates[NFTablesProxyMode]: Invalid value: false: ",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not contain %q: %s", want, err)
		}
	}
}

func TestValidateAccepts(t *testing.T) {
	for _, test := range []struct{ name, fields string }{
		{"nothing at all", ""},
		{"the ends of all ranges", "iptables: {masqueradeBit: 31}\noomScoreAdj: -1000\nconntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}"},
		{"equal periods", "iptables: {syncPeriod: 2s, minSyncPeriod: 2s}"},
		{"what is wrong in the section of another mode", "nftables: {masqueradeBit: 99, syncPeriod: -1s}\nipvs: {tcpTimeout: -1s, excludeCIDRs: [x], syncPeriod: -1s}"},
		{"a cluster CIDR that its mode does not need", "detectLocalMode: NodeCIDR\nclusterCIDR: nonsense"},
		{"zeros in front of numbers", "bindAddress: 010.0.0.01\nhealthzBindAddress: 010.0.0.01:1\nnodePortAddresses: [010.0.0.0/8]"},
		{"ranges of both families", "clusterCIDR: fd00::/8,10.0.0.0/8\nnodePortAddresses: [fd00::/8, 10.0.0.0/8]"},
		{"a range for node ports twice", "nodePortAddresses: [10.0.0.0/8, 10.0.0.0/8]"},
		{"all words for node ports, and ranges", "nodePortAddresses: [10.0.0.0/8, primary, localhost, fd00::/8, all]"},
		{"servers at one port of two addresses", "healthzBindAddress: 127.0.0.1:9\nmetricsBindAddress: 127.0.0.2:9"},
		{"servers at one port of two families", `healthzBindAddress: "0.0.0.0:9"` + "\n" + `metricsBindAddress: "[::1]:9"`},
		{"a gate of the kubelet", "featureGates: {NodeSwap: true}"},
		{"all gates of a stage", "featureGates: {AllAlpha: true}\nlogging: {options: {json: {splitStream: true}}}"},
		{"JSON", "logging: {format: json}"},
		{"the section of IPVS without its gate", "mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}"},
		{"a gate of a newer Kubernetes, or a misspelt one", "featureGates: {NoSuch: true}"},
		{"a gate that has been locked since the oldest version that is supported", "featureGates: {JobManagedBy: false}"},
		{"the last version of another kube-proxy", `showHiddenMetricsForVersion: "1.33"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := Validate(mustDecode(t, test.fields)); err != nil {
				t.Error(err)
			}
		})
	}
}
