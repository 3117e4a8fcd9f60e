package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/pkg/events"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
)

// syncPeriod is kube-proxy's default.
const syncPeriod = 30 * time.Second

func newProxy(cfg Config) *health.Proxy {
	return health.NewProxy(health.ProxyConfig{
		Families: node.Families(),
		Timeout:  2 * orDefault(cfg.SyncPeriod, syncPeriod),
	})
}

// serveHealth answers the kubelet and load balancers until ctx ends. Its answers wait for
// no other goroutine, so that they show when one hangs.
func (a *agent) serveHealth(ctx context.Context, unready func() []string) error {
	if !a.cfg.HealthzAddress.IsValid() {
		return nil
	}

	return health.Server{
		Name:    "healthz",
		Address: a.cfg.HealthzAddress,
		Handler: health.Handler(health.Config{
			Proxy:    a.proxy,
			Eligible: a.model.eligible.Load,
			Ready:    unready,
			Observe:  a.queue.metrics.Probed,
		}),
		HardFail: a.cfg.BindAddressHardFail,
		Log:      a.cfg.Log,
	}.Run(ctx)
}

// unready returns why the agent is not ready: Services are not known, hooks are not
// effective, pins are missing, or devices are not attached.
func unready(known bool, effective, unpinned error, devices []string) []string {
	var reasons []string
	if !known {
		reasons = append(reasons, "not all Services and endpoints are known and programmed yet")
	}
	if effective != nil {
		reasons = append(reasons, fmt.Sprintf("hooks are not effective: %v", effective))
	}
	if unpinned != nil {
		reasons = append(reasons, unpinned.Error())
	}

	return append(reasons, devices...)
}

// reportApplied reports to the health checks that the changes of this round are in force,
// unless no map can be written. If only writes of some Services fail, the node stays healthy,
// because the others work; [agent.reportImpaired] reports those Services. The node also stays
// healthy while a heavy Service is decided or written slice by slice, because other changes
// do not wait for it. It becomes unhealthy when the loop no longer reaches this call.
func (a *agent) reportApplied() {
	if !a.synced {
		return
	}
	a.known.Store(true)
	if a.failing {
		// Without the probe's frontend hooks are not effective, which the hook monitor reports.
		if err := a.writer.TryWrite(status.ProbeFrontend().Key); err != nil {
			if a.unwritable == nil {
				a.cfg.Log.Error("nothing can be programmed; trying again", "error", err)
			}
			a.unwritable = err

			return
		}
		a.failing, a.unwritable = false, nil
	}
	busy := a.busy()
	a.checks.Publish(func(name lb.ServiceName) bool { return !busy || a.writer.Programmed(name) })
	a.proxy.Applied()
}

// newHealthServices returns the servers of health check node ports.
func newHealthServices(cfg Config, proxy *health.Proxy, events events.Recorder) *health.Services {
	return health.NewServices(health.ServicesConfig{
		Healthy: proxy.Healthy,
		Failed: func(service lb.ServiceName, address netip.AddrPort, err error) {
			cfg.Log.Error("health check node port does not answer; trying again", "service", service, "address", address, "error", err)
			events.CheckFailed(service, cfg.NodeName, err)
		},
	})
}
