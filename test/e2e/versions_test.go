package e2e

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// What a cluster of each version has: a Service, its endpoints, and a ServiceCIDR of its own.
const objectsOfVersions = `
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: more}
spec: {cidrs: [10.99.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  clusterIP: 10.96.0.77
  ports: [{name: http, port: 80, targetPort: 8080, nodePort: 30080, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.244.1.2], nodeName: node-1, conditions: {ready: true}}]
`

// An agent finds in the API of each older version that is supported all that it needs. The API server is
// that of the newest, and offers what that version did. All other tests use the newest one.
func TestAPIOfOlderVersions(t *testing.T) {
	for _, version := range []string{"1.34", "1.35", "1.36"} {
		t.Run("of "+version, func(t *testing.T) {
			api := cluster.Start(t, "--emulated-version="+version)
			l := lab.MustNew(t, lab.Config{Nodes: 1, PodsPerNode: 1})
			self := l.Nodes[0]
			pod := self.Pods[0]
			lab.MustServe(t, pod.Namespace, pod.Name, pod.At(8080)...)
			client, err := kubernetes.NewForConfig(api.Config())
			lab.Must(t, err)
			_, err = client.CoreV1().Nodes().Create(t.Context(), object.Node("node-1", self.IPv4.String()), metav1.CreateOptions{})
			lab.Must(t, err)
			api.KubectlInput(t, objectsOfVersions, "apply", "-f", "-")

			cgroup := lab.MustCgroup(t, "versions")
			api.MustTunnel(t, self.Namespace)
			sluice.MustNode(t, sluice.Config{
				Binary: sluice.MustBinary(t), Namespace: self.Namespace, Cgroup: cgroup, NodeName: "node-1",
				Kubeconfig: api.Kubeconfig(), Args: []string{"--flow-table-memory", "4Mi"},
			})
			node := scene.MustClientIn(t, "node", self.Namespace, cgroup)
			for _, address := range []string{"10.96.0.77:80", "127.0.0.1:30080", self.IPv4.String() + ":30080"} {
				scene.MustReach(t, node.To("tcp", address), pod.Name)
			}
			scene.MustFail(t, node.To("tcp", "10.99.0.9:80"), scene.Dropped) // in the ServiceCIDR, and no Service's
			lab.Eventually(t, "the agent's Event arrives", func() bool {
				events, err := client.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{})
				lab.Must(t, err)
				for _, e := range events.Items {
					if e.Reason == "Starting" && e.ReportingController == "sluice" {
						return true
					}
				}

				return false
			})
		})
	}
}
