package config

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func mustWrite(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDecode(t *testing.T) {
	for _, test := range []struct {
		name, text   string
		unknown, err string
	}{
		{"YAML", header + "oomScoreAdj: 1", "", ""},
		{"JSON", `{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "oomScoreAdj": 1}`, "", ""},
		{"lenient with fields that there are not", header + "oomScoreAdj: 1\nresourceContainer: x\nconntrack: {max: 1}", `unknown field "conntrack.max", unknown field "resourceContainer"`, ""},
		{"lenient with what is there twice", header + "oomScoreAdj: 0\noomScoreAdj: 1", `key "oomScoreAdj" already set`, ""},
		{"lenient with upper case", header + "oomScoreAdj: 1\nMODE: ipvs", `unknown field "MODE"`, ""},
		{"an error with another type", header + "oomScoreAdj: many", "", "cannot unmarshal string into Go struct field"},
		{"an error with another kind", "apiVersion: v1\nkind: ConfigMap", "", `no kind "ConfigMap" is registered`},
		{"an error with another version", "apiVersion: kubeproxy.config.k8s.io/v1\nkind: KubeProxyConfiguration", "", `no kind "KubeProxyConfiguration" is registered for version "kubeproxy.config.k8s.io/v1"`},
		{"an error without a kind", "oomScoreAdj: 1", "", "Object 'Kind' is missing"},
		{"an error if empty", "", "", "Object 'Kind' is missing"},
		{"an error if no YAML", "{", "", "json parse error"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg, unknown, err := Decode([]byte(test.text))
			if !matches(err, test.err) || !matches(unknown, test.unknown) {
				t.Fatalf("error %v, want %q; unknown %v, want %q", err, test.err, unknown, test.unknown)
			}
			if err == nil && *cfg.OOMScoreAdj != 1 {
				t.Errorf("oomScoreAdj is %d, want 1", *cfg.OOMScoreAdj)
			}
		})
	}
}

// matches reports whether err contains that text, or whether there is neither.
func matches(err error, text string) bool {
	if err == nil || text == "" {
		return err == nil && text == ""
	}

	return strings.Contains(err.Error(), text)
}

// Decode reads what Encode writes as the same configuration, in every mode.
func TestEncodeDecode(t *testing.T) {
	for _, fields := range []string{
		"", "mode: ipvs\niptables: {masqueradeAll: true}\nipvs: {scheduler: sed, syncPeriod: 7s}",
		"mode: nftables\nnftables: {masqueradeAll: true, syncPeriod: 40s, minSyncPeriod: 3s}\nlogging: {verbosity: 4}",
		"clusterCIDR: 10.0.0.0/8,fd00::/8\nfeatureGates: {AllowServiceExternalIPs: false}\nconntrack: {maxPerCore: 0}",
	} {
		cfg := mustDecode(t, fields)
		text, err := Encode(cfg)
		if err != nil {
			t.Fatal(err)
		}
		again, unknown, err := Decode(text)
		if err != nil || unknown != nil {
			t.Fatalf("%v, unknown %v: %s", err, unknown, text)
		}
		Complete(again)
		if diff := cmp.Diff(Shown(cfg), Shown(again)); diff != "" {
			t.Errorf("%q (-written +read):\n%s", fields, diff)
		}
		period, _ := SyncPeriods(cfg)
		periodAgain, _ := SyncPeriods(again)
		if *period != *periodAgain || *MasqueradeAll(cfg) != *MasqueradeAll(again) || Algorithm(cfg) != Algorithm(again) {
			t.Errorf("%q: reading it again gives another period, masqueradeAll or algorithm", fields)
		}
	}
}
