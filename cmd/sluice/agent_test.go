package main

import (
	"path/filepath"
	"strings"
	"testing"
)

const kubeconfig = `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

func TestRestConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	mustWrite(t, path, []byte(kubeconfig))
	for _, test := range []struct {
		name, fields string
		args         []string
		host         string
		contentType  string
		accept       string
		qps          float32
		burst        int
	}{
		{"the flags", "none", []string{"--kubeconfig=" + path, "--kube-api-qps=7.5", "--kube-api-burst=70", "--kube-api-content-type=application/json"},
			"https://192.0.2.1:6443", "application/json", "", 7.5, 70},
		{"the defaults", "none", []string{"--kubeconfig=" + path}, "https://192.0.2.1:6443", "application/vnd.kubernetes.protobuf", "", 5, 10},
		{"the file", "clientConnection: {kubeconfig: " + path + ", qps: 8, burst: 80, contentType: application/json, acceptContentTypes: 'application/json,*/*'}", nil,
			"https://192.0.2.1:6443", "application/json", "application/json,*/*", 8, 80},
		{"--master beside the file", "clientConnection: {kubeconfig: " + path + "}", []string{"--master=https://192.0.2.2"},
			"https://192.0.2.2", "application/vnd.kubernetes.protobuf", "", 5, 10},
		{"--master alone", "none", []string{"--master=https://192.0.2.3"}, "https://192.0.2.3", "application/vnd.kubernetes.protobuf", "", 5, 10},
	} {
		t.Run("it is set by "+test.name, func(t *testing.T) {
			flags := parse(t, test.fields, test.args...)
			cfg, err := restConfig(mustResolve(t, flags).kubeProxy.ClientConnection, flags.master)
			if err != nil {
				t.Fatal(err)
			}
			if cfg.Host != test.host || cfg.ContentType != test.contentType || cfg.AcceptContentTypes != test.accept ||
				cfg.QPS != test.qps || cfg.Burst != test.burst || !strings.HasPrefix(cfg.UserAgent, "sluice/") {
				t.Errorf("host %s, content %s, accept %q, %g a second, burst %d, user agent %s", cfg.Host, cfg.ContentType, cfg.AcceptContentTypes, cfg.QPS, cfg.Burst, cfg.UserAgent)
			}
			if test.host == "https://192.0.2.1:6443" && cfg.BearerToken != "secret" {
				t.Error("the credentials of the kubeconfig are lost")
			}
		})
	}
}

func TestVersionFlag(t *testing.T) {
	for arg, want := range map[string]string{"--version": "sluice unknown, maps v", "--version=true": "sluice unknown, maps v", "--version=raw": `"version": "unknown"`} {
		var out strings.Builder
		// Other flags are not checked then.
		if err := execute(&out, "agent", arg, "--oom-score-adj=5000"); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%s: %v: %s", arg, err, &out)
		}
	}
	if err := execute(new(strings.Builder), "agent", "--version=false", "--oom-score-adj=5000"); err == nil {
		t.Error("--version=false prints the version")
	}
}

func TestOOMScoreIsLowEnough(t *testing.T) {
	for _, test := range []struct {
		name             string
		have, configured int
		want             bool
	}{
		{"the kubelet's, for kube-proxy's default", -997, -999, true},
		{"as configured", -999, -999, true},
		{"lower than configured", -500, 0, true},
		{"none from a nested runtime", 0, -999, false},
		{"of an ordinary pod", 936, -999, false},
		{"a little higher than the kubelet's", -996, -999, false},
	} {
		if got := isLowEnough(test.have, test.configured); got != test.want {
			t.Errorf("%s: %d for %d is low enough: got %t", test.name, test.have, test.configured, got)
		}
	}
}

// A dry run ends with 0 if all is in force, 1 if a part of an object is not, and 2 if something cannot be read, so that it can
// check manifests before they are used.
func TestExitCodesOfDryRun(t *testing.T) {
	const service = "apiVersion: v1\nkind: Service\nmetadata: {name: NAME, namespace: shop}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
	web := strings.Replace(service, "NAME", "web", 1)
	for _, test := range []struct {
		name  string
		files map[string]string
		code  int
		says  string
	}{
		{"all is right", map[string]string{"a.yaml": web}, 0, ""},
		{"a value is left out", map[string]string{"a.yaml": strings.Replace(web, "namespace: shop", "namespace: shop, annotations: {sluice-lb.io/algorithm: best}", 1)}, 1, "1 parts of objects would not be in force"},
		{"an address is another Service's", map[string]string{"a.yaml": web, "b.yaml": strings.Replace(service, "NAME", "other", 1)}, 1, "1 parts of objects would not be in force"},
		{"no YAML", map[string]string{"a.yaml": web, "b.yaml": "{"}, 2, "1 mistakes in manifests"},
		{"what an API server would refuse", map[string]string{"a.yaml": strings.Replace(web, "port: 80", "port: 70000", 1)}, 2, "1 mistakes in manifests"},
		{"a folder without manifests", map[string]string{"a.yaml.old": web}, 2, "1 mistakes in manifests"},
		{"no folder", nil, 2, "no such file or directory"},
	} {
		t.Run("it has "+test.name, func(t *testing.T) {
			folder := t.TempDir()
			if test.files == nil {
				folder = filepath.Join(folder, "nosuch")
			}
			for name, text := range test.files {
				mustWrite(t, filepath.Join(folder, name), []byte(text))
			}
			err := execute(new(strings.Builder), "agent", "--dry-run", "--manifests="+folder, "--hostname-override=node-1")
			code := 0
			if err != nil {
				code = exitCode(err)
			}
			if code != test.code || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("exit code %d: %v; want %d, %q", code, err, test.code, test.says)
			}
		})
	}
}
