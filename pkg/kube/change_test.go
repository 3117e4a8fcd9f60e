package kube

import (
	"fmt"
	"strings"
	"testing"
)

func TestReadChange(t *testing.T) {
	const web = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
	for _, test := range []struct {
		name, content string
		want          string // services, slices, this node's zone
		problems      []string
		err           []string
	}{
		{"a Service, as a List", "apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(strings.TrimSpace(web), "\n", "\n  "), "1 0 ", nil, nil},
		{"JSON", `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1", "labels": {"topology.kubernetes.io/zone": "zb"}}}`, "0 0 zb", nil, nil},
		{"another node's Node", "apiVersion: v1\nkind: Node\nmetadata: {name: node2, labels: {topology.kubernetes.io/zone: zb}}", "0 0 ", nil, nil},
		{"a slice with an address that is none",
			"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\nendpoints: [{addresses: [x]}]",
			"0 0 ", nil, []string{"EndpointSlice default/a", "endpoints[0].addresses[0]"}},
		{"a kind that nothing here reads", web + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}", "1 0 ", []string{`kind: "ConfigMap" of apiVersion "v1" is not read here`}, nil},
		{"a Pod", web + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {nodeName: node1, containers: [{name: a}]}", "1 0 ", []string{"Pod default/a: it is not considered"}, nil},
		{"a Service that no API server has completed", strings.Replace(web, "clusterIP: 10.96.0.1, ", "", 1), "1 0 ", nil,
			[]string{"Service shop/web: spec.clusterIP: missing", "kubectl apply --dry-run=server"}},
		{"an annotation that does not count", strings.Replace(web, "namespace: shop", `namespace: shop, annotations: {sluice-lb.io/algorithm: best}`, 1), "1 0 ",
			[]string{"sluice-lb.io/algorithm"}, nil},
		{"a field that there is not", strings.Replace(web, "ports:", "port:", 1), "0 0 ", nil, []string{`unknown field "spec.port"`}},
		{"no YAML", "a: [", "0 0 ", nil, []string{"change: "}},
	} {
		t.Run(test.name, func(t *testing.T) {
			change, problems, err := ReadChange([]byte(test.content), "node1", false)
			zone := ""
			if change.Node != nil {
				zone = change.Node.Zone
			}
			if got := fmt.Sprintf("%d %d %s", len(change.Services), len(change.Slices), zone); got != test.want {
				t.Errorf("it has %q, want %q", got, test.want)
			}
			var texts []string
			for _, p := range problems {
				texts = append(texts, p.String())
			}
			mustContain(t, strings.Join(texts, "\n"), test.problems)
			text := ""
			if err != nil {
				text = err.Error()
			}
			mustContain(t, text, test.err)
		})
	}
}

// mustContain checks that a text has all of these, and is empty if there are none.
func mustContain(t *testing.T, text string, want []string) {
	t.Helper()
	if len(want) == 0 && text != "" {
		t.Errorf("unexpected: %s", text)
	}
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in %q", w, text)
		}
	}
}

// Of what is deleted, only the names count, and a Node is not.
func TestReadDeletion(t *testing.T) {
	change, problems, err := ReadChange([]byte("apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}]}"), "node1", true)
	if err != nil || len(problems) > 0 || len(change.Services) != 1 || !change.Deleted {
		t.Errorf("the change is %v, with the problems %v: %v", change, problems, err)
	}
	if _, _, err := ReadChange([]byte("apiVersion: v1\nkind: Node\nmetadata: {name: node1}"), "node1", true); err == nil {
		t.Error("a Node is deleted without an error")
	}
}
