package main

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/sluice-lb/sluice/pkg/config"
)

const fileHeader = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// parse parses flags of `sluice agent`. A file with these fields is given as
// --config, unless file is "none".
func parse(t *testing.T, fields string, args ...string) *agentFlags {
	t.Helper()
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags := newAgentFlags(set)
	if fields != "none" {
		path := filepath.Join(t.TempDir(), "config.yaml")
		mustWrite(t, path, []byte(fileHeader+fields))
		args = append(args, "--config", path)
	}
	if err := set.Parse(args); err != nil {
		t.Fatal(err)
	}

	return flags
}

func mustResolve(t *testing.T, flags *agentFlags) *settings {
	t.Helper()
	s, err := flags.resolve()
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// written_test.go compares the result of a file and flags with kube-proxy's. These
// are the fields that --write-config-to does not show.
func TestResolve(t *testing.T) {
	for _, test := range []struct {
		name   string
		fields string
		args   string
		got    func(*config.KubeProxy) string
		want   string
	}{
		{"the port of an address", "none", "--healthz-bind-address=192.0.2.1 --healthz-port=7", healthz, "192.0.2.1:7"},
		{"the usual port of an address", "none", "--healthz-bind-address=192.0.2.1", healthz, "192.0.2.1:10256"},
		{"no port if there is one", "none", "--healthz-bind-address=192.0.2.1:8 --healthz-port=7", healthz, "192.0.2.1:8"},
		{"no health checks at port 0", "none", "--healthz-port=0", healthz, ""},
		{"health checks at port 0 beside a file", "", "--healthz-port=0", healthz, "0.0.0.0:10256"},
		{"the port of metrics", "none", "--metrics-bind-address=::1 --metrics-port=7", metrics, "[::1]:7"},
		{"node ports at the primary addresses by default", "none", "", nodePorts, "[primary]"},
		{"node ports everywhere with a mode", "none", "--proxy-mode=iptables", nodePorts, "[]"},
		{"node ports everywhere with an empty mode", "none", "--proxy-mode=", nodePorts, "[]"},
		{"node ports everywhere with a file", "", "", nodePorts, "[]"},
		{"node ports at the primary addresses in nftables mode", "mode: nftables", "", nodePorts, "[primary]"},
		{"node ports at a flag's addresses, without a mode", "none", "--nodeport-addresses=10.0.0.0/8", nodePorts, "[10.0.0.0/8]"},
		{"a name without blanks in lower case", "none", "--hostname-override= Node-1 ", name, "node-1"},
		{"the flag's name before the file's", "hostnameOverride: file", "--hostname-override=Flag", name, "flag"},
		{"the file's name", "hostnameOverride: ' File '", "", name, " File "},
		{"a file's split streams", "featureGates: {LoggingAlphaOptions: true}\nlogging: {options: {text: {splitStream: true}}}", "-v=1", split, "true"},
		{"a flag's split streams beside a file", "featureGates: {LoggingAlphaOptions: true}", "--log-text-split-stream", split, "true"},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			args := strings.Split(test.args, " --")
			for i := range args {
				if i > 0 {
					args[i] = "--" + args[i]
				}
			}
			args = slices.DeleteFunc(args, func(arg string) bool { return arg == "" })
			s := mustResolve(t, parse(t, test.fields, args...))
			if got := test.got(s.kubeProxy); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

func healthz(cfg *config.KubeProxy) string { return cfg.HealthzBindAddress }
func metrics(cfg *config.KubeProxy) string { return cfg.MetricsBindAddress }
func name(cfg *config.KubeProxy) string    { return cfg.HostnameOverride }
func nodePorts(cfg *config.KubeProxy) string {
	return "[" + strings.Join(cfg.NodePortAddresses, " ") + "]"
}

func split(cfg *config.KubeProxy) string {
	if cfg.Logging.Options.Text.SplitStream {
		return "true"
	}

	return "false"
}

func TestResolveRefuses(t *testing.T) {
	for _, test := range []struct{ name, fields, args, want string }{
		{"metrics at port 0", "none", "--metrics-port=0", `kubeproxyconfig.metricsBindAddress: Invalid value: "": must be IP:port`},
		{"a blank name", "none", "--hostname-override= ", `--hostname-override " ": it is blank`},
		{"a blank name beside a file", "hostnameOverride: file", "--hostname-override= ", `--hostname-override " ": it is blank`},
		{"a flag's value that is wrong", "none", "--proxy-mode=userspace", "kubeproxyconfig.mode: "},
		{"a file's value that is wrong", "mode: userspace", "", "kubeproxyconfig.mode: "},
		{"a gate that is locked", "none", "--feature-gates=MultiCIDRServiceAllocator=false", "kubeproxyconfig.featureGates[MultiCIDRServiceAllocator]: "},
		{"logging that a file's gates do not allow", "", "--log-text-split-stream", "kubeproxyconfig.logging.options.text.splitStream: "},
	} {
		t.Run(test.name, func(t *testing.T) {
			var args []string
			if test.args != "" {
				args = []string{test.args}
			}
			_, err := parse(t, test.fields, args...).resolve()
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %s", err, test.want)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, arg := range []string{
		"--bind-address=node-1", "--healthz-bind-address=localhost:1", "--metrics-bind-address=192.0.2.1:http",
		"--feature-gates=NoSuch", "--version=v1.2.3", "--oom-score-adj=much",
	} {
		set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		newAgentFlags(set)
		if err := set.Parse([]string{arg}); err == nil {
			t.Errorf("%s is accepted", arg)
		}
	}
}

// Flags that are ignored because there is a file are listed, and no others.
func TestIgnoredFlags(t *testing.T) {
	theirs := []string{"--proxy-mode=nftables", "--healthz-port=0", "--feature-gates=A=true", "--boot-id-file=x"}
	used := []string{
		"--hostname-override=a", "--master=x", "-v=2", "--vmodule=a=1", "--logging-format=text", "--log-flush-frequency=1s",
		"--algorithm=rr", "--devices=eth0", "--fail-fast", "--service-metrics=3", "--manifests=x",
	}
	s := mustResolve(t, parse(t, "", append(theirs, used...)...))
	if want := []string{"--boot-id-file", "--feature-gates", "--healthz-port", "--proxy-mode"}; !slices.Equal(s.ignored, want) {
		t.Errorf("ignored are %q, want %q", s.ignored, want)
	}
	if s := mustResolve(t, parse(t, "none", "--proxy-mode=nftables")); len(s.ignored) > 0 {
		t.Errorf("ignored are %q, without a file", s.ignored)
	}
}

// A field and a gate that Sluice does not know, which may be those of a newer Kubernetes or misspelt
// ones, do not keep the agent from starting. The log and the status name them.
func TestUnknownPartsAreReported(t *testing.T) {
	for _, test := range []struct {
		name   string
		fields string
		args   string
		want   []string
	}{
		{"a gate of a flag", "none", "--feature-gates=NoSuch=true,AllowServiceExternalIPs=false", []string{"featureGates[NoSuch]: Sluice knows no such gate"}},
		{"gates of a file", "featureGates: {B: false, A: true, NodeSwap: true}", "", []string{
			"featureGates[A]: Sluice knows no such gate", "featureGates[B]: Sluice knows no such gate",
		}},
		{"fields", "nft: {turbo: true}\niptables: {turbo: true}", "", []string{`unknown field "iptables.turbo"`, `unknown field "nft"`}},
		{"nothing", "featureGates: {NodeSwap: true}", "", nil},
	} {
		t.Run("it names "+test.name, func(t *testing.T) {
			s := mustResolve(t, parse(t, test.fields, strings.Fields(test.args)...))
			got := s.unknownParts()
			if diff := cmp.Diff(test.want, slices.Sorted(slices.Values(got))); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			var log strings.Builder
			s.report(slog.New(slog.NewTextHandler(&log, nil)))
			for _, name := range s.unknownGates {
				if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), name) {
					t.Errorf("the log does not warn of %s: %s", name, log.String())
				}
			}
			if len(test.want) == 0 && strings.Contains(log.String(), "WARN") {
				t.Errorf("the log warns: %s", log.String())
			}
		})
	}
}

// Flags without an effect are listed, those that set a field by the field's name.
func TestUnusedFlags(t *testing.T) {
	args := []string{"--ipvs-strict-arp", "--iptables-masquerade-bit=3", "--boot-id-file=x", "--machine-id-file=x", "--proxy-mode=ipvs"}
	want := []string{"iptables.masqueradeBit", "ipvs.strictARP", "--boot-id-file", "--machine-id-file"}
	if got := mustResolve(t, parse(t, "none", args...)).unused; !slices.Equal(got, want) {
		t.Errorf("unused are %q, want %q", got, want)
	}
	args = []string{"--ipvs-min-sync-period=1s", "--proxy-mode=ipvs"}
	if got := mustResolve(t, parse(t, "none", args...)).unused; !slices.Equal(got, []string{"ipvs.minSyncPeriod"}) {
		t.Errorf("unused are %q, want ipvs.minSyncPeriod", got)
	}
	if got := mustResolve(t, parse(t, "none")).unused; len(got) > 0 {
		t.Errorf("unused are %q, and nothing is set", got)
	}
}

// A key that is given twice is no unknown field; its last value counts.
func TestKeysGivenTwice(t *testing.T) {
	s := mustResolve(t, parse(t, "oomScoreAdj: 5\noomScoreAdj: 7\nturbo: true"))
	var log bytes.Buffer
	s.report(slog.New(slog.NewTextHandler(&log, nil)))
	for _, line := range strings.Split(log.String(), "\n") {
		isTwice, isUnknown := strings.Contains(line, "given twice"), strings.Contains(line, "does not know")
		if isTwice != strings.Contains(line, "oomScoreAdj") || isUnknown != strings.Contains(line, "turbo") {
			t.Errorf("it logs %s", line)
		}
	}
	if !strings.Contains(log.String(), "given twice") || !strings.Contains(log.String(), "does not know") || *s.kubeProxy.OOMScoreAdj != 7 {
		t.Errorf("oomScoreAdj is %d, and it logs %s", *s.kubeProxy.OOMScoreAdj, &log)
	}
}
