package deploy

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// granted are the capabilities that the agent needs; TestDeploy takes each away.
// SYS_RESOURCE is not among them: nested runtimes cannot give it.
var granted = []corev1.Capability{"NET_ADMIN", "SYS_ADMIN"}

// installations are what an operator may build.
var installations = []struct {
	name       string
	folder     string
	components []string
	configMap  string // that has the configuration; "…" is followed by a hash
	added      []corev1.Capability
	hostPID    bool
	init       bool // a privileged container comes first
	k8sApp     string
	image      string // "" is that an operator sets it: images, name sluice
}{
	{name: "kubeadm", folder: "overlays/kubeadm", configMap: "kube-proxy", k8sApp: "sluice"},
	{name: "standalone", folder: "overlays/standalone", configMap: "sluice-…", k8sApp: "sluice"},
	{
		name: "kind", folder: "overlays/kind", configMap: "kube-proxy", init: true, k8sApp: "sluice",
		image: "localhost/sluice:dev",
	},
	{
		name: "kubeadm, SYS_RESOURCE", folder: "overlays/kubeadm", components: []string{"sys-resource"},
		configMap: "kube-proxy", added: []corev1.Capability{"SYS_RESOURCE"}, k8sApp: "sluice",
	},
	{name: "kubeadm, pods opt out", folder: "overlays/kubeadm", components: []string{"pod-opt-out"}, configMap: "kube-proxy", k8sApp: "sluice"},
	{
		name: "kubeadm, every component", folder: "overlays/kubeadm",
		components: []string{"kube-proxy-label", "host-processes", "privileged-init", "sys-resource"},
		configMap:  "kube-proxy", added: []corev1.Capability{"SYS_PTRACE", "SYS_RESOURCE"}, hostPID: true, init: true, k8sApp: "kube-proxy",
	},
}

// Every installation keeps the rules that docs/security.md describes.
func TestPolicy(t *testing.T) {
	for _, is := range installations {
		t.Run(is.name, func(t *testing.T) {
			m := mustBuild(t, is.folder, is.components...)
			pod := m.pod()
			security := m.container().SecurityContext
			for rule, kept := range map[string]bool{
				"all is in kube-system":                  m.daemonSet.Namespace == "kube-system" && m.serviceAccount.Namespace == "kube-system",
				"the priority is that of nodes":          pod.PriorityClassName == "system-node-critical",
				"every taint is tolerated":               len(pod.Tolerations) == 1 && pod.Tolerations[0] == corev1.Toleration{Operator: corev1.TolerationOpExists},
				"Linux nodes only":                       len(pod.NodeSelector) == 1 && pod.NodeSelector["kubernetes.io/os"] == "linux",
				"the node's network":                     pod.HostNetwork,
				"the node's processes only if asked for": pod.HostPID == is.hostPID,
				"not the node's IPC":                     !pod.HostIPC,
				"names are not resolved by Services":     pod.DNSPolicy == corev1.DNSDefault,
				"one container":                          len(pod.Containers) == 1 && (len(pod.InitContainers) == 1) == is.init,
				"no privilege":                           !*security.Privileged && !*security.AllowPrivilegeEscalation,
				"a root that is not written to":          *security.ReadOnlyRootFilesystem,
				"the runtime's seccomp profile":          pod.SecurityContext.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault,
				// One that is named is required, and not every node has AppArmor.
				"no AppArmor profile by name":                            pod.SecurityContext.AppArmorProfile == nil && security.AppArmorProfile == nil,
				"no capability by default":                               slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}),
				"the image by a name alone":                              m.container().Image == cmp.Or(is.image, "sluice"),
				"these capabilities":                                     slices.Equal(security.Capabilities.Add, slices.Concat(granted, is.added)),
				"requests, and no limits":                                len(m.container().Resources.Requests) == 2 && len(m.container().Resources.Limits) == 0,
				"memory for the agent, its maps and 64Mi of flow tables": m.container().Resources.Requests.Memory().Value() >= int64(datapath.Need(64<<20)),
				"its own selector":                                       !strings.Contains(m.daemonSet.Spec.Selector.String(), "kube-proxy"),
				"its label":                                              m.daemonSet.Spec.Template.Labels["k8s-app"] == is.k8sApp,
				"few pods at a time":                                     m.daemonSet.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String() == "10%",
			} {
				if !kept {
					t.Errorf("broken: %s", rule)
				}
			}
			if is.init {
				checkInit(t, m)
			}
			checkProbes(t, m)
			checkVolumes(t, m, is.configMap)
			checkRole(t, m)
		})
	}
}

// checkInit: what runs before the agent is the agent, with --init-only and with
// the same volumes.
func checkInit(t *testing.T, m manifests) {
	t.Helper()
	before, agent := m.pod().InitContainers[0], m.container()
	if !*before.SecurityContext.Privileged || !*before.SecurityContext.ReadOnlyRootFilesystem {
		t.Errorf("it runs with %v, want privilege and a root that is not written to", before.SecurityContext)
	}
	want := slices.Concat(agent.Args, []string{"--bpf-root=/host/bpf/sluice", "--init-only"})
	if before.Image != agent.Image || !slices.Equal(before.Args, want) {
		t.Errorf("it runs %s with %q, want %s with %q", before.Image, before.Args, agent.Image, want)
	}
	for _, at := range before.VolumeMounts {
		same := func(is corev1.VolumeMount) bool {
			return is.Name == at.Name && is.MountPath == at.MountPath && is.ReadOnly == at.ReadOnly
		}
		if !slices.ContainsFunc(agent.VolumeMounts, same) {
			t.Errorf("it has %v, which the agent has not", at)
		}
	}
}

func checkProbes(t *testing.T, m manifests) {
	t.Helper()
	c := m.container()
	for name, test := range map[string]struct {
		probe *corev1.Probe
		path  string
	}{
		"startup": {c.StartupProbe, "/livez"}, "liveness": {c.LivenessProbe, "/livez"}, "readiness": {c.ReadinessProbe, "/readyz"},
	} {
		get := test.probe.HTTPGet
		if get.Path != test.path || get.Port.IntValue() != 10256 || get.Host != "" {
			t.Errorf("the %s probe asks for %v, want %s at port 10256 of the node", name, get, test.path)
		}
	}
}

// checkVolumes: of the node's folders, these, and what need not be written to is
// not. Container runtimes' AppArmor profiles deny all writing below /sys, and
// only privileged containers may mount for others (Bidirectional).
func checkVolumes(t *testing.T, m manifests, configMap string) {
	t.Helper()
	hostPaths := map[string]string{"cgroup": "/sys/fs/cgroup", "bpf": "/sys/fs/bpf", "netns": "/run/netns", "run": "/run/sluice"}
	writable := []string{"bpf", "run"}
	volumes := make(map[string]corev1.Volume)
	for _, volume := range m.pod().Volumes {
		volumes[volume.Name] = volume
		want, isHost := hostPaths[volume.Name]
		switch {
		case isHost && (volume.HostPath == nil || volume.HostPath.Path != want):
			t.Errorf("the volume %s is %v, want %s of the node", volume.Name, volume, want)
		case !isHost && volume.ConfigMap == nil:
			t.Errorf("the volume %s is neither a folder that the agent needs nor a ConfigMap", volume.Name)
		case !isHost:
			name, prefix := volume.ConfigMap.Name, strings.TrimSuffix(configMap, "…")
			if name != configMap && (prefix == configMap || !strings.HasPrefix(name, prefix)) {
				t.Errorf("the configuration is in the ConfigMap %s, want %s", name, configMap)
			}
			if m.configMap != nil && m.configMap.Name != name {
				t.Errorf("the configuration is in the ConfigMap %s, but %s is made", name, m.configMap.Name)
			}
		}
	}
	for _, at := range m.container().VolumeMounts {
		if at.ReadOnly == slices.Contains(writable, at.Name) {
			t.Errorf("the volume %s is mounted with readOnly %t", at.Name, at.ReadOnly)
		}
		if !at.ReadOnly && strings.HasPrefix(at.MountPath, "/sys") {
			t.Errorf("%s is below /sys, where AppArmor denies all writing", at.MountPath)
		}
		if at.MountPropagation != nil && *at.MountPropagation == corev1.MountPropagationBidirectional {
			t.Errorf("%s is mounted for others, too", at.MountPath)
		}
		delete(volumes, at.Name)
	}
	for name := range volumes {
		t.Errorf("the volume %s is not mounted", name)
	}
}

// checkRole checks that a role reads nothing secret, and writes only Events.
// TestPod shows that all of it is needed.
func checkRole(t *testing.T, m manifests) {
	t.Helper()
	for _, rule := range m.role.Rules {
		reads := slices.Equal(rule.Verbs, []string{"list", "watch"})
		writesEvents := slices.Equal(rule.Resources, []string{"events"}) && slices.Equal(rule.Verbs, []string{"create", "patch"})
		if !reads && !writesEvents || slices.Contains(rule.Resources, "secrets") || slices.Contains(rule.Resources, "endpoints") {
			t.Errorf("the role grants %v", rule)
		}
		for _, name := range slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs) {
			if strings.Contains(name, "*") {
				t.Errorf("the role grants %v: a wildcard", rule)
			}
		}
	}
	subject := rbacv1.Subject{Kind: "ServiceAccount", Name: m.serviceAccount.Name, Namespace: m.serviceAccount.Namespace}
	if !slices.Equal(m.binding.Subjects, []rbacv1.Subject{subject}) {
		t.Errorf("the role is bound to %v, want %v", m.binding.Subjects, subject)
	}
	if ref := m.binding.RoleRef; ref.Kind != "ClusterRole" || ref.Name != m.role.Name {
		t.Errorf("the role that is bound is %v, want %s", ref, m.role.Name)
	}
	if got := m.pod().ServiceAccountName; got != m.serviceAccount.Name {
		t.Errorf("pods have the ServiceAccount %q, want %q", got, m.serviceAccount.Name)
	}
}

// Nothing in the manifests leads to the API server by the Service `kubernetes`.
func TestNoKubernetesService(t *testing.T) {
	for _, is := range installations {
		m := mustBuild(t, is.folder, is.components...)
		for _, env := range m.container().Env {
			if strings.HasPrefix(env.Name, "KUBERNETES_") {
				t.Errorf("%s: the variable %s is set", is.name, env.Name)
			}
		}
		if m.configMap == nil {
			continue
		}
		var kubeconfig struct {
			Clusters []struct {
				Cluster struct{ Server string }
			}
		}
		if err := yaml.Unmarshal([]byte(m.configMap.Data["kubeconfig.conf"]), &kubeconfig); err != nil {
			t.Fatal(err)
		}
		if len(kubeconfig.Clusters) != 1 {
			t.Fatalf("%s: the kubeconfig has %d clusters, want one", is.name, len(kubeconfig.Clusters))
		}
		if server := kubeconfig.Clusters[0].Cluster.Server; !strings.HasSuffix(server, ".example:6443") {
			t.Errorf("%s: the API server is %s, want an example to be replaced", is.name, server)
		}
	}
}
