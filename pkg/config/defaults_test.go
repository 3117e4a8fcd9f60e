package config

import (
	"testing"
	"time"
)

// cmd/sluice/written_test.go compares the defaults of all fields with kube-proxy's
// own, for the section of each mode. These are the defaults of the other sections.
func TestDefaultsOfSections(t *testing.T) {
	cfg := Default()
	for _, test := range []struct {
		name      string
		got, want time.Duration
	}{
		{"iptables.syncPeriod", cfg.IPTables.SyncPeriod.Duration, 30 * time.Second},
		{"iptables.minSyncPeriod", cfg.IPTables.MinSyncPeriod.Duration, time.Second},
		{"ipvs.syncPeriod", cfg.IPVS.SyncPeriod.Duration, 30 * time.Second},
		{"ipvs.minSyncPeriod", cfg.IPVS.MinSyncPeriod.Duration, 0},
		{"nftables.syncPeriod", cfg.NFTables.SyncPeriod.Duration, 30 * time.Second},
		{"nftables.minSyncPeriod", cfg.NFTables.MinSyncPeriod.Duration, time.Second},
	} {
		if test.got != test.want {
			t.Errorf("%s is %s, want %s", test.name, test.got, test.want)
		}
	}
	if cfg.Mode != "" || cfg.DetectLocalMode != "" || cfg.NodePortAddresses != nil {
		t.Errorf("mode %q, detectLocalMode %q and nodePortAddresses %q have defaults already", cfg.Mode, cfg.DetectLocalMode, cfg.NodePortAddresses)
	}
}

func TestDefaultAddresses(t *testing.T) {
	for _, test := range []struct{ fields, healthz, metrics string }{
		{"", "0.0.0.0:10256", "127.0.0.1:10249"},
		{"bindAddress: 192.0.2.1", "0.0.0.0:10256", "127.0.0.1:10249"},
		{`bindAddress: "::"`, "[::]:10256", "[::1]:10249"},
		{`bindAddress: "2001:db8::1"`, "[::]:10256", "[::1]:10249"},
		{"healthzBindAddress: 192.0.2.1\nmetricsBindAddress: 0.0.0.0", "192.0.2.1:10256", "0.0.0.0:10249"},
		{`healthzBindAddress: "::1"` + "\nmetricsBindAddress: 192.0.2.1:1", "[::1]:10256", "192.0.2.1:1"},
	} {
		cfg := mustDecode(t, test.fields)
		if cfg.HealthzBindAddress != test.healthz || cfg.MetricsBindAddress != test.metrics {
			t.Errorf("%q: healthz %s, metrics %s, want %s and %s", test.fields, cfg.HealthzBindAddress, cfg.MetricsBindAddress, test.healthz, test.metrics)
		}
	}
}

func TestNodePortAddressesOfModes(t *testing.T) {
	for fields, want := range map[string]int{
		"": 0, "mode: iptables": 0, "mode: ipvs": 0, "mode: nftables": 1, "mode: nftables\nnodePortAddresses: [10.0.0.0/8, fd00::/8]": 2,
	} {
		if cfg := mustDecode(t, fields); len(cfg.NodePortAddresses) != want {
			t.Errorf("%q: nodePortAddresses is %q, want %d", fields, cfg.NodePortAddresses, want)
		}
	}
}
