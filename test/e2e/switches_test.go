package e2e

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/compat"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// noWay has the flags, and the fields of a configuration without a flag of the same meaning, that take no way of a packet
// away, by the reason. Those without any effect are not among them: docs/kube-proxy.md calls them meaningless.
var noWay = map[string]string{
	"another act than to run the agent":                      "--cleanup --dry-run --help --init-only --output --version --write-config-to",
	"where the configuration is, whose fields count":         "--config",
	"how the agent's process runs and ends":                  "--oom-score-adj --fail-fast --bind-address-hard-fail",
	"what it logs":                                           "--v --vmodule --logging-format --log-text-split-stream --log-json-split-stream",
	"where Services are read from":                           "--kubeconfig --master --manifests --kube-api-qps --kube-api-burst --kube-api-content-type clientConnection.acceptContentTypes",
	"what it serves to operators":                            "--healthz-bind-address --healthz-port --metrics-bind-address --metrics-port --profiling --socket",
	"how long a change may take, and when maps are compared": "--iptables-sync-period --ipvs-sync-period --config-sync-period nftables.syncPeriod",
	"how many flows there may be: one that has no room is refused and counted, see TestFlood of test/devices": "--flow-table-memory --conntrack-max-per-core --conntrack-min",
	"how long idle flows are kept":                                                    "--conntrack-tcp-timeout-established --conntrack-tcp-timeout-close-wait --conntrack-udp-timeout --conntrack-udp-timeout-stream",
	"conntrack of the kernel alone":                                                   "--conntrack-tcp-be-liberal",
	"a name that no Node has is a problem of status, see TestNodeThatIsNotKnown":      "--hostname-override",
	"what is pinned; programs of another root are taken over, see TestAnotherBPFRoot": "--bpf-root",
	"every row has one: the client stray is outside of it":                            "--cgroup-root",
}

// sameAsFlag are the fields of a configuration that mean what a flag means.
const sameAsFlag = `
	featureGates=--feature-gates clientConnection.kubeconfig=--kubeconfig clientConnection.contentType=--kube-api-content-type
	clientConnection.qps=--kube-api-qps clientConnection.burst=--kube-api-burst logging.format=--logging-format logging.verbosity=--v
	logging.vmodule=--vmodule logging.options.text.splitStream=--log-text-split-stream
	logging.options.json.splitStream=--log-json-split-stream hostnameOverride=--hostname-override bindAddress=--bind-address
	healthzBindAddress=--healthz-bind-address metricsBindAddress=--metrics-bind-address bindAddressHardFail=--bind-address-hard-fail
	enableProfiling=--profiling mode=--proxy-mode iptables.masqueradeAll=--masquerade-all nftables.masqueradeAll=--masquerade-all
	iptables.localhostNodePorts=--iptables-localhost-nodeports iptables.syncPeriod=--iptables-sync-period
	ipvs.syncPeriod=--ipvs-sync-period ipvs.scheduler=--ipvs-scheduler detectLocalMode=--detect-local-mode
	detectLocal.bridgeInterface=--pod-bridge-interface detectLocal.interfaceNamePrefix=--pod-interface-name-prefix
	clusterCIDR=--cluster-cidr nodePortAddresses=--nodeport-addresses oomScoreAdj=--oom-score-adj
	conntrack.maxPerCore=--conntrack-max-per-core conntrack.min=--conntrack-min
	conntrack.tcpEstablishedTimeout=--conntrack-tcp-timeout-established conntrack.tcpCloseWaitTimeout=--conntrack-tcp-timeout-close-wait
	conntrack.tcpBeLiberal=--conntrack-tcp-be-liberal conntrack.udpTimeout=--conntrack-udp-timeout
	conntrack.udpStreamTimeout=--conntrack-udp-timeout-stream configSyncPeriod=--config-sync-period`

// Each flag, each value that it may have if these are words, and each field of a configuration is played by
// [TestEachSwitchLeavesAWay], or takes no way of a packet away.
func TestEverySwitchHasARow(t *testing.T) {
	sections, err := compat.Read("../compat")
	lab.Must(t, err)
	binary := sluice.MustBinary(t)
	fields := make(map[string]string)
	for _, pair := range strings.Fields(sameAsFlag) {
		field, flag, _ := strings.Cut(pair, "=")
		fields[field] = flag
	}
	s := switches{values: valuesInRows(), exempt: make(map[string]string)}
	for reason, names := range noWay {
		for name := range strings.FieldsSeq(names) {
			s.exempt[name] = reason
		}
	}
	var names []string
	for _, section := range sections {
		if section.File != "flags.yaml" && section.File != "fields.yaml" {
			continue
		}
		for _, row := range section.Rows {
			names = append(names, row.Name)
			if row.State == compat.Meaningless {
				continue
			}
			name := row.Name
			if flag, ok := fields[name]; ok {
				name = flag
			}
			if problem := s.check(name, wordsOf(t, binary, row)); problem != "" {
				t.Errorf("%s: %s", row.Name, problem)
			}
		}
	}
	for _, line := range complete(t, binary, "--") { // also the flags of all verbs
		name, _, _ := strings.Cut(line, "\t")
		names = append(names, name)
		if problem := s.check(name, nil); problem != "" && !isMeaningless(sections, name) {
			t.Errorf("%s: %s", name, problem)
		}
	}
	for _, listed := range []map[string]string{s.exempt, fields} {
		for name := range listed {
			if !slices.Contains(names, name) {
				t.Errorf("%s: there is no such flag or field", name)
			}
		}
	}
}

// switches knows which values of flags have rows, and which flags need none.
type switches struct {
	values map[string][]string
	exempt map[string]string
}

// check returns what is wrong about a flag or field that may have these words as its value; nil: any value.
func (s switches) check(name string, words []string) string {
	values, has := s.values[name]
	reason, exempt := s.exempt[name]
	switch {
	case has && exempt:
		return fmt.Sprintf("it has a row, and needs none: %s", reason)
	case exempt:
		return ""
	case !has:
		return "no row plays it, and there is no reason why it takes no way away"
	}
	for _, word := range words {
		if !slices.Contains(values, word) {
			return fmt.Sprintf("no row has the value %s", word)
		}
	}

	return ""
}

// valuesInRows returns the values that flags have in rows, of a list each element.
func valuesInRows() map[string][]string {
	values := make(map[string][]string)
	for _, row := range switchRows {
		for flag := range strings.FieldsSeq(row.flags) {
			name, value, ok := strings.Cut(flag, "=")
			if !ok {
				value = "true"
			}
			values[name] = append(values[name], strings.Split(value, ",")...)
		}
	}

	return values
}

// wordsOf returns the words that a flag takes, or nil.
func wordsOf(t *testing.T, binary string, row compat.Row) []string {
	t.Helper()
	if row.Default == "true" || row.Default == "false" {
		return []string{"true", "false"}
	}
	if !strings.HasPrefix(row.Name, "--") {
		return nil // its flag has them
	}

	return complete(t, binary, row.Name, "")
}

// complete returns what shells offer behind the verb agent and words.
func complete(t *testing.T, binary string, words ...string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary, append([]string{"__complete", "agent"}, words...)...).Output()
	lab.Must(t, err)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")

	return slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, ":") })
}

func isMeaningless(sections []compat.Section, name string) bool {
	return slices.ContainsFunc(sections, func(s compat.Section) bool {
		return slices.ContainsFunc(s.Rows, func(r compat.Row) bool { return r.Name == name && r.State == compat.Meaningless })
	})
}
