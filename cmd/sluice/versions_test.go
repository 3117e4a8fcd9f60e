package main

import (
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// An agent starts with the configuration of each version of Kubernetes that is supported, and names what it does not
// know of it. testdata/versions has a file for each: its first lines say where it comes from.
func TestConfigurationsOfVersions(t *testing.T) {
	unknown := map[string][]string{
		"1.34": {"featureGates[LoadBalancerIPMode]: Sluice knows no such gate"},
		"1.35": {"featureGates[AuthorizeWithSelectors]: Sluice knows no such gate"},
		"1.36": {"featureGates[AuthorizeWithSelectors]: Sluice knows no such gate"},
		"1.38": {
			`unknown field "nftables.flowOffload"`, "featureGates[KubeProxyFlowOffload]: Sluice knows no such gate",
		},
	}
	files, err := filepath.Glob("testdata/versions/*.yaml")
	lab.Must(t, err)
	var versions []string
	for _, file := range files {
		version := strings.TrimSuffix(filepath.Base(file), ".yaml")
		versions = append(versions, version)
		t.Run("it starts with that of "+version, func(t *testing.T) {
			flags := parse(t, "none", "--config="+file, "--manifests="+t.TempDir(), "--dry-run", "--hostname-override=node-1")
			s := mustResolve(t, flags)
			s.kubeProxy.ClientConnection.Kubeconfig = "" // manifests exclude it
			cfg, err := flags.agentConfig(&places{}, s, slog.New(slog.DiscardHandler))
			lab.Must(t, err)
			if diff := cmp.Diff(unknown[version], slices.Clone(cfg.Ignored)); diff != "" {
				t.Errorf("what it does not know (-want +got):\n%s", diff)
			}
		})
	}
	if want := []string{"1.34", "1.35", "1.36", "1.37", "1.38"}; !slices.Equal(versions, want) {
		t.Errorf("there are configurations of %v, want %v", versions, want)
	}
}
