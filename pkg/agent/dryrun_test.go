package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

const manifest = `
apiVersion: v1
kind: Service
metadata: {namespace: ns, name: web}
spec:
  clusterIP: 10.96.0.1
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Service
metadata: {namespace: ns, name: thief}
spec:
  clusterIP: 10.96.0.2
  externalIPs: [10.96.0.1]
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: ns, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.0.1.10]}]
`

func TestDryRun(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	services, problems, err := DryRun(t.Context(), Config{NodeName: "node-1", Manifests: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if len(services) != 2 || services[1].Name != "ns/web" || len(services[1].Ports[0].Backends) != 1 {
		t.Fatalf("services are %+v, want ns/thief and ns/web with a backend", services)
	}
	if len(problems) != 0 {
		t.Errorf("problems are %v, want none", problems)
	}
	if services[0].Error == "" || services[1].Error != "" {
		t.Errorf("errors are %q and %q, want one for ns/thief", services[0].Error, services[1].Error)
	}
}
