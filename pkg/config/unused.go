package config

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"

	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// UnusedFields are the fields without an effect in Sluice, by their path in the
// file. [Unused] adds the feature gates without an effect.
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

// Unused returns the fields and feature gates that have no effect here and are set
// to something else than their default. Gates that Sluice does not know are not
// among them: see [Gates]. The configuration must be valid.
func Unused(cfg *KubeProxy) []string {
	var unused []string
	defaults := Default()
	for _, name := range UnusedFields {
		if text(fieldOf(cfg, name)) != text(fieldOf(defaults, name)) {
			unused = append(unused, name)
		}
	}
	gates, err := knownGates()
	if err != nil {
		return unused
	}
	known := gates.GetAll()
	for name, on := range cfg.FeatureGates {
		gate := featuregate.Feature(name)
		if spec, ok := known[gate]; ok && !slices.Contains(effective, gate) && spec.Default != on {
			unused = append(unused, "featureGates."+name)
		}
	}
	slices.Sort(unused)

	return unused
}

// fieldOf returns the field at that path, which must exist.
func fieldOf(cfg *KubeProxy, name string) any {
	value := reflect.ValueOf(cfg).Elem()
	for part := range strings.SplitSeq(name, ".") {
		value = child(value, part)
	}

	return value.Interface()
}

// child returns the field of a struct that has that name in a file, or the zero
// Value. Fields of an embedded struct belong to the outer one.
func child(value reflect.Value, name string) reflect.Value {
	for member, in := range value.Fields() {
		tag, _, _ := strings.Cut(member.Tag.Get("json"), ",")
		if tag == name && tag != "" {
			return in
		}
		if tag == "" && member.Anonymous {
			if found := child(in, name); found.IsValid() {
				return found
			}
		}
	}

	return reflect.Value{}
}

// text returns a field as it is written in a file.
func text(value any) string {
	if d, ok := value.(logsapi.TimeOrMetaDuration); ok {
		return d.Duration.Duration.String() // a file may have a number instead
	}
	written, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}

	return string(written)
}
