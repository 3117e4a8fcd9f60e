package config

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"

	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// UnusedFields are those that mean nothing to Sluice, by their path in the file.
// Of featureGates, some do: see [Unused].
var UnusedFields = []string{
	"showHiddenMetricsForVersion",
	"iptables.masqueradeBit", "iptables.minSyncPeriod",
	"ipvs.minSyncPeriod", "ipvs.excludeCIDRs", "ipvs.strictARP",
	"ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout",
	"nftables.masqueradeBit", "nftables.minSyncPeriod",
	"winkernel.networkName", "winkernel.sourceVip", "winkernel.enableDSR",
	"winkernel.rootHnsEndpointName", "winkernel.forwardHealthCheckVip",
	"logging.flushFrequency",
	"logging.options.text.infoBufferSize", "logging.options.json.infoBufferSize",
	"portRange", "windowsRunAsService",
}

// Unused returns the fields that are set to something else than their default
// and mean nothing here, and the feature gates of which the same is true. The
// configuration must be valid.
func Unused(cfg *KubeProxy) []string {
	var unused []string
	usual := Default()
	for _, name := range UnusedFields {
		if text(fieldOf(cfg, name)) != text(fieldOf(usual, name)) {
			unused = append(unused, name)
		}
	}
	gates, err := knownGates()
	if err != nil {
		return unused
	}
	for name, on := range cfg.FeatureGates {
		gate := featuregate.Feature(name)
		if !slices.Contains(meaningful, gate) && gates.Enabled(gate) != on {
			unused = append(unused, "featureGates."+name)
		}
	}
	slices.Sort(unused)

	return unused
}

// fieldOf returns the field of that path. There must be one.
func fieldOf(cfg *KubeProxy, name string) any {
	value := reflect.ValueOf(cfg).Elem()
	for part := range strings.SplitSeq(name, ".") {
		value = child(value, part)
	}

	return value.Interface()
}

// child returns the field of a struct that has that name in a file, or the zero
// Value. The fields of an inlined struct are the outer one's.
func child(value reflect.Value, name string) reflect.Value {
	for member, in := range value.Fields() {
		tag, options, _ := strings.Cut(member.Tag.Get("json"), ",")
		if tag == name && tag != "" {
			return in
		}
		if strings.Contains(options, "inline") {
			if found := child(in, name); found.IsValid() {
				return found
			}
		}
	}

	return reflect.Value{}
}

// text is what a field looks like in a file.
func text(value any) string {
	if d, ok := value.(logsapi.TimeOrMetaDuration); ok {
		return d.Duration.Duration.String() // whichever way it is written
	}
	written, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}

	return string(written)
}
