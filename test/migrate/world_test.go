// Package migrate shows the way from kube-proxy to Sluice and back, with the real kube-proxy in each of its modes on
// a node with an API server: what `sluice verify --against kube-proxy` finds, and that the steps of docs/migrate.md
// end no connection.
package migrate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("most-ports")
	cluster.Run(m)
}

// world is a stage of two nodes. On the first one, kube-proxy and Sluice may run, with the same configuration.
type world struct {
	*scene.Scene
	mode   realproxy.Mode
	config string // file
	proxy  *realproxy.Proxy
}

// Both have the ports that they have in a cluster: Sluice takes them over when kube-proxy has ended.
const config = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %q, qps: 100, burst: 200}
hostnameOverride: %s
detectLocalMode: %s
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
detectLocal: {bridgeInterface: br0}
nftables: {minSyncPeriod: 50ms}
iptables: {minSyncPeriod: 50ms}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

// mustBuild returns a world in which neither proxy runs. They distinguish pods from other clients by detect, a
// detectLocalMode.
func mustBuild(t *testing.T, mode realproxy.Mode, detect string) *world {
	t.Helper()
	if err := realproxy.Missing(mode); err != nil {
		t.Skip(err)
	}
	w := &world{Scene: scene.MustSet(t, scene.Config{Unready: true}), mode: mode}
	w.config = filepath.Join(t.TempDir(), "config.conf")
	text := fmt.Sprintf(config, mode.Name(), cluster.Shared(t).Kubeconfig(), w.NodeName(w.Lab.Nodes[0]), detect)
	lab.Must(t, os.WriteFile(w.config, []byte(text), 0o600))
	w.Agent.SetArgs("--config", w.config)

	return w
}

// mustStartKubeProxy starts kube-proxy, and does not wait until it has programmed anything.
func (w *world) mustStartKubeProxy(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(w.config)
	lab.Must(t, err)
	proxy, err := realproxy.Start(realproxy.Config{
		Mode:      w.mode,
		Binary:    cluster.Shared(t).Binary("kube-proxy"),
		Config:    string(text),
		Namespace: w.Lab.Nodes[0].Namespace,
		Directory: t.TempDir(),
	})
	lab.Must(t, err)
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			lab.KeepLog(t, "kube-proxy", proxy.Log())
		}
	})
	w.proxy = proxy
}

// mustSync waits until kube-proxy has programmed what there is. It must not be called while the agent runs, which may
// have kube-proxy's ports.
func (w *world) mustSync(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lab.Must(t, w.proxy.Synced(ctx))
}

// mustStartSluice starts the agent and waits until it works.
func (w *world) mustStartSluice(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			lab.KeepLog(t, "agent", w.Agent.Log())
		}
	})
	lab.Must(t, w.Agent.Start())
	sluice.MustWait(t, w.Agent)
}
