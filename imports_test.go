package sluice_test

import (
	"go/build"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const underAgent = "pkg/queue pkg/decision pkg/events pkg/kube pkg/node pkg/reconcile pkg/datapath pkg/flow pkg/health pkg/metrics pkg/lb pkg/maglev bpf maps"

// ownImports lists which packages of this repository a package may import. Imports point one way.
var ownImports = map[string]string{
	"cmd/sluice": "pkg/agent pkg/connections pkg/top pkg/monitor pkg/pods pkg/doctor pkg/explain pkg/remote pkg/ui pkg/kubeproxy pkg/status pkg/config " + underAgent, "pkg/agent": "pkg/status pkg/config " + underAgent,
	"pkg/status":   "pkg/reconcile pkg/datapath pkg/flow pkg/health pkg/metrics pkg/lb maps",
	"pkg/events":   "pkg/kube pkg/status pkg/datapath pkg/lb maps",
	"pkg/decision": "pkg/queue pkg/reconcile pkg/health pkg/lb",
	"pkg/doctor":   "pkg/status pkg/pods pkg/node pkg/datapath pkg/lb bpf maps",
	"pkg/config":   "pkg/lb", "pkg/kube": "pkg/lb", "pkg/node": "pkg/lb pkg/pods bpf maps", "pkg/health": "pkg/lb maps",
	"pkg/reconcile": "pkg/queue pkg/lb pkg/maglev maps", "pkg/datapath": "pkg/node bpf maps",
	"pkg/flow": "maps", "pkg/metrics": "pkg/reconcile pkg/flow pkg/health pkg/lb maps", "bpf": "maps",
	"pkg/kubeproxy": "pkg/status pkg/flow pkg/lb", "pkg/connections": "pkg/datapath pkg/pods maps", "pkg/top": "pkg/datapath pkg/lb maps",
	"pkg/monitor": "pkg/lb pkg/pods maps", "pkg/explain": "pkg/status pkg/pods pkg/reconcile pkg/node pkg/datapath pkg/lb bpf maps", "pkg/ui": "pkg/remote pkg/health pkg/status pkg/flow pkg/top pkg/lb",
}

// importers lists which packages may import what begins with a path. All but pkg/lb may import
// other packages.
var importers = map[string]string{
	"k8s.io/":                 "cmd/sluice pkg/agent pkg/config pkg/kube pkg/metrics pkg/remote",
	"github.com/cilium/ebpf":  "bpf maps pkg/datapath pkg/flow",
	"github.com/vishvananda/": "pkg/datapath pkg/node pkg/kubeproxy",
	"github.com/prometheus/":  "pkg/metrics",
}

// Tests, and what is in test/ and bench/, may import everything.
func TestImports(t *testing.T) {
	for _, pattern := range []string{"bpf", "cmd/*", "maps", "pkg/*"} {
		folders, _ := filepath.Glob(pattern)
		for _, folder := range folders {
			source, err := build.ImportDir(folder, 0)
			if err != nil {
				t.Error(err)
			}
			for _, path := range source.Imports {
				if !mayImport(folder, path) {
					t.Errorf("%s may not import %s:\n%v", folder, path, source.ImportPos[path])
				}
			}
		}
	}
}

func mayImport(folder, path string) bool {
	if own, ok := strings.CutPrefix(path, "github.com/sluice-lb/sluice/"); ok {
		return slices.Contains(strings.Fields(ownImports[folder]), own)
	}
	for prefix, allowed := range importers {
		if strings.HasPrefix(path, prefix) {
			return slices.Contains(strings.Fields(allowed), folder)
		}
	}

	return folder != "pkg/lb" || !strings.Contains(path, ".")
}
