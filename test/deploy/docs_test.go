package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	sigsyaml "sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// elsewhere are programs of other machines and platforms.
var elsewhere = []string{"kind", "rm", "skopeo", "systemctl", "talosctl"}

var (
	fence       = regexp.MustCompile("(?ms)^( *)```([a-z]*)\n(.*?)^ *```$")
	inline      = regexp.MustCompile("`(helm install [^`]+)`")
	placeholder = strings.NewReplacer("REGISTRY", "registry.example", "TAG", "v1", "node/NAME", "node/worker-1", "=NODE", "=worker-1",
		"PATH/deploy", "DEPLOY", " deploy/", " ../../deploy/")
)

// testDocs runs the commands of the docs in the order of a page. Where pods would have to
// run, or other machines are needed, it checks that what a command names exists.
func testDocs(t *testing.T, a *apiServer) {
	t.Setenv("KUBE_EDITOR", "true")                                // which changes nothing
	a.Kubectl(t, "delete", "service", "web", "--ignore-not-found") // which other tests have annotated
	for _, page := range []string{"README.md", "docs/install.md", "docs/balancing.md", "docs/operate.md", "deploy/README.md"} {
		t.Run(page, func(t *testing.T) {
			text, err := os.ReadFile("../../" + page)
			lab.Must(t, err)
			d := docs{apiServer: a, folder: t.TempDir()}
			for _, block := range fence.FindAllStringSubmatch(string(text), -1) {
				content := strings.ReplaceAll("\n"+block[3], "\n"+block[1], "\n")[1:]
				if block[2] == "yaml" {
					d.checkYAML(t, content)

					continue
				}
				if strings.HasPrefix(content, "$ ") {
					continue // with its output
				}
				if strings.Contains(content, "kubectl") {
					a.restore(t)
				}
				for line := range strings.Lines(content) {
					d.run(t, line)
				}
			}
			for _, found := range inline.FindAllStringSubmatch(string(text), -1) {
				d.run(t, found[1])
			}
		})
	}
}

// others are what commands name beside our own objects.
const others = `
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: default}, spec: {ports: [{name: tcp, port: 80}]}}
---
{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: kube-proxy, namespace: kube-system}, spec: {
  selector: {matchLabels: {k8s-app: kube-proxy}}, template: {metadata: {labels: {k8s-app: kube-proxy}},
  spec: {containers: [{name: kube-proxy, image: kube-proxy}]}}}}
`

// restore applies what a command before may have deleted.
func (a *apiServer) restore(t *testing.T) {
	t.Helper()
	a.KubectlInput(t, a.text+others+"\n---\n"+mustKustomize(t, "nodes"), "apply", "--server-side", "--force-conflicts", "-f", "-")
}

// docs is a page, and the last values.yaml that it has shown.
type docs struct {
	*apiServer
	folder string
}

func (d *docs) values() string { return filepath.Join(d.folder, "values.yaml") }

// run runs a command, or checks it.
func (d *docs) run(t *testing.T, line string) {
	line, _, _ = strings.Cut(placeholder.Replace(line), " #")
	line, _, _ = strings.Cut(line, " > ")
	args := strings.Fields(line)
	if len(args) == 0 || strings.HasPrefix(line, "#") {
		return
	}
	switch program, args := args[0], args[1:]; {
	case program == "kubectl" && slices.Contains(args, "--"):
		d.checkVerb(t, args[slices.Index(args, "--")+1:])
	case program == "kubectl":
		d.kubectl(t, args)
	case program == "helm" && slices.Contains([]string{"install", "upgrade"}, args[0]) && args[1] == "sluice" && args[2] == "../../deploy/chart":
		args = slices.DeleteFunc(args[3:], func(arg string) bool { return arg == "--reset-then-reuse-values" })
		if i := slices.Index(args, "values.yaml"); i >= 0 {
			args[i] = d.values()
		}
		d.helm(t, args...)
	case program == "make":
		if out, err := exec.Command("make", "--directory=../..", "--dry-run", args[0]).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", line, err, out)
		}
	case program == "sluice" || program == "bin/sluice":
		d.checkVerb(t, args)
	case !slices.Contains(elsewhere, program):
		t.Errorf("%q: no program is called %s", line, program)
	}
}

// helm renders the chart and has the API server check the objects, except for those of the
// Prometheus operator, which it does not know.
func (d *docs) helm(t *testing.T, args ...string) {
	t.Helper()
	out, err := helm(t, "template", args...)
	if err != nil {
		t.Errorf("helm %q: %v: %s", args, err, out)

		return
	}
	objects := strings.Split(out, "\n---\n")
	objects = slices.DeleteFunc(objects, func(text string) bool { return strings.Contains(text, "apiVersion: monitoring.coreos.com") })
	d.KubectlInput(t, strings.Join(objects, "\n---\n"), "apply", "--server-side", "--validate=strict", "--force-conflicts", "--dry-run=server", "-f", "-")
}

// checkVerb checks a command of sluice that a pod or a node would run.
func (d *docs) checkVerb(t *testing.T, args []string) {
	t.Helper()
	args = slices.DeleteFunc(args, func(arg string) bool { return arg == "sluice" })
	if out, err := exec.Command(sluice.MustBinary(t), append(args, "--help")...).CombinedOutput(); err != nil {
		t.Errorf("sluice %q: %v: %s", args, err, out)
	}
}

// waits are commands that wait for pods, each with a flag so that it does not.
var waits = map[string]string{"rollout status": "--watch=false", "logs": "--pod-running-timeout=1s"}

// unable are commands that need pods or controllers, and what kubectl says without.
var unable = map[string]string{"rollout undo": "no last revision to roll back to", "logs": "timed out waiting for the condition"}

func (d *docs) kubectl(t *testing.T, args []string) {
	t.Helper()
	line := strings.Join(args, " ")
	for verb, flag := range waits {
		if strings.Contains(line, verb) {
			args = append(args, flag)
		}
	}
	if _, err := d.RunKubectl("", args...); err != nil {
		for verb, says := range unable {
			if strings.Contains(line, verb) && strings.Contains(err.Error(), says) {
				return
			}
		}
		t.Error(err)
	}
}

// checkYAML checks a file that a page shows: its first line is its name.
func (d *docs) checkYAML(t *testing.T, text string) {
	name, _, _ := strings.Cut(text, "\n")
	text = placeholder.Replace(text)
	switch name {
	case "# values.yaml":
		lab.Must(t, os.WriteFile(d.values(), []byte(text), 0o600))
		d.helm(t, "--namespace", "kube-system", "--values", d.values())
	case "# kustomization.yaml":
		deploy, err := filepath.Abs("../../deploy")
		lab.Must(t, err)
		path, err := filepath.Rel(d.folder, deploy)
		lab.Must(t, err)
		lab.Must(t, os.WriteFile(filepath.Join(d.folder, "kustomization.yaml"), []byte(strings.ReplaceAll(text, "DEPLOY", path)), 0o600))
		d.kubectl(t, []string{"apply", "--dry-run=server", "-k", d.folder})
	default:
		var file any
		if err := sigsyaml.UnmarshalStrict([]byte(text), &file); err != nil || !strings.HasPrefix(name, "# ") {
			t.Errorf("it is no YAML, or does not begin with its name: %v:\n%s", err, text)
		}
	}
}
