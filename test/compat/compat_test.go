package compat

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

const page = "../../docs/kube-proxy.md"

func mustRead(t *testing.T) map[string]Section {
	t.Helper()
	all, err := Read(".")
	lab.Must(t, err)
	byFile := make(map[string]Section)
	for _, s := range all {
		byFile[s.File] = s
	}

	return byFile
}

func (s Section) has(name string) bool {
	return slices.ContainsFunc(s.Rows, func(r Row) bool { return r.Name == name })
}

// The flags of kube-proxy 1.37, as `kube-proxy --help` lists them, the two that it
// hides, and the two that 1.36 was the last to have.
const kubeProxyFlags = `
	bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period
	conntrack-max-per-core conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait
	conntrack-tcp-timeout-established conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode
	feature-gates healthz-bind-address healthz-port help hostname-override init-only
	iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period iptables-sync-period
	ipvs-exclude-cidrs ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period ipvs-tcp-timeout
	ipvs-tcpfin-timeout ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig
	log-flush-frequency log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size
	log-text-split-stream logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port
	nodeport-addresses oom-score-adj pod-bridge-interface pod-interface-name-prefix profiling proxy-mode
	show-hidden-metrics-for-version v version vmodule write-config-to`

func TestEveryFlagHasARow(t *testing.T) {
	flags := mustRead(t)["flags.yaml"]
	names := strings.Fields(kubeProxyFlags)
	if len(names) != 59 {
		t.Errorf("%d flags, kube-proxy has 57, and two are gone", len(names))
	}
	for _, name := range names {
		if !flags.has("--" + name) {
			t.Errorf("--%s has no row in flags.yaml", name)
		}
	}
}

// Whether `sluice agent` has the flags, and these defaults, is tested in
// cmd/sluice.

func TestEveryFieldHasARow(t *testing.T) {
	fields := mustRead(t)["fields.yaml"]
	names := fieldsOf(reflect.TypeFor[kubeproxyconfig.KubeProxyConfiguration](), "")
	for _, name := range names {
		if !fields.has(name) {
			t.Errorf("%s has no row in fields.yaml", name)
		}
	}
	for _, row := range fields.Rows {
		if !slices.Contains(names, row.Name) {
			t.Errorf("%s is no field of KubeProxyConfiguration", row.Name)
		}
	}
}

// What the log calls meaningless is what the page calls so.
func TestMeaninglessFields(t *testing.T) {
	for _, row := range mustRead(t)["fields.yaml"].Rows {
		if unused := slices.Contains(config.UnusedFields, row.Name); unused != (row.State == Meaningless) {
			t.Errorf("%s is %s, and pkg/config counts it as unused: %t", row.Name, row.State, unused)
		}
	}
}

// fieldsOf lists the fields below t that users write, as paths.
func fieldsOf(t reflect.Type, prefix string) []string {
	if t.Kind() == reflect.Pointer {
		return fieldsOf(t.Elem(), prefix)
	}
	leaf := t == reflect.TypeFor[metav1.Duration]() || t == reflect.TypeFor[logsapi.TimeOrMetaDuration]() ||
		strings.HasSuffix(t.PkgPath(), "/api/resource")
	if t.Kind() != reflect.Struct || leaf {
		return []string{strings.TrimPrefix(prefix, ".")}
	}
	var names []string
	for field := range t.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Type == reflect.TypeFor[metav1.TypeMeta](): // which kind of file it is
		case name == "" && field.Anonymous:
			names = append(names, fieldsOf(field.Type, prefix)...)
		default:
			names = append(names, fieldsOf(field.Type, prefix+"."+name)...)
		}
	}

	return names
}

func TestEveryTestExists(t *testing.T) {
	for _, section := range mustRead(t) {
		for _, row := range section.Rows {
			for _, name := range row.Tests {
				if !exists(t, name) {
					t.Errorf("%s: %s: there is no test %s", section.File, row.Name, name)
				}
			}
		}
	}
}

// exists finds a test by its name in a row.
func exists(t *testing.T, name string) bool {
	t.Helper()
	if strings.HasSuffix(name, ".txtar") {
		_, err := os.Stat(filepath.Join("../..", name))

		return err == nil
	}
	folder, function, ok := strings.Cut(name, ".")
	if !ok {
		return false
	}
	files, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
	lab.Must(t, err)
	declared := regexp.MustCompile(`(?m)^func ` + regexp.QuoteMeta(function) + `\(`)

	return slices.ContainsFunc(files, func(path string) bool {
		text, err := os.ReadFile(path)
		lab.Must(t, err)

		return declared.Match(text)
	})
}

func TestPageIsUpToDate(t *testing.T) {
	all, err := Read(".")
	lab.Must(t, err)
	golden.Match(t, page, Page(all))
}
