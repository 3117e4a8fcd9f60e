package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent that is killed while it programs a node for the first time leaves
// no frontend without its backends. The next one goes on from there.
//
//	node-1, with the manifests of 1000 Services with 5 endpoints each
func TestKilledWhileProgramming(t *testing.T) {
	manifests := t.TempDir()
	lab.Must(t, os.WriteFile(filepath.Join(manifests, "all.yaml"), []byte(manyManifests()), 0o600))
	agent, err := sluice.NewNode(sluice.Config{
		Binary:    sluice.MustBinary(t),
		NodeName:  "node-1",
		Namespace: lab.MustNamespace(t, "node"),
		Cgroup:    lab.MustCgroup(t, "e2e"),
		Manifests: manifests,
	})
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, agent.Close()) })

	for part := range uint32(5) {
		lab.Must(t, agent.Start())
		pinned := mustBegin(t, agent, 1+part*services*endpoints/5)
		time.Sleep(rand.N(10 * time.Millisecond))
		lab.Must(t, agent.Kill())
		t.Logf("killed with %d frontends in the maps", len(mustLeadSomewhere(t, pinned)))
	}
	lab.Must(t, agent.Start())
	sluice.MustWait(t, agent)
	out, err := agent.Run("verify")
	if want := fmt.Sprintf("%d frontends", len(status.ProbeFrontends(1))+4*services); err != nil || !strings.HasPrefix(out, want) {
		t.Errorf("verify prints %q, %v, want %s", out, err, want)
	}
}

// mustBegin waits until an agent has written a backend at this place, and returns the maps.
func mustBegin(t testing.TB, agent *sluice.Node, place uint32) *maps.Pinned {
	t.Helper()
	var pinned *maps.Pinned
	lab.Eventually(t, "there are maps with room for it", func() bool {
		var err error
		if pinned, err = maps.Load(agent.BPFRoot()); err != nil {
			return false
		}
		if pinned.Backends.Len() <= int(place) {
			lab.Must(t, pinned.Close())

			return false
		}

		return true
	})
	t.Cleanup(func() { pinned.Close() })
	for deadline := time.Now().Add(waitTimeout); pinned.Backends.Get(place).Id == 0 && time.Now().Before(deadline); {
	}

	return pinned
}

// The Services of [manyManifests], and how many endpoints each has.
const services, endpoints = 1000, 5

// manyManifests are Services with endpoints.
func manyManifests() string {
	var text strings.Builder
	for i := range services {
		fmt.Fprintf(&text, `---
{apiVersion: v1, kind: Service, metadata: {name: web-%[1]d, namespace: default},
 spec: {clusterIP: 10.96.%[2]d.%[3]d, clusterIPs: [10.96.%[2]d.%[3]d], ports: [{port: 80, protocol: TCP}]}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, ports: [{name: "", port: 8080}],
 metadata: {name: web-%[1]d, namespace: default, labels: {kubernetes.io/service-name: web-%[1]d}}, endpoints: [`,
			i, i/250, 1+i%250)
		for e := range endpoints {
			fmt.Fprintf(&text, "{addresses: [10.244.%d.%d]},", e, 2+i%250)
		}
		text.WriteString("]}\n")
	}

	return text.String()
}
