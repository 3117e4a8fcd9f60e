package config

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// gates are the feature gates that kube-proxy 1.37.2 accepts, which are those of
// all of Kubernetes. Each line has a name, a default, a stage, and "locked" if it
// could not be set to anything else in the oldest version that is supported either.
// A program that links kube-proxy and lists its DefaultMutableFeatureGate printed them.
//
//go:embed gates.txt
var gates string

// AllowServiceExternalIPs is the one gate, beside those of logging, that has an
// effect in Sluice.
const AllowServiceExternalIPs featuregate.Feature = "AllowServiceExternalIPs"

// effective are the gates that change something here.
var effective = []featuregate.Feature{
	AllowServiceExternalIPs, logsapi.LoggingAlphaOptions, logsapi.LoggingBetaOptions, "AllAlpha", "AllBeta",
}

// Gates returns kube-proxy's feature gates with these values. Unknown are those that Sluice
// does not know, sorted, which are ignored: kube-proxy, which is released with its cluster,
// refuses to start with one, but to an agent it may be a gate of a newer Kubernetes, or one that
// an older Kubernetes still has. The error names those whose value cannot be changed.
func Gates(values map[string]bool) (gate featuregate.MutableFeatureGate, unknown []string, err error) {
	gates, err := knownGates()
	if err != nil {
		return nil, nil, err
	}
	all, known := gates.GetAll(), make(map[string]bool, len(values))
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if _, ok := all[featuregate.Feature(name)]; ok {
			known[name] = values[name]
		} else {
			unknown = append(unknown, name)
		}
	}

	// The log of deprecated gates is discarded: they do not concern Sluice.
	return gates, unknown, gates.SetFromMapWithLogger(logr.Discard(), known)
}

// mutableGates are the interfaces of what featuregate.NewFeatureGate returns.
type mutableGates interface {
	featuregate.MutableFeatureGate
	featuregate.MutableFeatureGateWithLogger
}

func knownGates() (mutableGates, error) {
	specs := make(map[featuregate.Feature]featuregate.FeatureSpec)
	for line := range strings.Lines(gates) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			return nil, fmt.Errorf("gates.txt: line %q", line)
		}
		spec := featuregate.FeatureSpec{Default: fields[1] == "true", LockToDefault: slices.Contains(fields, "locked")}
		switch fields[2] {
		case "ALPHA":
			spec.PreRelease = featuregate.Alpha
		case "BETA":
			spec.PreRelease = featuregate.Beta
		case "DEPRECATED":
			spec.PreRelease = featuregate.Deprecated
		}
		specs[featuregate.Feature(fields[0])] = spec
	}
	gate := featuregate.NewFeatureGate()

	return gate, gate.Add(specs)
}
