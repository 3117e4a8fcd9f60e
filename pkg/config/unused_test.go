package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Each field that means nothing is named when it is set, and only then.
func TestUnused(t *testing.T) {
	values := map[string]string{
		"showHiddenMetricsForVersion": `"1.36"`,
		"iptables.masqueradeBit":      "1", "nftables.masqueradeBit": "1",
		"iptables.minSyncPeriod": "2s", "ipvs.minSyncPeriod": "2s", "nftables.minSyncPeriod": "2s",
		"ipvs.excludeCIDRs": "[10.0.0.0/8]", "ipvs.strictARP": "true",
		"ipvs.tcpTimeout": "1s", "ipvs.tcpFinTimeout": "1s", "ipvs.udpTimeout": "1s",
		"winkernel.networkName": "x", "winkernel.sourceVip": "192.0.2.1", "winkernel.enableDSR": "true",
		"winkernel.rootHnsEndpointName": "x", "winkernel.forwardHealthCheckVip": "true",
		"logging.flushFrequency":              "1s",
		"logging.options.text.infoBufferSize": "1Ki", "logging.options.json.infoBufferSize": "1Ki",
		"portRange": "1-2", "windowsRunAsService": "true",
	}
	for _, name := range UnusedFields {
		value, ok := values[name]
		if !ok {
			t.Errorf("%s has no value in this test", name)
		}
		parts := strings.Split(name, ".")
		fields := strings.Join(parts, ": {") + ": " + value + strings.Repeat("}", len(parts)-1)
		if got := Unused(mustDecode(t, fields)); !slices.Equal(got, []string{name}) {
			t.Errorf("%q: unused are %q", fields, got)
		}
	}
}

func TestUnusedIsQuiet(t *testing.T) {
	for _, test := range []struct {
		fields string
		want   []string
	}{
		{"", nil},
		{"iptables: {masqueradeBit: 14, minSyncPeriod: 1s}\nipvs: {excludeCIDRs: null}\nlogging: {flushFrequency: 5000000000}", nil},
		{"conntrack: {min: 1}\nipvs: {scheduler: rr}\nmode: ipvs\noomScoreAdj: 1", nil},
		{"featureGates: {AllowServiceExternalIPs: false, LoggingAlphaOptions: true, AllAlpha: true}", nil},
		{"featureGates: {WatchListClient: true, NoSuch: true}", nil},
		{"featureGates: {WatchListClient: false, NodeSwap: true, MutablePVNodeAffinity: true}", []string{"featureGates.MutablePVNodeAffinity", "featureGates.WatchListClient"}},
	} {
		if got := Unused(mustDecode(t, test.fields)); !slices.Equal(got, test.want) {
			t.Errorf("%q: unused are %q, want %q", test.fields, got, test.want)
		}
	}
}

func TestAlgorithm(t *testing.T) {
	for fields, want := range map[string]lb.Algorithm{
		"": lb.Random, "mode: nftables": lb.Random, "mode: ipvs": lb.RoundRobin,
		"ipvs: {scheduler: rr}": lb.RoundRobin, "ipvs: {scheduler: wrr}": lb.RoundRobin,
		"ipvs: {scheduler: lc}": lb.LeastConnections, "ipvs: {scheduler: wlc}": lb.LeastConnections, "ipvs: {scheduler: twos}": lb.LeastConnections,
		"ipvs: {scheduler: sed}": lb.ShortestExpectedDelay, "ipvs: {scheduler: nq}": lb.NeverQueue,
		"ipvs: {scheduler: sh}": lb.SourceHash, "ipvs: {scheduler: dh}": lb.DestinationHash,
		"ipvs: {scheduler: lblc}": lb.DestinationHash, "ipvs: {scheduler: lblcr}": lb.DestinationHash,
		"ipvs: {scheduler: mh}":                 lb.Maglev,
		"mode: ipvs\nipvs: {scheduler: sh}":     lb.SourceHash,
		"mode: nftables\nipvs: {scheduler: nq}": lb.NeverQueue,
	} {
		cfg := mustDecode(t, fields)
		if err := Validate(cfg); err != nil {
			t.Error(err)
		}
		if got := Algorithm(cfg); got != want {
			t.Errorf("%q: %s, want %s", fields, got, want)
		}
	}
}
