package devices

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustExplain runs `sluice explain` on node-1.
func (w *world) mustExplain(t *testing.T, args ...string) explain.Explanation {
	t.Helper()
	out, err := w.agents[0].Run(append([]string{"explain", "-o", "json"}, args...)...)
	lab.Must(t, err)
	var is explain.Explanation
	lab.Must(t, json.Unmarshal([]byte(out), &is))

	return is
}

// ranged is a Service whose load balancer one client may dial, with an endpoint.
const ranged = `
apiVersion: v1
kind: Service
metadata: {namespace: lab, name: ranged}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.77
  loadBalancerSourceRanges: ["%s/32"]
  ports: [{name: http, protocol: TCP, port: 80}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.77}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: lab, name: ranged-4, labels: {kubernetes.io/service-name: ranged}}
addressType: IPv4
ports: [{name: http, protocol: TCP, port: 8080}]
endpoints: [{addresses: ["%s"], nodeName: node-2}]
`

// says returns the step of that name.
func says(is explain.Explanation, name string) string {
	i := slices.IndexFunc(is.Steps, func(s explain.Step) bool { return s.Name == name })
	if i < 0 {
		return ""
	}

	return is.Steps[i].Text
}

// TestExplain compares what `sluice explain` tells with what clients in each place then see, of what a
// Service alone does not show: where the client is, what a backend sees of it, and what lies between.
//
//	pod-1-0, opted out by its annotation ─▶ its device ─▶ pod-2-0
//	pod-1-1 ─▶ pod-2-0, which it keeps
//	client ─▶ node-1, turned around, or through its firewall ─▶ pod-2-0
func TestExplain(t *testing.T) {
	for _, attach := range []string{"tcx", "clsact"} {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{Attachment: lab.Bridged, OverlayMTU: 1450, PodsPerNode: 3},
				agent:  []string{"--pod-opt-out", "--device-attach", attach},
			})
			lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "pods.yaml"), []byte(optOuts), 0o644))
			node, behind := w.Nodes[0], w.Nodes[1].Pods[0]
			lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "ranged.yaml"), fmt.Appendf(nil, ranged, node.Pods[2].IPv4, behind.IPv4), 0o644))
			web := service{number: 1, backends: []backend{onPod(behind), onPod(w.Nodes[1].Pods[1])}, sticky: true}
			w.start(t, web)
			lab.Eventually(t, "the Pods have opted out", func() error {
				s, err := w.agents[0].Status()
				if err == nil && len(s.OptedOut) != 2 {
					err = fmt.Errorf("%d have", len(s.OptedOut))
				}

				return err
			})
			at := web.at(clusterIP, ipv4, node)
			dial := func(t *testing.T, pod int, uid string) lab.Reply {
				t.Helper()
				cgroup := mustChild(t, w.cgroups[0], "pod"+uid+"-7d0e-4a3e-9d51-6a1f0c2b9e8f", "app")
				caller := lab.MustCaller(t, node.Pods[pod].Namespace, cgroup)
				caller.Exchange(lab.Exchange{Network: "tcp", Address: at, Timeout: dialTimeout})
				reply, err := caller.Exchange(lab.Exchange{Network: "tcp", Address: at, Timeout: dialTimeout})
				lab.Must(t, err)

				return reply
			}

			t.Run("a pod that has opted out", func(t *testing.T) {
				answer, err := lab.ParseAnswer(dial(t, 0, "00000000").Text)
				lab.Must(t, err)
				is := w.mustExplain(t, "--from", node.Pods[0].IPv4.String(), "--to", at)
				if !strings.Contains(says(is, "socket"), "the pod has opted out") || !strings.Contains(says(is, "decided"), "of class pods") {
					t.Errorf("its steps are %v", is.Steps)
				}
				if !slices.ContainsFunc(is.Endpoints, func(e explain.Endpoint) bool {
					return e.Odds == 1 && e.Address == answer.Local && e.Client == answer.Client.Addr().String()
				}) {
					t.Errorf("%s saw %s, and explain has %+v", answer.Local, answer.Client, is.Endpoints)
				}
			})
			t.Run("a pod that keeps its backend", func(t *testing.T) {
				from := node.Pods[2].IPv4.String()
				before := w.mustExplain(t, "--from", from, "--to", "service-1:tcp")
				answer, err := lab.ParseAnswer(dial(t, 2, "22222222").Text)
				lab.Must(t, err)
				is := w.mustExplain(t, "--from", from, "--to", "service-1:tcp")
				if before.Endpoints[0].Odds != 0.5 || is.Answer != "translated to "+answer.Local.String()+" of Service lab/service-1:tcp, which the client keeps (session affinity)" {
					t.Errorf("before: %+v; %s then answered, and explain has %q", before.Endpoints, answer.Local, is.Answer)
				}
				if says(is, "decided") != "when the socket connects" || !strings.Contains(says(is, "client"), "a pod of this node") {
					t.Errorf("its steps are %v", is.Steps)
				}
			})
			t.Run("a pod that source ranges admit", func(t *testing.T) {
				is := w.mustExplain(t, "--from", node.Pods[2].IPv4.String(), "--to", "203.0.113.77:80")
				if !strings.Contains(says(is, "socket"), "source ranges") || !strings.Contains(says(is, "decided"), "of class pods") {
					t.Errorf("its steps are %v", is.Steps)
				}
				is = w.mustExplain(t, "--from", node.Pods[1].IPv4.String(), "--to", "203.0.113.77:80")
				if !strings.HasPrefix(is.Answer, "dropped: the client is not in the loadBalancerSourceRanges") {
					t.Errorf("of another pod it tells %q", is.Answer)
				}
			})
			t.Run("a client outside", func(t *testing.T) {
				args := []string{"--from", w.Client.IPv4.String(), "--to", web.at(nodePort, ipv4, node)}
				is := w.mustExplain(t, args...)
				if !strings.HasPrefix(is.Endpoints[0].Way, "turned around") {
					t.Errorf("the way is %q", is.Endpoints[0].Way)
				}
				caller := w.outside(t)
				reply, err := caller.Exchange(lab.Exchange{Network: "tcp", Address: args[3], Timeout: dialTimeout})
				lab.Must(t, err)
				answer, err := lab.ParseAnswer(reply.Text)
				lab.Must(t, err)
				if is.Endpoints[0].Client != answer.Client.Addr().String() {
					t.Errorf("%s saw %s, and explain has %+v", answer.Local, answer.Client, is.Endpoints)
				}

				lab.Must(t, node.Netfilter(`table ip wall { chain forward { type filter hook forward priority filter; tcp dport 8080 drop; }
					chain other { type filter hook forward priority filter; tcp dport 81 drop; ct state invalid drop; }; }`))
				lab.Eventually(t, "explain finds the firewall", func() error {
					is := w.mustExplain(t, args...)
					want := []string{"a firewall drops it: nftables ip wall forward drops packets to ports 8080"}
					if !slices.Equal(is.Beyond, want) || !strings.HasSuffix(is.Answer, ", but "+want[0]) {
						return fmt.Errorf("%q, beyond it %q", is.Answer, is.Beyond)
					}

					return nil
				})
			})
		})
	}
}
