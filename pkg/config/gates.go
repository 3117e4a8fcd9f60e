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

// gates are the feature gates that kube-proxy 1.36.3 accepts, which are those of
// all of Kubernetes. Each line has a name, a default, a stage, and "locked" if the
// gate cannot be set to anything else. A program that links kube-proxy and lists
// its DefaultMutableFeatureGate printed them.
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

// Gates returns kube-proxy's feature gates with these values. The error names
// those that kube-proxy does not know, or whose value cannot be changed.
func Gates(values map[string]bool) (featuregate.MutableFeatureGate, error) {
	gate, err := knownGates()
	if err != nil {
		return nil, err
	}

	// The log of deprecated gates is discarded: they do not concern Sluice.
	return gate, gate.SetFromMapWithLogger(logr.Discard(), values)
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
