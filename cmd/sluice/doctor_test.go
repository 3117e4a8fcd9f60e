package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/doctor"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestReportOfDoctor(t *testing.T) {
	report := doctor.Report{Problems: 1, Findings: []doctor.Finding{
		{Check: "kernel", State: doctor.OK, Seen: "Linux 6.12"},
		{Check: "node-port-firewall", State: doctor.Problem, Seen: "rules", Remedy: "Change them.", Link: "https://example.net/#it"},
	}}
	var out bytes.Buffer
	lab.Must(t, newOutput().print(&out, nil, func(t *table) { drawReport(t, report) }))
	const want = `ok        kernel              Linux 6.12
problem   node-port-firewall  rules
                              Change them.
                              https://example.net/#it

problems: 1, warnings: 0
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

// A doctor that could not look has an exit code of its own, as have no other verbs.
func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		args string
		code int
		want string
	}{
		{"doctor --none", 2, "unknown flag: --none"},
		{"doctor node-1", 2, "node-1"},
		{"doctor --cleanup", 2, "unknown flag: --cleanup"},
		{"doctor -o xml", 2, "table, json or yaml"},
		{"doctor --devices [", 2, "--devices"},
		{"doctor --flow-table-memory much", 2, "--flow-table-memory"},
		{"doctor --flow-table-memory 1", 2, "--flow-table-memory"},
		{"doctor --config /none", 2, "--config"},
		{"doctor --proxy_mode none", 2, "kubeproxyconfig.mode"},
		{"status --none", 1, "unknown flag: --none"},
	} {
		err := execute(new(bytes.Buffer), strings.Fields(test.args)...)
		if err == nil {
			t.Errorf("%s succeeds", test.args)
			continue
		}
		if code := exitCode(err); code != test.code || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: exit code %d: %v; want %d, %q", test.args, code, err, test.code, test.want)
		}
	}
	if code := exitCode(errSick); code != 1 {
		t.Errorf("exit code of a problem: %d", code)
	}
}

// The doctor looks at what the agent would use, by the same flags and the same file.
func TestConfigOfDoctor(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.conf")
	const text = `
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection:
  kubeconfig: /none/kubeconfig
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: cni0}
hostnameOverride: node-7
bindAddress: 192.0.2.7
nodePortAddresses: [192.0.2.0/24]
`
	lab.Must(t, os.WriteFile(file, []byte(text), 0o600))
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags := newAgentFlags(set)
	args := []string{"--config", file, "--exclude-devices", "docker*", "--device-attach", "clsact", "--forwarding", "stack", "--flow-table-memory", "64Mi"}
	lab.Must(t, set.Parse(args))
	got, err := flags.doctorConfig(&places{bpfRoot: "/pins", socket: "/agent.sock", cgroupRoot: "/cgroup"}, slog.New(slog.DiscardHandler))
	lab.Must(t, err)
	if got.ClientErr == nil || !strings.Contains(got.ClientErr.Error(), "/none/kubeconfig") {
		t.Errorf("the error of the client is %v, want that of the kubeconfig", got.ClientErr)
	}
	if got.Model.Devices.PodBridge != "cni0" {
		t.Errorf("the bridge of pods is %q", got.Model.Devices.PodBridge)
	}
	if len(got.Model.Devices.Never) != 1 || got.Model.Devices.Never[0].String() != "docker*" {
		t.Errorf("excluded devices are %v", got.Model.Devices.Never)
	}
	if limit := uint64(64 << 20); got.FlowMemory > limit || got.FlowMemory < limit*9/10 {
		t.Errorf("the flow tables take %d bytes, want almost 64Mi", got.FlowMemory)
	}
	if got.Model.NodeName != "node-7" || got.Model.NodeIP.String() != "192.0.2.7" || len(got.Model.NodePortAddresses.Prefixes) != 1 || got.Model.Local.BridgeInterface != "cni0" {
		t.Errorf("of the node it knows %+v", got.Model)
	}
	got.ClientErr, got.Model, got.FlowMemory = nil, node.ModelConfig{}, 0
	want := doctor.Config{
		CgroupRoot: "/cgroup", BPFRoot: "/pins", Socket: "/agent.sock",
		Attachment: datapath.Clsact, ThroughStack: true,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the configuration is %+v, want %+v", got, want)
	}
}
