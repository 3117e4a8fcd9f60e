package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/sluice-lb/sluice/test/lab"
)

// manifests is what one kustomization makes: each kind once, or not at all.
type manifests struct {
	text           string
	daemonSet      *appsv1.DaemonSet
	serviceAccount *corev1.ServiceAccount
	role           *rbacv1.ClusterRole
	binding        *rbacv1.ClusterRoleBinding
	configMap      *corev1.ConfigMap
}

// kubectl is the one that package cluster builds.
var kubectl = sync.OnceValues(func() (string, error) {
	if folder := os.Getenv("SLUICE_TEST_BINARIES"); folder != "" {
		return filepath.Join(folder, "kubectl"), nil
	}
	cmd := exec.Command("../cluster/build.sh", "kubectl")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	lines := strings.Fields(string(out))
	if err == nil && len(lines) == 0 {
		err = errors.New("build.sh names no folder")
	}
	if err != nil {
		return "", fmt.Errorf("build of kubectl: %w", err)
	}

	return filepath.Join(lines[len(lines)-1], "kubectl"), nil
})

// mustBuild builds a folder below deploy/, with components.
func mustBuild(t testing.TB, folder string, components ...string) manifests {
	t.Helper()

	return mustDecode(t, mustKustomize(t, folder, components...))
}

// mustKustomize returns the text of such a folder.
func mustKustomize(t testing.TB, folder string, components ...string) string {
	t.Helper()
	lab.LookAtProduct(t)
	tool, err := kubectl()
	lab.Must(t, err)
	path := filepath.Join("../../deploy", folder)
	if len(components) > 0 {
		path = mustCompose(t, path, components)
	}
	out, err := exec.Command(tool, "kustomize", path).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl kustomize %s: %v: %s", path, err, out)
	}

	return string(out)
}

// mustCompose writes what an operator writes to use components.
func mustCompose(t testing.TB, overlay string, components []string) string {
	t.Helper()
	folder := t.TempDir()
	relative := func(path string) string {
		path, err := filepath.Abs(path)
		if err == nil {
			path, err = filepath.Rel(folder, path)
		}
		lab.Must(t, err)

		return path
	}
	text := "resources: [" + relative(overlay) + "]\ncomponents:\n"
	for _, name := range components {
		text += "- " + relative(filepath.Join("../../deploy/components", name)) + "\n"
	}
	lab.Must(t, os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(text), 0o600))

	return folder
}

// mustDecode reads manifests into the API's types; a field that they do not have
// is an error.
func mustDecode(t testing.TB, text string) manifests {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewBufferString(text)))
	all := manifests{text: text}
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		var object runtime.Object
		if err == nil {
			object, _, err = decoder.Decode(document, nil, nil)
		}
		if err != nil {
			t.Fatalf("%v in:\n%s", err, document)
		}
		if !all.take(object) {
			t.Fatalf("unexpected, or twice:\n%s", document)
		}
	}
}

// take returns true if it knows the kind and did not have one yet.
func (m *manifests) take(object runtime.Object) bool {
	switch is := object.(type) {
	case *appsv1.DaemonSet:
		return first(&m.daemonSet, is)
	case *corev1.ServiceAccount:
		return first(&m.serviceAccount, is)
	case *rbacv1.ClusterRole:
		return first(&m.role, is)
	case *rbacv1.ClusterRoleBinding:
		return first(&m.binding, is)
	case *corev1.ConfigMap:
		return first(&m.configMap, is)
	}

	return false
}

func first[T any](to **T, is *T) bool {
	if *to != nil {
		return false
	}
	*to = is

	return true
}

// pod is what the DaemonSet makes pods of.
func (m manifests) pod() *corev1.PodSpec { return &m.daemonSet.Spec.Template.Spec }

// container is the agent's, which is the only one.
func (m manifests) container() *corev1.Container { return &m.pod().Containers[0] }
