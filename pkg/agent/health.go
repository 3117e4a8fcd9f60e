package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// syncPeriod is kube-proxy's default.
const syncPeriod = 30 * time.Second

func newProxy(cfg Config) *health.Proxy {
	return health.NewProxy(health.ProxyConfig{
		Families: node.Families(),
		Timeout:  2 * orDefault(cfg.SyncPeriod, syncPeriod),
	})
}

// serveHealth answers the kubelet and load balancers until ctx ends. It asks
// nobody who could be busy.
func (a *agent) serveHealth(ctx context.Context) error {
	if !a.cfg.HealthzAddress.IsValid() {
		return nil
	}
	err := health.Server{
		Name:    "healthz",
		Address: a.cfg.HealthzAddress,
		Handler: health.Handler(health.Config{
			Proxy:    a.proxy,
			Eligible: a.model.eligible.Load,
			Ready:    a.unready,
			Observe:  a.mail.metrics.Probed,
		}),
		HardFail: a.cfg.BindAddressHardFail,
		Log:      a.cfg.Log,
	}.Run(ctx)
	if err != nil {
		a.cfg.record(kube.Event{Reason: kube.ReasonHealthzFailed, Action: actionStart, Note: err.Error()})
	}

	return err
}

// unready returns why the agent cannot be relied on: Services are not known, hooks are
// not effective, pins are missing, or devices are not attached. Any goroutine may call
// it.
func (a *agent) unready() []string {
	var reasons []string
	if !a.known.Load() {
		reasons = append(reasons, "not all Services and endpoints are known and programmed yet")
	}
	if err := a.keeper.checked(); err != nil {
		reasons = append(reasons, fmt.Sprintf("hooks are not effective: %v", err))
	}

	if err := a.keeper.pinned(); err != nil {
		reasons = append(reasons, err.Error())
	}

	return append(reasons, a.devices.obstacles()...)
}

// settle says of all that was taken up that it is in force, unless nothing can be
// written. Services of which only their own writes fail are told of elsewhere: others
// work. So do others while a heavy Service is written slice by slice, or decided: all
// that are due take turns, so a change waits for its turn and not for the heavy one. What
// would be late is a loop that does not come by here.
func (a *agent) settle() {
	if !a.synced {
		return
	}
	a.known.Store(true)
	if a.failing {
		if err := tryWrite(a.frontends); err != nil {
			if a.unwritable == nil {
				a.cfg.Log.Error("nothing can be programmed; trying again", "error", err)
			}
			a.unwritable = err

			return
		}
		a.failing, a.unwritable = false, nil
	}
	busy := a.busy()
	a.model.checks.publish(a.checks, func(name lb.ServiceName) bool { return !busy || a.writer.Programmed(name) })
	a.proxy.Applied()
}

// tryWrite says whether a map can be written, by writing what it says already. A
// map without the probe's frontend is left alone: hooks are not effective then,
// which is told too.
func tryWrite(frontends maps.Table[maps.FrontendKey, uint32]) error {
	k := probeFrontend().Key
	key := maps.FrontendKeyOf(k.Addr, k.Port, uint8(k.Protocol), uint8(k.Scope))
	value, ok, err := frontends.Lookup(key)
	if err != nil || !ok {
		return err
	}

	return frontends.Put(key, value)
}
