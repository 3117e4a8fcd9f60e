package migrate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/kubeproxy"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/scene"
)

// The rules of the real kube-proxy do what Sluice does, for Services of every kind. Where a rule was changed by
// hand, verify names the Service, the frontend and the field.
func TestVerifyAgainst(t *testing.T) {
	for mode, detect := range map[realproxy.Mode]string{
		realproxy.NFTables: "BridgeInterface", realproxy.IPTables: "ClusterCIDR", realproxy.IPTablesLegacy: "BridgeInterface",
	} {
		t.Run(string(mode), func(t *testing.T) {
			w := mustBuild(t, mode, detect)
			w.mustCreateServices(t)
			w.mustStartKubeProxy(t)
			w.mustSync(t)
			w.mustStartSluice(t)
			if v := w.mustAgree(t); v.Services < 9 {
				t.Errorf("only %d Services are compared", v.Services)
			}
			for _, wrong := range w.wrongRules(t) {
				t.Run(wrong.field, func(t *testing.T) {
					lab.Must(t, wrong.do())
					r, err := w.verify()
					lab.Must(t, err)
					found := false
					for _, d := range r.Differences {
						t.Log(d)
						found = found || d.Service == wrong.service && d.Field == wrong.field && d.KubeProxy == wrong.kubeProxy
					}
					if !found {
						t.Errorf("not found: %s of %s is %q", wrong.field, wrong.service, wrong.kubeProxy)
					}
				})
			}
			t.Run("removed", w.testRemoval)
		})
	}
}

// All that is kube-proxy's goes, and nothing else: not the chains of the kubelet, nor rules of others. It does not go
// while kube-proxy runs, or while Sluice does not.
func (w *world) testRemoval(t *testing.T) {
	refused := func(because string, command ...string) {
		t.Helper()
		if printed, err := w.Agent.Run(command...); err == nil || !strings.Contains(err.Error(), because) {
			t.Errorf("%v: %v, %s, want an error with %q", command, err, printed, because)
		}
	}
	cleanup := []string{"cleanup", "--kube-proxy", "--drain", "0s"}
	refused("kube-proxy is running", cleanup...)
	lab.Must(t, w.proxy.Close())
	lab.Must(t, w.loadOthers())
	lab.Must(t, w.Agent.Stop())
	refused("no agent is running", cleanup...)
	w.mustStartSluice(t)

	_, err := w.Agent.Run(cleanup...)
	lab.Must(t, err)
	left := w.mustSave(t)
	for _, gone := range []string{"kube-proxy", "KUBE-SERVICES", "KUBE-SEP-", "KUBE-SVC-", "KUBE-MARK-MASQ", "sluice-keeper"} {
		if strings.Contains(left, gone) {
			t.Errorf("%q is left in:\n%s", gone, left)
		}
	}
	if !strings.Contains(left, "MINE") || w.mode != realproxy.NFTables && !strings.Contains(left, "KUBE-FIREWALL") {
		t.Errorf("rules of others are gone:\n%s", left)
	}
	refused("kube-proxy has no rules", "verify", "--against", "kube-proxy")
	if printed, err := w.Agent.Run(cleanup...); err != nil || printed != "kube-proxy has no rules here\n" {
		t.Errorf("a second cleanup: %q, %v", printed, err)
	}

	node := w.Lab.Nodes[0].Namespace
	lab.MustVeth(t, lab.End{Namespace: node, Device: "kube-ipvs0"}, lab.End{Namespace: node, Device: "kube-ipvs1"})
	refused("IPVS", cleanup...)
	refused("IPVS", "verify", "--against", "kube-proxy")
}

// loadOthers adds a chain that is not kube-proxy's.
func (w *world) loadOthers() error {
	if w.mode == realproxy.NFTables {
		return w.Lab.Nodes[0].Netfilter("table ip MINE { }\n")
	}

	return w.restore("*filter\n:MINE - [0:0]\n-A FORWARD -j MINE\nCOMMIT\n")
}

// mustSave returns the rules that there are, in the words of the mode's tool.
func (w *world) mustSave(t *testing.T) string {
	t.Helper()
	command := []string{"nft", "list", "ruleset"}
	if w.mode != realproxy.NFTables {
		command = []string{"iptables-" + w.variant() + "-save"}
	}
	rules, err := lab.Output(w.Lab.Nodes[0].Namespace, nil, command[0], command[1:]...)
	lab.Must(t, err)

	return rules
}

// restore loads rules in the words of iptables-save.
func (w *world) restore(text string) error {
	cmd := exec.Command("iptables-"+w.variant()+"-restore", "--noflush")
	cmd.Stdin = strings.NewReader(text)
	if err := lab.Start(w.Lab.Nodes[0].Namespace, nil, cmd); err != nil {
		return err
	}

	return cmd.Wait()
}

// mustCreateServices creates Services that differ in each field that kube-proxy reads.
func (w *world) mustCreateServices(t *testing.T) {
	t.Helper()
	local, remote := w.Local()[0], w.Remote()[0]
	both := scene.ReadyAll(local, remote)
	v4, v6 := scene.VirtualIPs()
	e4, e6 := scene.VirtualIPs()
	one4, one6 := scene.VirtualIPs()
	create := func(name string, endpoints []scene.Endpoint, changes ...scene.Change) {
		if endpoints != nil {
			w.SetEndpoints(t, name, endpoints...)
		}
		w.CreateService(t, name, changes...)
	}
	create("web", both, scene.NodePort)
	create("sticky", both, scene.Affinity(600), scene.NodePort)
	create("empty", nil, scene.NodePort)
	create("far", scene.ReadyAll(remote), scene.NodePort, scene.ExternalLocal, scene.InternalLocal)
	create("near", both, scene.NodePort, scene.ExternalLocal, scene.InternalLocal)
	create("leaving", []scene.Endpoint{{Pod: local, Is: scene.Draining}, {Pod: remote, Is: scene.Ending}}, scene.NodePort)
	create("external", both, scene.ExternalIPs(e4, e6))
	create("ranges", both, scene.LoadBalancer, scene.ExternalLocal, scene.SourceRanges("192.168.50.0/24", "192.168.51.0/24", "10.0.0.0/8", "10.1.0.0/16", "fd00:50::/64", "fd00:51::/65"))
	w.SetLoadBalancer(t, "ranges", corev1.LoadBalancerIngress{IP: v4}, corev1.LoadBalancerIngress{IP: v6})
	create("range", both, scene.LoadBalancer, scene.SourceRanges("172.16.0.0/12", "2001:db8:8000::/33"))
	w.SetLoadBalancer(t, "range", corev1.LoadBalancerIngress{IP: one4}, corev1.LoadBalancerIngress{IP: one6})
}

// verdict is what verify prints.
type verdict struct {
	Mode        string
	Services    int
	Differences []kubeproxy.Difference
}

// verify runs the verb; that there are differences is not an error.
func (w *world) verify() (verdict, error) {
	var stdout, stderr bytes.Buffer
	failed := w.Agent.Exec(&stdout, &stderr, "verify", "--against", "kube-proxy", "-o", "json")
	var v verdict
	if err := json.Unmarshal(stdout.Bytes(), &v); err != nil {
		return v, fmt.Errorf("%w: %s", failed, &stderr)
	}
	if (failed == nil) != (len(v.Differences) == 0) {
		return v, fmt.Errorf("%d differences, and the verb ends with %v", len(v.Differences), failed)
	}

	return v, nil
}

// mustAgree waits until verify finds that kube-proxy has programmed all that Sluice has.
func (w *world) mustAgree(t *testing.T) (last verdict) {
	t.Helper()
	lab.Eventually(t, "kube-proxy's rules are those of Sluice", func() (err error) {
		last, err = w.verify()
		if err == nil && len(last.Differences) > 0 {
			err = fmt.Errorf("differences: %v", last.Differences)
		}

		return err
	})

	return last
}

// wrongRule is a change by hand, and what verify should say about it.
type wrongRule struct {
	service, field, kubeProxy string
	do                        func() error
}

func (w *world) wrongRules(t *testing.T) []wrongRule {
	t.Helper()
	web, sticky := w.Objects.Namespace+"/web:tcp", w.Objects.Namespace+"/sticky:tcp"
	empty := w.clusterIP(t, "empty")
	if w.mode == realproxy.NFTables {
		load := func(format string, args ...any) func() error {
			return func() error { return w.Lab.Nodes[0].Netfilter(fmt.Sprintf(format, args...)) }
		}
		chain := w.chainOf(t, w.clusterIP(t, "web"))

		return []wrongRule{
			{web, "backends", "10.244.9.9:8080", load("flush chain ip kube-proxy %[1]s\nadd rule ip kube-proxy %[1]s meta l4proto tcp dnat to 10.244.9.9:8080\n", chain)},
			{w.Objects.Namespace + "/empty:tcp", "whenEmpty", "drop", load("delete element ip kube-proxy no-endpoint-services { %[1]s . tcp . 80 }\nadd element ip kube-proxy no-endpoint-services { %[1]s . tcp . 80 comment %q : drop }\n", empty, w.Objects.Namespace+"/empty:tcp")},
			{sticky, "exists", "false", load("delete element ip kube-proxy service-ips { %s . tcp . 80 }\n", w.clusterIP(t, "sticky"))},
		}
	}
	tables := func(text string) func() error { return func() error { return w.restore(text) } }
	chain := w.chainOf(t, w.clusterIP(t, "web"))
	stickyIP := w.clusterIP(t, "sticky")

	return []wrongRule{
		{web, "backends", "10.244.9.9:8080", tables(fmt.Sprintf("*nat\n:%[1]s - [0:0]\n:KUBE-SEP-WRONG - [0:0]\n-A KUBE-SEP-WRONG -p tcp -j DNAT --to-destination 10.244.9.9:8080\n-A %[1]s -j KUBE-SEP-WRONG\nCOMMIT\n", chain))},
		{w.Objects.Namespace + "/empty:tcp", "whenEmpty", "drop", tables(fmt.Sprintf("*filter\n-I KUBE-SERVICES -d %s/32 -p tcp --dport 80 -j DROP\nCOMMIT\n", empty))},
		{sticky, "affinitySeconds", "0", tables(fmt.Sprintf("*nat\n:%s - [0:0]\nCOMMIT\n*nat\n-A %s -j KUBE-SEP-WRONG\nCOMMIT\n", w.chainOf(t, stickyIP), w.chainOf(t, stickyIP)))},
	}
}

// clusterIP returns the IPv4 address of a Service.
func (w *world) clusterIP(t *testing.T, name string) string {
	t.Helper()
	svc, err := w.Client.CoreV1().Services(w.Objects.Namespace).Get(t.Context(), name, metav1.GetOptions{})
	lab.Must(t, err)

	return svc.Spec.ClusterIPs[0]
}

// chainOf returns the chain to which kube-proxy's rules lead packets to port 80 of an address, by TCP.
func (w *world) chainOf(t *testing.T, address string) string {
	t.Helper()
	pattern := regexp.MustCompile(`(?m)` + regexp.QuoteMeta(address) + ` \. tcp \. 80 : goto ([^ ,]+)`)
	if w.mode != realproxy.NFTables {
		pattern = regexp.MustCompile(`(?m)-A KUBE-SERVICES -d ` + regexp.QuoteMeta(address) + `/32 -p tcp .* -j (KUBE-\S+)$`)
	}
	rules := w.mustSave(t)
	found := pattern.FindStringSubmatch(rules)
	if found == nil {
		t.Fatalf("no chain for %s in:\n%s", address, rules)
	}

	return found[1]
}

// variant is that of iptables.
func (w *world) variant() string {
	if w.mode == realproxy.IPTablesLegacy {
		return "legacy"
	}

	return "nft"
}
