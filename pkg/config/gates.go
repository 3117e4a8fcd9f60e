package config

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// gates are the feature gates that kube-proxy 1.36.3 accepts: those of all of
// Kubernetes. Each line has a name, a default, a stage, and "locked" if it
// cannot be set to anything else. They were printed by a program that links
// kube-proxy and lists its DefaultMutableFeatureGate.
//
//go:embed gates.txt
var gates string

// AllowServiceExternalIPs is the one gate, beside those of logging, that means
// something to Sluice.
const AllowServiceExternalIPs featuregate.Feature = "AllowServiceExternalIPs"

// meaningful are the gates that change something here.
var meaningful = []featuregate.Feature{
	AllowServiceExternalIPs, logsapi.LoggingAlphaOptions, logsapi.LoggingBetaOptions, "AllAlpha", "AllBeta",
}

// Gates returns kube-proxy's feature gates, set as values says. The error names
// those that kube-proxy does not know, or whose value cannot be changed.
func Gates(values map[string]bool) (featuregate.MutableFeatureGate, error) {
	gate, err := knownGates()
	if err != nil {
		return nil, err
	}

	// Without the remarks on gates that will go: they are none of ours.
	return gate, gate.SetFromMapWithLogger(logr.Discard(), values)
}

// mutableGates is what featuregate.NewFeatureGate returns.
type mutableGates interface {
	featuregate.MutableFeatureGate
	featuregate.MutableFeatureGateWithLogger
}

func knownGates() (mutableGates, error) {
	specs := make(map[featuregate.Feature]featuregate.FeatureSpec)
	for line := range strings.Lines(gates) {
		words := strings.Fields(line)
		if len(words) < 3 {
			return nil, fmt.Errorf("gates.txt: line %q", line)
		}
		spec := featuregate.FeatureSpec{Default: words[1] == "true", LockToDefault: slices.Contains(words, "locked")}
		switch words[2] {
		case "ALPHA":
			spec.PreRelease = featuregate.Alpha
		case "BETA":
			spec.PreRelease = featuregate.Beta
		case "DEPRECATED":
			spec.PreRelease = featuregate.Deprecated
		}
		specs[featuregate.Feature(words[0])] = spec
	}
	gate := featuregate.NewFeatureGate()

	return gate, gate.Add(specs)
}
