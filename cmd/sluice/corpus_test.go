package main

import (
	"cmp"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"golang.org/x/tools/txtar"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/test/lab"
)

var update = flag.Bool("update", false, "rewrite what the files of testdata/configurations want")

// Each file of testdata/configurations has how kube-proxy is configured somewhere, and what Sluice makes of that:
//
//	flags         the command line, as it is there
//	config.yaml   the file of --config, if there is one
//	node          the node, as in defaultNode, if that has another name or network
//	sluice        refusals, the log, what is in force, and what an agent on that node misses
//
// Its comment says where the form comes from. A kubeconfig or --master is left out: objects come from the test.
func TestConfigurationsOfClusters(t *testing.T) {
	const defaultNode = "node-1 10.244.1.0/24 cni0 veth1"
	files, err := filepath.Glob("testdata/configurations/*.txtar")
	lab.Must(t, err)
	if len(files) < 35 {
		t.Errorf("there are %d configurations, want at least 35", len(files))
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			file, err := txtar.ParseFile(path)
			lab.Must(t, err)
			if len(strings.TrimSpace(string(file.Comment))) < 20 {
				t.Error("its comment does not say where the form comes from")
			}
			nodeText := string(part(file, "node"))
			if nodeText == "" {
				nodeText = defaultNode
			}
			var name, pods, bridge, veth string
			if _, err := fmt.Sscan(nodeText, &name, &pods, &bridge, &veth); err != nil {
				t.Fatalf("node: %v", err)
			}
			state, object := absentNode()
			object.Name, object.PodCIDRs = name, []netip.Prefix{netip.MustParsePrefix(pods)}
			state.Addresses[len(state.Addresses)-1].Addr = object.PodCIDRs[0].Addr().Next()
			state.Devices[2].Name, state.Devices[3].Name = bridge, veth
			if bridge == "-" {
				state.Devices, state.Devices[3].Master = append(state.Devices[:2:2], state.Devices[3]), 0
			}
			got := madeOf(t, file, name, state, object)
			if *update {
				setPart(file, "sluice", got)
				mustWrite(t, path, txtar.Format(file))
			} else if diff := gocmp.Diff(string(part(file, "sluice")), got); diff != "" {
				t.Errorf("what Sluice makes of it (-want +got):\n%s", diff)
			}
		})
	}
}

// kubeconfigField is how a configuration names its API server.
var kubeconfigField = regexp.MustCompile(`kubeconfig: *[^,}\s]+`)

// madeOf returns what Sluice makes of a configuration.
func madeOf(t *testing.T, file *txtar.Archive, name string, state node.State, object kube.Node) string {
	t.Helper()
	var out strings.Builder
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags := newAgentFlags(set)
	var args []string
	for _, arg := range strings.Fields(string(part(file, "flags"))) {
		switch {
		case strings.HasPrefix(arg, "--config="):
			path := filepath.Join(t.TempDir(), "config")
			mustWrite(t, path, kubeconfigField.ReplaceAll(part(file, "config.yaml"), []byte(`kubeconfig: ""`)))
			args = append(args, "--config="+path)
		case strings.HasPrefix(arg, "--kubeconfig="), strings.HasPrefix(arg, "--master="):
		default:
			args = append(args, strings.Trim(arg, `"'`))
		}
	}
	refused := func(err error) string {
		for _, arg := range args { // of this run
			if path, is := strings.CutPrefix(arg, "--config="); is {
				err = fmt.Errorf("%s", strings.ReplaceAll(err.Error(), path, "config.yaml"))
			}
		}

		return fmt.Sprintf("refused: %v\n", err)
	}
	if err := set.Parse(args); err != nil {
		return refused(err)
	}
	if !set.Changed("hostname-override") {
		lab.Must(t, set.Set("hostname-override", name)) // the name of the machine
	}
	s, err := flags.resolve()
	if err != nil {
		return refused(err)
	}
	var log lab.Log
	s.report(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}

		return a
	}})))
	out.WriteString(log.String())
	flags.dryRun, flags.wanted.Manifests = true, t.TempDir()
	cfg, err := flags.agentConfig(&places{}, s, slog.New(slog.DiscardHandler))
	if err != nil {
		return refused(err)
	}
	fmt.Fprintf(&out, "node %s, pods by %s", cfg.NodeName, cmp.Or(string(cfg.Local.Mode), "their devices"))
	for _, text := range []string{cfg.Local.BridgeInterface, cfg.Local.InterfaceNamePrefix, s.kubeProxy.ClusterCIDR} {
		if text != "" {
			fmt.Fprintf(&out, " (%s)", text)
		}
	}
	fmt.Fprintf(&out, "\nnode ports at %v, primary %v; masquerades all %v, external IPs %v\n",
		cfg.NodePortAddresses.Prefixes, cfg.NodePortAddresses.NeedPrimary(), cfg.MasqueradeAll, !cfg.IgnoreExternalIPs)
	fmt.Fprintf(&out, "algorithm %s, health checks at %v, metrics at %v, period %v\n", cfg.Algorithm, cfg.HealthzAddress, cfg.MetricsAddress, cfg.SyncPeriod)
	for _, trouble := range newAbsence(t, cfg, state, object).troubles() {
		fmt.Fprintln(&out, "missed: "+trouble)
	}

	return out.String()
}

// setPart replaces a part of a file, or adds it.
func setPart(file *txtar.Archive, name, text string) {
	for i := range file.Files {
		if file.Files[i].Name == name {
			file.Files[i].Data = []byte(text)

			return
		}
	}
	file.Files = append(file.Files, txtar.File{Name: name, Data: []byte(text)})
}
