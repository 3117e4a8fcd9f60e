package deploy

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/tools/clientcmd"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/test/lab"
)

// helm runs the program in the folder of that name: lint, template or notes.
func helm(t testing.TB, verb string, args ...string) (string, error) {
	t.Helper()
	lab.LookAtProduct(t)
	chart, err := filepath.Abs("../../deploy/chart")
	lab.Must(t, err)
	cmd := exec.Command("go", append([]string{"run", ".", verb, chart}, args...)...)
	cmd.Dir = "helm"
	out, err := cmd.CombinedOutput()

	return string(out), err
}

// The chart makes what the kustomizations make.
func TestChart(t *testing.T) {
	for _, test := range []struct {
		values     string // arguments
		folder     string
		components []string
	}{
		{"", "overlays/kubeadm", nil},
		{"--set privilegedInit=true", "overlays/kubeadm", []string{"privileged-init"}},
		{"--set sysResource=true", "overlays/kubeadm", []string{"sys-resource"}},
		{"--set hostProcesses=true", "overlays/kubeadm", []string{"host-processes"}},
		{"--set podOptOut=true", "overlays/kubeadm", []string{"pod-opt-out"}},
		{"--set kubeProxyLabel=true", "overlays/kubeadm", []string{"kube-proxy-label"}},
		{"--set monitoring.podMonitor=true --set monitoring.rules=true --set monitoring.dashboard=true", "overlays/kubeadm", []string{"../monitoring"}},
		{"--set privilegedInit=true --set image.repository=localhost/sluice --set image.tag=dev", "overlays/kind", nil},
		{"--set apiServer=https://api-server.example:6443", "overlays/standalone", nil},
	} {
		t.Run(test.values, func(t *testing.T) {
			args := append(strings.Fields(test.values), "--namespace", "kube-system")
			if out, err := helm(t, "lint", args...); err != nil {
				t.Errorf("helm lint: %v: %s", err, out)
			}
			out, err := helm(t, "template", args...)
			if err != nil {
				t.Fatalf("helm template: %v: %s", err, out)
			}
			want := mustKustomize(t, test.folder, test.components...)
			if diff := cmp.Diff(mustObjects(t, want), mustObjects(t, out)); diff != "" {
				t.Errorf("kustomize (-) and helm (+) make different objects:\n%s", diff)
			}
		})
	}
}

// hash ends the name that kustomize makes up for the ConfigMap of overlays/standalone.
var hash = regexp.MustCompile(`name: sluice-[a-z0-9]{10}\n`)

// mustObjects returns manifests by kind and name. The files of a ConfigMap are objects,
// too: comments make no difference.
func mustObjects(t testing.TB, text string) map[string]any {
	t.Helper()
	text = hash.ReplaceAllString(text, "name: sluice\n")
	all := make(map[string]any)
	for documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		lab.Must(t, err)
		var object unstructured.Unstructured
		lab.Must(t, sigsyaml.UnmarshalStrict(document, &object.Object))
		if object.Object == nil {
			continue
		}
		if files, ok := object.Object["data"].(map[string]any); ok {
			for name, content := range files {
				var value any
				lab.Must(t, sigsyaml.Unmarshal([]byte(content.(string)), &value))
				files[name] = value
			}
		}
		all[object.GetKind()+" "+object.GetName()] = object.Object
	}
}

// Values that the chart does not know, or that make no sense, are refused by name.
func TestChartRefuses(t *testing.T) {
	for values, want := range map[string]string{
		"--set privilegedinit=true":                         "privilegedinit",
		"--set image.name=sluice":                           "name",
		"--set privilegedInit=yes":                          "privilegedInit",
		"--set image.pullPolicy=Sometimes":                  "pullPolicy",
		"--set args={algorithm=lc}":                         "args",
		"--set apiServer=http://192.0.2.10":                 "apiServer",
		"--set healthzPort=0":                               "healthzPort",
		"--set monitoring.interval=often":                   "interval",
		"--set kubeProxyConfiguration.mode=nftables":        "kubeProxyConfiguration: it needs apiServer",
		"--set healthzPort=10256 --namespace elsewhere":     "install with --namespace kube-system, or set apiServer",
		"--set apiServer=https://a --set healthzPort=10300": "healthzPort: it is 10300, and kubeProxyConfiguration.healthzBindAddress 0.0.0.0",
		"--set apiServer=https://a --set kubeProxyConfiguration.healthzBindAddress=0.0.0.0:10300":                                 "healthzPort: it is 10256, and kubeProxyConfiguration.healthzBindAddress 0.0.0.0:10300",
		"--set apiServer=https://a --set kubeProxyConfiguration.healthzBindAddress=127.0.0.1:10256":                               "healthzHost: kubeProxyConfiguration.healthzBindAddress is 127.0.0.1:10256",
		"--set apiServer=https://a --set monitoring.podMonitor=true":                                                              "monitoring.podMonitor: metrics are served on 127.0.0.1",
		"--set apiServer=https://a --set monitoring.podMonitor=true --set kubeProxyConfiguration.metricsBindAddress=0.0.0.0:9100": "monitoring.port: it is 10249",
		"--set updateStrategy.type=OnDelete --set maxUnavailable=1":                                                               "updateStrategy: maxUnavailable is set as well",
		"--set updateStrategy.type=Never":                                                                                         "updateStrategy",
		"--set podLabels.k8s-app=x":                                                                                               "podLabels: k8s-app is the chart's own label",
		"--set env[0].name=NODE_NAME":                                                                                             "env: NODE_NAME is the chart's own",
		"--set volumes[0].name=bpf":                                                                                               "volumes: bpf is the name of one of the chart's own",
	} {
		args := append([]string{"--namespace", "kube-system"}, strings.Fields(values)...)
		if out, err := helm(t, "template", args...); err == nil || !strings.Contains(out, want) {
			t.Errorf("helm template %s: %v, want an error that has %q: %s", values, err, want, out)
		}
	}
}

// The configuration of a cluster without kube-proxy's ConfigMap has what the values name,
// and the agent's flags come after those of the manifests.
func TestChartConfiguration(t *testing.T) {
	out, err := helm(t, "template", "--namespace", "lb", "--set", "apiServer=https://[2001:db8::1]:6443",
		"--set", "kubeProxyConfiguration.mode=nftables", "--set", "kubeProxyConfiguration.clientConnection.qps=50",
		"--set", "args={--algorithm=lc,--flow-table-memory=64Mi}")
	if err != nil {
		t.Fatalf("helm template: %v: %s", err, out)
	}
	m := mustDecode(t, out)
	cfg, unknown, err := config.Decode([]byte(m.configMap.Data["config.conf"]))
	lab.Must(t, err, unknown)
	if cfg.Mode != config.ModeNFTables || cfg.ClientConnection.QPS != 50 || cfg.ClientConnection.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" {
		t.Errorf("the configuration is mode %q, qps %v, kubeconfig %q", cfg.Mode, cfg.ClientConnection.QPS, cfg.ClientConnection.Kubeconfig)
	}
	kubeconfig, err := clientcmd.Load([]byte(m.configMap.Data["kubeconfig.conf"]))
	lab.Must(t, err)
	if got := kubeconfig.Clusters["default"].Server; got != "https://[2001:db8::1]:6443" {
		t.Errorf("the API server is %s", got)
	}
	if got := m.container().Args[3:]; !slices.Equal(got, []string{"--algorithm=lc", "--flow-table-memory=64Mi"}) {
		t.Errorf("the agent has the flags %q", got)
	}
	if m.binding.Subjects[0].Namespace != "lb" || m.daemonSet.Namespace != "lb" || m.pod().Volumes[0].ConfigMap.Name != m.configMap.Name {
		t.Error("not all is in the namespace of the release")
	}
}

// What is printed after an installation names what to do next.
func TestChartNotes(t *testing.T) {
	out, err := helm(t, "notes", "--namespace", "kube-system")
	if err != nil {
		t.Fatalf("helm notes: %v: %s", err, out)
	}
	for _, want := range []string{"image.repository has its default", "sluice status", "sluice verify", "delete daemonset kube-proxy", "helm uninstall leaves programs and maps on the nodes"} {
		if !strings.Contains(out, want) {
			t.Errorf("the notes do not say %q:\n%s", want, out)
		}
	}
}

// What operators set of the pods of a node's agent reaches them.
func TestChartPods(t *testing.T) {
	out, err := helm(t, "template", "--namespace", "kube-system", "--set", "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].key=eks.amazonaws.com/compute-type",
		"--set", "podAnnotations.example\\.org/a=b", "--set", "podLabels.team=net", "--set", "priorityClassName=high", "--set", "updateStrategy.type=OnDelete",
		"--set", "env[0].name=GOMEMLIMIT", "--set", "env[0].value=256MiB", "--set", "healthzHost=127.0.0.1",
		"--set", "volumes[0].name=certs", "--set", "volumes[0].hostPath.path=/etc/certs", "--set", "volumeMounts[0].name=certs", "--set", "volumeMounts[0].mountPath=/certs")
	if err != nil {
		t.Fatalf("helm template: %v: %s", err, out)
	}
	m := mustDecode(t, out)
	pod, template, agent := m.pod(), m.daemonSet.Spec.Template, m.container()
	if terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms; len(terms) != 1 || terms[0].MatchExpressions[0].Key != "eks.amazonaws.com/compute-type" {
		t.Errorf("the affinity is %v", pod.Affinity)
	}
	if template.Annotations["example.org/a"] != "b" || template.Labels["team"] != "net" || template.Labels["k8s-app"] != "sluice" {
		t.Errorf("the pods have the annotations %v and the labels %v", template.Annotations, template.Labels)
	}
	if pod.PriorityClassName != "high" || m.daemonSet.Spec.UpdateStrategy.Type != "OnDelete" || m.daemonSet.Spec.UpdateStrategy.RollingUpdate != nil {
		t.Errorf("the priority is %q and the strategy %v", pod.PriorityClassName, m.daemonSet.Spec.UpdateStrategy)
	}
	if env := agent.Env; len(env) != 2 || env[1].Name != "GOMEMLIMIT" || env[1].Value != "256MiB" {
		t.Errorf("the environment is %v", env)
	}
	if host := agent.LivenessProbe.HTTPGet.Host; host != "127.0.0.1" || agent.ReadinessProbe.HTTPGet.Host != host || agent.StartupProbe.HTTPGet.Host != host {
		t.Errorf("the probes ask %q", host)
	}
	if volume, mount := pod.Volumes[len(pod.Volumes)-1], agent.VolumeMounts[len(agent.VolumeMounts)-1]; volume.HostPath.Path != "/etc/certs" || mount.MountPath != "/certs" {
		t.Errorf("the last volume is %v, at %v", volume, mount)
	}
}

// Values of an older chart, which lacks some, make what the defaults make: helm upgrade --reuse-values has no others.
func TestChartWithValuesOfAnother(t *testing.T) {
	want, err := helm(t, "template", "--namespace", "kube-system")
	lab.Must(t, err)
	text, err := os.ReadFile("../../deploy/chart/values.yaml")
	lab.Must(t, err)
	var values map[string]any
	lab.Must(t, sigsyaml.Unmarshal(text, &values))
	args := []string{"template", "--namespace", "kube-system"}
	for name, value := range values {
		args = append(args, "--set", name+"=null")
		fields, _ := value.(map[string]any)
		one := []string{}
		for field := range fields {
			if name == "monitoring" || name == "image" {
				one = append(one, "--set", name+"."+field+"=null")
			}
		}
		if len(one) > 0 {
			if got, err := helm(t, "template", append([]string{"--namespace", "kube-system"}, one...)...); err != nil || got != want {
				t.Errorf("without the fields of %s (%v):\n%s", name, err, cmp.Diff(want, got))
			}
		}
	}
	if got, err := helm(t, args[0], args[1:]...); err != nil || got != want {
		t.Errorf("without any value (%v):\n%s", err, cmp.Diff(want, got))
	}
}
