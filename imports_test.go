package sluice_test

import (
	"go/build"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const underAgent = "pkg/kube pkg/node pkg/reconcile pkg/datapath pkg/flow pkg/health pkg/metrics pkg/lb bpf maps"

// Which of ours a package may import: imports point one way.
var ours = map[string]string{
	"cmd/sluice": "pkg/agent pkg/config " + underAgent, "pkg/agent": underAgent,
	"pkg/config": "pkg/lb", "pkg/kube": "pkg/lb", "pkg/node": "pkg/lb", "pkg/health": "pkg/lb",
	"pkg/reconcile": "pkg/lb pkg/maglev maps", "pkg/datapath": "bpf maps",
	"pkg/flow": "maps", "pkg/metrics": "maps pkg/lb", "bpf": "maps",
}

// Who may import what is not ours. What is not listed, all but pkg/lb may.
var theirs = map[string]string{
	"k8s.io/":                 "cmd/sluice pkg/agent pkg/config pkg/kube",
	"github.com/cilium/ebpf":  "bpf maps pkg/datapath pkg/flow",
	"github.com/vishvananda/": "pkg/datapath pkg/node",
	"github.com/prometheus/":  "pkg/agent pkg/metrics",
}

// Tests may import everything, and so may what lies in test/ and bench/.
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
		return slices.Contains(strings.Fields(ours[folder]), own)
	}
	for prefix, who := range theirs {
		if strings.HasPrefix(path, prefix) {
			return slices.Contains(strings.Fields(who), folder)
		}
	}

	return folder != "pkg/lb" || !strings.Contains(path, ".")
}
